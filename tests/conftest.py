"""One thread: tensors as small as the tests' are slower on several, and on a busy machine many times slower."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; processes that tests start inherit it
