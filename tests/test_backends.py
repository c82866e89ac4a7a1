"""The backends agree: same first weights, same losses, and checkpoints that each reads of the other."""

from pathlib import Path

import numpy as np
import pytest

import train
from model import backend as backends
from model.config import GPTConfig
from run.log import read_log
from settings import Settings

TINY = "--corpus stdlib --n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 8 --seed 1"
TINY += " --log-every 1 --eval-every 0 --warmup 5 --lr 3e-3 --min-lr 1e-3"
# fp32: sums in another order, through AdamW's division. Below it also the roundings differ: NumPy rounds attention's
# probabilities, as fused kernels do, and weight gradients once a batch.
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-3, "fp16": 1e-3}


def run(out: Path, flags: str) -> list[float]:
    assert train.main([*flags.split(), "--out", str(out)]) == 0
    return [row.loss for row in read_log(out / "log.csv")]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_all_backends_train_alike(tmp_path, dtype):
    emulation = "" if dtype == "fp32" else "--emulation on"
    torch = run(tmp_path / "torch", f"{TINY} --backend torch --device cpu --dtype {dtype} {emulation} --steps 20")
    numpy = run(tmp_path / "numpy", f"{TINY} --backend numpy --dtype {dtype} --steps 20")
    np.testing.assert_allclose(numpy, torch, rtol=TOLERANCES[dtype])
    assert torch[-1] < torch[0] - 0.5


@pytest.mark.parametrize(("first", "second"), [("torch", "numpy"), ("numpy", "torch")])
def test_a_run_begun_by_one_backend_is_continued_by_the_other(tmp_path, first, second):
    whole = run(tmp_path / "whole", f"{TINY} --backend {first} --dtype fp32 --steps 12")
    # stopped at half, with the schedule of the whole
    run(tmp_path / "half", f"{TINY} --backend {first} --dtype fp32 --steps 12 --save-every 6")
    resumed = run(tmp_path / "resumed", f"--resume {tmp_path / 'half' / 'step-6'} --backend {second}")
    assert len(resumed) == 6
    np.testing.assert_allclose(resumed, whole[6:], rtol=1e-5)


def test_a_numpy_run_resumes_bit_by_bit(tmp_path):
    flags = f"{TINY} --backend numpy --dtype fp16 --dropout 0.1 --steps 12 --save-every 6"
    whole = run(tmp_path / "whole", flags)
    resumed = run(tmp_path / "resumed", f"--resume {tmp_path / 'whole' / 'step-6'}")
    assert resumed == whole[6:]
    for name in ("model.safetensors", "optimizer.safetensors"):
        paths = [tmp_path / run / "step-12" / name for run in ("whole", "resumed")]
        assert paths[0].read_bytes() == paths[1].read_bytes(), name


def test_all_backends_have_the_same_first_state():
    config = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)
    states = {}
    for name in ("torch", "numpy"):
        module = backends.module(name)
        states[name] = module.build(Settings(seed=3), module.hardware("cpu", "fp32", "auto"), config).state()
    for kind, arrays in states["torch"].items():
        assert states["numpy"][kind].keys() == arrays.keys()
        for name, array in arrays.items():
            assert states["numpy"][kind][name].tobytes() == array.tobytes(), name
            assert states["numpy"][kind][name].dtype == array.dtype, name
