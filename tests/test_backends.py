"""The three backends agree: in fp64 to the last digits, in ten losses of each precision, and in what they save."""

from pathlib import Path

import numpy as np
import pytest
import torch

import train
from engine.tensor import Tensor
from model import backends, engine_gpt, numpy_gpt
from model.config import HEAD, TIED, GPTConfig, parameters
from model.minigpt import MiniGPT
from run.log import read_log
from settings import Settings
from tests.test_numpy_gpt import without_torch

TINY = "--corpus stdlib --n-layer 2 --n-head 2 --n-embd 32 --block-size 16 --batch-size 8 --seed 1"
TINY += " --log-every 1 --eval-every 0 --warmup 5 --lr 3e-3 --min-lr 1e-3"
# fp32: sums in another order, through AdamW's division. Below it also the roundings differ: NumPy rounds attention's
# probabilities, as fused kernels do, and weight gradients once a batch; the engine rounds them once a shard.
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-3, "fp16": 1e-3}
CONFIG = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)
BACKENDS = tuple(backends.MODULES)


# ---- logits, loss and gradients, in fp64


def random_weights() -> dict[str, np.ndarray]:
    """No parameter at its start: biases that are not 0, LayerNorms that are not 1."""
    random = np.random.default_rng(0)
    return {p.name: 0.2 * random.standard_normal(p.shape) + (p.init == "ones") for p in parameters(CONFIG)}


def by_torch(x, y):
    gpt = MiniGPT(CONFIG).double()
    gpt.load_weights(random_weights())
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    loss = gpt(x, y).mean()
    loss.backward()
    return gpt(x).detach().numpy(), loss.item(), {name: p.grad.numpy() for name, p in gpt.named_parameters()}


def by_numpy(x, y):
    weights = random_weights() | {HEAD: random_weights()[TIED]}
    hidden, _ = numpy_gpt.hidden(weights, x, CONFIG)
    losses, cache = numpy_gpt.forward(weights, x, y, CONFIG)
    gradients = numpy_gpt.backward(weights, np.full(len(x), 1 / len(x)), cache, CONFIG)
    gradients[TIED] += gradients.pop(HEAD)
    return (hidden @ weights[HEAD].T).reshape(*x.shape, -1), losses.mean(), gradients


def by_engine(x, y):
    weights = {name: Tensor(w, requires_grad=True) for name, w in random_weights().items()}
    logits = engine_gpt.linear(engine_gpt.hidden(weights, x, CONFIG), weights[TIED])
    loss = engine_gpt.forward(weights, x, y, CONFIG).mean()
    loss.backward()
    return logits.data, loss.item(), {name: w.grad for name, w in weights.items()}


@pytest.mark.parametrize("block_size", [8, 3])
@pytest.mark.parametrize("ours", [by_numpy, by_engine])
def test_logits_loss_and_every_gradient_are_torch_s_to_1e_10(ours, block_size):
    x, y = np.random.default_rng(0).integers(0, 11, (2, 4, block_size))
    logits, loss, gradients = ours(x, y)
    expected_logits, expected_loss, expected = by_torch(x, y)
    named = {"logits": (logits, expected_logits), "loss": (np.array(loss), np.array(expected_loss))}
    assert gradients.keys() == expected.keys()
    for name, (a, b) in (named | {name: (gradients[name], expected[name]) for name in expected}).items():
        assert a.shape == b.shape, name
        assert a.dtype == np.float64, name
        error, largest = np.abs(a - b).max(), max(np.abs(b).max(), 1e-3)  # a key bias' gradient is zero in theory
        assert error <= 1e-10 * largest, f"{name}: off by {error:.1e}, {error / largest:.1e} of the largest value"


# ---- runs


def run(out: Path, flags: str) -> list[float]:
    assert train.main([*flags.split(), "--out", str(out)]) == 0
    return [row.loss for row in read_log(out / "log.csv")]


def emulated(backend: str, dtype: str) -> str:
    return "--device cpu --emulation on" if backend == "torch" and dtype != "fp32" else "--device cpu"


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_all_backends_train_alike(tmp_path, dtype):
    losses = {
        name: run(tmp_path / name, f"{TINY} --backend {name} --dtype {dtype} {emulated(name, dtype)} --steps 20")
        for name in BACKENDS
    }
    for name in BACKENDS:
        np.testing.assert_allclose(losses[name], losses["torch"], rtol=TOLERANCES[dtype], err_msg=name)
    assert losses["torch"][-1] < losses["torch"][0] - 0.5


@pytest.mark.parametrize("first", BACKENDS)
def test_a_run_begun_by_one_backend_is_continued_by_any(tmp_path, first):
    whole = run(tmp_path / "whole", f"{TINY} --backend {first} --device cpu --dtype fp32 --steps 12 --save-every 6")
    for second in BACKENDS:
        out = tmp_path / second
        resumed = run(out, f"--resume {tmp_path / 'whole' / 'step-6'} --backend {second} --device cpu")
        assert len(resumed) == 6
        np.testing.assert_allclose(resumed, whole[6:], rtol=1e-5, err_msg=second)


@pytest.mark.parametrize(("backend", "recompute"), [("numpy", ""), ("engine", ""), ("engine", "--recompute")])
def test_a_run_resumes_bit_by_bit(tmp_path, backend, recompute):
    flags = f"{TINY} --backend {backend} --dtype fp16 --dropout 0.1 --steps 12 --save-every 6"
    whole = run(tmp_path / "whole", flags)
    resumed = run(tmp_path / "resumed", f"--resume {tmp_path / 'whole' / 'step-6'} {recompute}")
    assert resumed == whole[6:]
    for name in ("model.safetensors", "optimizer.safetensors"):
        paths = [tmp_path / run / "step-12" / name for run in ("whole", "resumed")]
        assert paths[0].read_bytes() == paths[1].read_bytes(), name


def test_all_backends_have_the_same_first_state():
    states = {}
    for name in BACKENDS:
        module = backends.module(name)
        states[name] = module.build(Settings(seed=3), module.hardware("cpu", "fp32", "auto"), CONFIG).state()
    for kind, arrays in states["torch"].items():
        for backend in BACKENDS:
            assert states[backend][kind].keys() == arrays.keys()
            for name, array in arrays.items():
                assert states[backend][kind][name].tobytes() == array.tobytes(), f"{backend}: {name}"
                assert states[backend][kind][name].dtype == array.dtype, f"{backend}: {name}"


# ---- recomputation


def loss_and_gradients(backend: str, dtype: str, emulation: str, recompute) -> dict[str, np.ndarray]:
    """Of a batch of 5 rows, with dropout, scaled as fp16 needs it."""
    module, config = backends.module(backend), GPTConfig(11, 8, n_layer=3, n_head=2, n_embd=16, dropout=0.1)
    settings = Settings(seed=1, recompute=recompute)
    built = module.build(settings, module.hardware("cpu", dtype, emulation), config)
    x, y = np.random.default_rng(0).integers(0, 11, (2, 5, 8))
    with built.autocast():
        loss = built.model(x, y, key=(1, 0, 0))
    (loss * 2.0**10).backward()
    found = {"loss": np.array(loss.item())}
    for group in built.optimizer.param_groups:
        found |= {n: np.asarray(p.grad).copy() for n, p in zip(group["param_names"], group["params"], strict=True)}
    return found


@pytest.mark.parametrize("layers", [True, 2])  # 2 of 3 in one piece: the flag is a benchmark's number, too
@pytest.mark.parametrize(
    ("backend", "dtype", "emulation"),
    [
        *(("engine", dtype, "auto") for dtype in TOLERANCES),
        ("torch", "fp32", "auto"),
        *(("torch", dtype, emulation) for dtype in ("bf16", "fp16") for emulation in ("on", "off")),
    ],
)
def test_recomputation_changes_no_bit(backend, dtype, emulation, layers):
    kept = loss_and_gradients(backend, dtype, emulation, False)
    for name, array in loss_and_gradients(backend, dtype, emulation, layers).items():
        assert array.tobytes() == kept[name].tobytes(), name
    assert kept["loss"] > 0


@pytest.mark.parametrize(("backend", "switches"), [("numpy", ""), ("engine", "--recompute")])
def test_training_and_sampling_run_where_torch_is_not_installed(backend, switches, tmp_path):
    tiny = f"--backend {backend} --corpus stdlib --n-layer 2 --n-head 2 --n-embd 16 --block-size 16 --batch-size 4"
    trained = without_torch("train", f"{tiny} --steps 4 --dtype fp16 --out run {switches}".split(), tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert switches in trained.stdout.split("go on ")[1], "the command to go on forgets a flag"
    assert (tmp_path / "run" / "step-4" / "model.safetensors").is_file()
    resumed = without_torch("train", ["--resume", "run", "--steps", "6"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    drawing = f"--checkpoint run --backend {backend} --prompt import --tokens 5"
    sampled = without_torch("sample", drawing.split(), tmp_path)
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("import")
