"""The active compute dtype, the table, and which files stay free of torch."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from amp import policy
from amp.policy import TABLE, compute_dtype, computing

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = [
    *("amp.policy", "amp.formats", "amp.scaler", "model.config", "model.backends", "optim.schedule"),
    *("data.batches", "data.tokenizers", "run.checkpoint"),
]


def test_fp32_is_the_default():
    assert compute_dtype() == "fp32"


def test_blocks_nest_and_restore_what_was_there():
    with computing("bf16"):
        with computing("fp16"):
            assert compute_dtype() == "fp16"
            with computing("fp32"):
                assert compute_dtype() == "fp32"
            assert compute_dtype() == "fp16"
        assert compute_dtype() == "bf16"
    assert compute_dtype() == "fp32"


def test_an_exception_restores_what_was_there():
    with computing("bf16"):
        with pytest.raises(KeyError), computing("fp16"):
            raise KeyError
        assert compute_dtype() == "bf16"
    assert compute_dtype() == "fp32"


def test_each_thread_has_its_own():
    inside = threading.Barrier(2, timeout=10)

    def work(dtype: str) -> tuple[str, str, str]:
        before = compute_dtype()
        with computing(dtype):
            inside.wait()  # both threads are in their blocks now
            during = compute_dtype()
            inside.wait()
        return before, during, compute_dtype()

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, ["bf16", "fp16"]))
    assert results == [("fp32", "bf16", "fp32"), ("fp32", "fp16", "fp32")]
    assert compute_dtype() == "fp32"


@pytest.mark.parametrize("operation", TABLE)
def test_every_row_names_known_precisions(operation):
    rule = TABLE[operation]
    assert isinstance(rule, policy.Rule)
    assert set(rule) <= {policy.LOW, "fp32"}, rule
    assert rule.accumulate == "fp32", "nothing is summed in 16 bits"
    if rule.operands == "fp32":
        assert rule.result == rule.grad_input == rule.grad_weight == "fp32", rule


def test_matrix_products_and_nothing_else_are_low():
    assert {name for name, rule in TABLE.items() if rule.operands == policy.LOW} == {"linear", "matmul", "attention"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_does_not_load_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False", f"{module}: torch loaded, or {run.stderr}"
