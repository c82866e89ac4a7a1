"""The three backends agree: in fp64 to the last digits, and in runs of train.py, which any of them can continue."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from base.dtypes import DTYPES
from engine.tensor import Tensor
from model import backends, engine_gpt, numpy_gpt
from model.config import HEAD, TIED, GPTConfig
from model.minigpt import MiniGPT
from run.log import read_log
from tests.conftest import CONFIG, assert_close, batches, build, gradients, random_weights

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = tuple(backends.MODULES)


# ---- logits, losses and gradients, in fp64


def by_torch(x, y):
    gpt = MiniGPT(CONFIG).double()
    gpt.load_weights(random_weights(np.float64))
    x, y = (torch.from_numpy(np.ascontiguousarray(tokens)) for tokens in (x, y))
    losses = gpt(x, y)
    losses.mean().backward()
    return gpt(x), losses, {name: p.grad for name, p in gpt.named_parameters()}


def by_numpy(x, y):
    weights = random_weights(np.float64)
    weights[HEAD] = weights[TIED]
    hidden, _ = numpy_gpt.hidden(weights, x, CONFIG)
    losses, cache = numpy_gpt.forward(weights, x, y, CONFIG)
    dweights = numpy_gpt.backward(weights, np.full(len(x), 1 / len(x)), cache, CONFIG)
    dweights[TIED] += dweights.pop(HEAD)
    return (hidden @ weights[HEAD].T).reshape(*x.shape, -1), losses, dweights


def by_engine(x, y):
    weights = {name: Tensor(w, requires_grad=True) for name, w in random_weights(np.float64).items()}
    logits = engine_gpt.linear(engine_gpt.hidden(weights, x, CONFIG), weights[TIED])
    losses = engine_gpt.forward(weights, x, y, CONFIG)
    losses.mean().backward()
    return logits.data, losses.data, {name: w.grad for name, w in weights.items()}


@pytest.mark.parametrize("block_size", [8, 3])
@pytest.mark.parametrize("ours", [by_numpy, by_engine])
def test_logits_losses_and_every_gradient_are_torch_s_to_1e_10(ours, block_size):
    x, y = batches(4, block_size).get("train", 0, 0)
    logits, losses, dweights = ours(x, y)
    expected_logits, expected_losses, expected = by_torch(x, y)
    assert logits.dtype == np.float64
    assert_close("logits", logits, expected_logits, 1e-10)
    assert_close("losses of rows", losses, expected_losses, 1e-10)
    assert dweights.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(f"gradient of {name}", dweights[name], gradient, 1e-10)


# ---- runs

FLAGS = "--corpus stdlib --n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 8 --seed 1"
FLAGS += " --log-every 1 --eval-every 0 --warmup 5 --lr 3e-3 --min-lr 1e-3"
# fp32: sums in another order, through AdamW's division. In 16 bits the roundings differ too: NumPy rounds attention's
# probabilities, as fused kernels do, and weight gradients once a batch; the engine rounds those once a shard.
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-3, "fp16": 1e-3}


def losses_of(out: Path, flags: str) -> list[float]:
    """Trains into a folder; the losses in its log."""
    assert train.main([*flags.split(), "--out", str(out)]) == 0
    return [row.loss for row in read_log(out / "log.csv")]


def on_the_cpu(backend: str, dtype: str) -> str:
    return "--device cpu --emulation on" if backend == "torch" and dtype != "fp32" else "--device cpu"


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_backends_train_alike(tmp_path, dtype):
    losses = {
        name: losses_of(
            tmp_path / name, f"{FLAGS} --backend {name} --dtype {dtype} {on_the_cpu(name, dtype)} --steps 20"
        )
        for name in BACKENDS
    }
    for name in BACKENDS:
        np.testing.assert_allclose(losses[name], losses["torch"], rtol=TOLERANCES[dtype], err_msg=name)
    assert losses["torch"][-1] < losses["torch"][0] - 0.5


@pytest.mark.parametrize("first", BACKENDS)
def test_a_run_begun_by_one_backend_is_continued_by_any(tmp_path, first):
    whole = losses_of(
        tmp_path / "whole", f"{FLAGS} --backend {first} --device cpu --dtype fp32 --steps 12 --save-every 6"
    )
    for second in BACKENDS:
        step_6 = tmp_path / "whole" / "step-6"
        resumed = losses_of(tmp_path / second, f"--resume {step_6} --backend {second} --device cpu")
        assert len(resumed) == 6
        np.testing.assert_allclose(resumed, whole[6:], rtol=1e-5, err_msg=second)


@pytest.mark.parametrize(("backend", "recompute"), [("numpy", ""), ("engine", ""), ("engine", "--recompute")])
def test_a_run_on_numpy_resumes_bit_by_bit(tmp_path, backend, recompute):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    losses = losses_of(whole, f"{FLAGS} --backend {backend} --dtype fp16 --dropout 0.1 --steps 12 --save-every 6")
    assert losses_of(resumed, f"--resume {whole / 'step-6'} {recompute}") == losses[6:]
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, expected = (folder / "step-12" / name for folder in (resumed, whole))
        assert ours.read_bytes() == expected.read_bytes(), name


# ---- recomputation


@pytest.mark.parametrize("layers", [True, 2])  # 2 of 3 in one piece: benchmark.py sets the flag to a number
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["engine", "torch"])
def test_recomputation_changes_no_bit(backend, dtype, layers):
    """Of 5 rows, with dropout, scaled as fp16 needs it."""
    config = GPTConfig(11, 8, n_layer=3, n_head=2, n_embd=16, dropout=0.1)
    kept, recomputed = (
        gradients(build(backend, dtype, config, recompute=recompute), batches(5), scale=2.0**10)
        for recompute in (False, layers)
    )
    for name, gradient in kept.items():
        assert gradient.any(), name
        assert recomputed[name].tobytes() == gradient.tobytes(), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_recomputation_changes_no_bit_under_torch_s_own_autocast(dtype):
    config = GPTConfig(11, 8, n_layer=3, n_head=2, n_embd=16, dropout=0.1)
    kept, recomputed = (
        gradients(build("torch", dtype, config, emulation="off", recompute=recompute), batches(5), scale=2.0**10)
        for recompute in (False, True)
    )
    for name, gradient in kept.items():
        assert recomputed[name].tobytes() == gradient.tobytes(), name


# ---- without torch

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of torch raises ImportError
import {script}
status = {script}.main({argv})
assert sys.modules["torch"] is None
sys.exit(status)
"""


def without_torch(script: str, argv: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Runs train.py or sample.py in a process in which torch cannot be imported."""
    code = WITHOUT_TORCH.format(script=script, argv=argv)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize(("backend", "switches"), [("numpy", ""), ("engine", "--recompute")])
def test_training_and_sampling_run_where_torch_is_not_installed(backend, switches, tmp_path):
    sizes = "--corpus stdlib --n-layer 2 --n-head 2 --n-embd 16 --block-size 16 --batch-size 4"
    flags = f"--backend {backend} {sizes} --steps 4 --dtype fp16 --out run {switches}"
    trained = without_torch("train", flags.split(), tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert switches in trained.stdout.split("go on ")[1], "the command to go on forgets a flag"
    assert (tmp_path / "run" / "step-4" / "model.safetensors").is_file()
    resumed = without_torch("train", ["--resume", "run", "--steps", "6"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    drawing = f"--checkpoint run --backend {backend} --prompt import --tokens 5"
    sampled = without_torch("sample", drawing.split(), tmp_path)
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("import")


@pytest.mark.parametrize("script", ["train", "sample"])
def test_without_torch_its_backend_is_refused_in_one_line(script, tmp_path):
    refused = without_torch(script, [], tmp_path)
    assert refused.returncode == 2
    reason = "--backend torch: torch is not installed: pip install -r requirements.txt"
    assert refused.stderr == f"{script}.py: error: {reason}\n"
