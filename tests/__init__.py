"""Tests; a package, so that they can share helpers.

One thread for everything: tensors as small as the tests' are slower on several threads, and on a busy machine many
times slower. Set here, which is before NumPy and torch are imported; processes that tests start inherit it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
