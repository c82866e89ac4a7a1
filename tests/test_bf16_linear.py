"""The op minigpt::bf16_linear by our CPU kernel and by PyTorch's products: values, gradients, which code runs."""

import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import train
from amp.autocast import autocast
from csrc import build
from model.bf16_linear import LIBRARY, BF16Linear, bf16_linear, bf16_linear_library, choose_op
from run.log import read_log

OPS = [bf16_linear, bf16_linear_library]
DTYPES = [torch.float32, torch.bfloat16]
CPU, SHAPE = torch.device("cpu"), (768, 128, 512)

needs_compiler = pytest.mark.skipif(shutil.which(build.compiler()) is None, reason="no C++ compiler")
if shutil.which(build.compiler()):
    build.load()  # fails here where there is a compiler and the kernels do not build


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape, seed=3, largest=8):
    """Products and sums of small integers are exact in fp32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).float()


def exact(x, weight, bias=None):
    """The fp64 product with rounded weights and bias, and the sum of the magnitudes of its terms."""
    x, weight = x.double(), weight.bfloat16().double()
    bias = torch.zeros(len(weight)).double() if bias is None else bias.bfloat16().double()
    return x @ weight.T + bias, x.abs() @ weight.T.abs() + bias.abs()


def check(y, x, weight, bias=None):
    """Within 1e-5 of the summed magnitudes: an fp32 sum errs by a relative 6e-8 for each term. A bf16 y may err by one
    unit in the last place more, 2^-8 of the value, where the fp32 sum lies beside a tie."""
    product, magnitude = exact(x, weight, bias)
    bound = 1e-5 * magnitude + (2**-8 * product.abs() if y.dtype == torch.bfloat16 else 0) + 1e-37
    assert y.dtype == x.dtype
    assert ((y.double() - product).abs() <= bound).all()


# ---- values


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 17, 100])
def test_values_of_ragged_shapes(op, n, x_dtype, weight_dtype):
    for m in (1, 3, 31, 65):
        for k in (*range(1, 34, 4), 32, 127, 768, 769):
            x, weight = random(n, k, dtype=x_dtype), random(m, k, dtype=weight_dtype, seed=1)
            bias = random(m, seed=2) if (m + k) % 2 else None
            check(op(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("n", [1, 5, 64])
def test_small_integers_give_the_same_bits_everywhere(n):
    x, weight, bias = integers(n, 96), integers(40, 96), integers(40)
    for dtype in DTYPES:
        expected = (x @ weight.T + bias).to(dtype)
        for op in OPS:
            for weight_dtype in DTYPES:
                assert torch.equal(op(x.to(dtype), weight.to(weight_dtype), bias), expected)


@pytest.mark.parametrize("n", [1, 64])
def test_the_error_is_at_most_twice_that_of_pytorchs_bf16_linear(n):
    """Both errors are against the product of unrounded numbers."""
    x, weight = random(n, 768), random(256, 768, seed=1)
    truth = x.double() @ weight.T.double()
    theirs = (F.linear(x.bfloat16(), weight.bfloat16()).double() - truth).abs().max()
    assert (bf16_linear(x.bfloat16(), weight).double() - truth).abs().max() <= 2 * theirs
    assert (bf16_linear(x, weight).double() - truth).abs().max() <= theirs


def test_the_weight_is_rounded_to_nearest_even_and_x_is_not():
    tie, above = 1 + 2**-8, 1 + 3 * 2**-8  # halfway between bf16 neighbours: down to 1, up to 1 + 2^-6
    weight = torch.tensor([[tie], [above], [1 + 2**-8 + 2**-20]])
    for n in (1, 16):
        y = bf16_linear(torch.full((n, 1), 1 + 2**-20), weight)
        assert torch.equal(y[0], torch.tensor([1, 1 + 2**-6, 1 + 2**-7]) * (1 + 2**-20))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_dimensions_give_empty_results_or_the_bias(op, dtype):
    bias = torch.tensor([1.5, -2.0])
    assert torch.equal(op(torch.ones(3, 0, dtype=dtype), torch.ones(2, 0), bias), bias.to(dtype).expand(3, 2))
    assert torch.equal(op(torch.ones(3, 0, dtype=dtype), torch.ones(2, 0)), torch.zeros(3, 2, dtype=dtype))
    assert op(torch.ones(0, 4, dtype=dtype), torch.ones(2, 4)).shape == (0, 2)
    assert op(torch.ones(3, 4, dtype=dtype), torch.ones(0, 4)).shape == (3, 0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_reach_the_results_that_they_belong_to(op, n, bad):
    x, weight = random(n, 40), random(33, 40, seed=1)
    weight[32, 39] = bad
    assert not op(x, weight)[:, 32].isfinite().any()
    assert op(x, weight)[:, :32].isfinite().all()
    x, weight = random(n, 40).bfloat16(), random(33, 40, seed=1)
    x[n - 1, 39] = bad
    assert not op(x, weight)[n - 1].isfinite().any()
    assert op(x, weight)[: n - 1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 30])
def test_views_that_are_offset_or_not_contiguous(dtype, n):
    x, weight = random(n * 50 + 3, dtype=dtype)[3:].view(n, 50), random(66, 51, dtype=dtype, seed=1)[1:, 1:]
    check(bf16_linear(x, weight), x, weight)
    transposed = random(50, n, dtype=dtype).T
    check(bf16_linear(transposed, weight), transposed, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_change_a_bit(dtype):
    for n in (1, 6, 200):
        x, weight = random(n, 300, dtype=dtype), random(513, 300, seed=1)
        first = bf16_linear(x, weight)
        torch.set_num_threads(3)
        try:
            assert torch.equal(bf16_linear(x, weight), first)
        finally:
            torch.set_num_threads(1)


@needs_compiler
def test_bf16_gemv_is_the_form_for_one_vector():
    kernels = build.load()
    weight, x = random(30, 70), random(70, seed=1)
    assert torch.equal(kernels.bf16_gemv(weight, x), bf16_linear(x, weight))
    with pytest.raises(RuntimeError, match="one vector"):
        kernels.bf16_gemv(weight, random(2, 70))


# ---- gradients


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_gradients_are_those_of_the_table(op, x_dtype):
    """dx, dW and db lie within 1e-5 of the summed magnitudes from fp64 products of the rounded operands. With a bf16 x
    each is also rounded to bf16 (2^-8); dW and db are stored as fp32."""
    x = random(4, 6, 48, dtype=x_dtype).requires_grad_()
    weight, bias = random(20, 48, seed=1).requires_grad_(), random(20, seed=2).requires_grad_()
    dy = random(4, 6, 20, dtype=x_dtype, seed=3)
    op(x, weight, bias).backward(dy)
    dy_rows, x_rows = dy.reshape(-1, 20).double(), x.detach().reshape(-1, 48).double()
    weight_low = weight.detach().bfloat16().double()
    for name, got, product, magnitude in (
        ("dx", x.grad.reshape(-1, 48), dy_rows @ weight_low, dy_rows.abs() @ weight_low.abs()),
        ("dW", weight.grad, dy_rows.T @ x_rows, dy_rows.T.abs() @ x_rows.abs()),
        ("db", bias.grad, dy_rows.sum(0), dy_rows.abs().sum(0)),
    ):
        relative = 2**-8 if x_dtype == torch.bfloat16 else 0
        assert ((got.double() - product).abs() <= relative * product.abs() + 1e-5 * magnitude).all(), name
    assert weight.grad.dtype == bias.grad.dtype == torch.float32
    if x_dtype == torch.bfloat16:
        assert torch.equal(weight.grad, weight.grad.bfloat16().float())


@pytest.mark.parametrize("op", OPS)
def test_the_op_gives_the_numbers_of_a_linear_layer_under_autocast(op):
    """With integers up to 64 and powers of two every product and sum is exact, so only the roundings could differ."""
    x, dy = integers(24, 32, seed=5, largest=64), integers(24, 16, seed=6, largest=64)
    weight = integers(16, 32, seed=7, largest=64) / 1024 * (1 + 2**-12)  # rounds to a multiple of 1/1024
    bias = weight[:, 0] * 3
    results = []
    for layer in (BF16Linear(32, 16), torch.nn.Linear(32, 16)):
        with torch.no_grad():
            layer.weight.copy_(weight), layer.bias.copy_(bias)
        layer.op = op
        leaf = x.clone().requires_grad_()
        with autocast("cpu", "bf16", emulated=True):
            y = layer(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad))
    for name, ours, theirs in zip(("y", "dx", "dW", "db"), *results, strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("n", "k", "m"), [(3, 0, 4), (3, 5, 0), (0, 5, 4), (0, 0, 0)])
def test_gradients_of_empty_dimensions(op, n, k, m):
    x, weight, bias = (torch.ones(*shape, requires_grad=True) for shape in ((n, k), (m, k), (m,)))
    op(x, weight, bias).sum().backward()
    assert torch.equal(x.grad, torch.full((n, k), float(m)))
    assert torch.equal(weight.grad, torch.full((m, k), float(n)))
    assert torch.equal(bias.grad, torch.full((m,), float(n)))


def test_bf16linear_without_an_op_is_a_linear_layer():
    layer, x = BF16Linear(8, 4), random(3, 8)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


# ---- PyTorch's machinery


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(op, dtype):
    x, weight, bias = random(2, 3, 8, dtype=dtype), random(5, 8, seed=1), random(5, seed=2)
    for arguments in ((x, weight, bias), (x, weight), (x[0, 0], weight.bfloat16())):
        leaves = [argument.detach().clone().requires_grad_() for argument in arguments]
        torch.library.opcheck(op, tuple(leaves))


@needs_compiler
def test_torch_compile_takes_the_op_into_one_graph():
    """The compiled backward may skip the rounding of dy: its error is 2^-8 of the summed magnitudes |dy| |x|, |dy| |W|.
    The slope of GELU, hence |dy|, is at most 1.13."""
    layer = BF16Linear(16, 8)
    layer.op = bf16_linear
    with torch.no_grad():
        layer.weight.copy_(random(8, 16, seed=1)), layer.bias.copy_(random(8, seed=2))
    x = random(4, 16).requires_grad_()
    results = []
    for function in (torch.compile(lambda x: F.gelu(layer(x)), fullgraph=True), lambda x: F.gelu(layer(x))):
        layer.weight.grad = x.grad = None
        y = function(x)
        y.sum().backward()
        results.append((y.detach(), layer.weight.grad, x.grad))
    dy = torch.full((4, 8), 1.13)
    magnitudes = (torch.zeros(4, 8), dy.T @ x.detach().abs(), dy @ layer.weight.detach().abs())
    for name, compiled, eager, magnitude in zip(("y", "dW", "dx"), *results, magnitudes, strict=True):
        assert ((compiled - eager).abs() <= 2**-8 * (magnitude + eager.abs()) + 1e-6).all(), name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), torch.ones(4, 5)), r"x .*fit"),
        ((torch.ones(2, 3), torch.ones(3)), "weight"),
        ((torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)), "bias"),
        ((torch.ones(2, 3).double(), torch.ones(4, 3)), "x must be fp32 or bf16"),
        ((torch.ones(2, 3), torch.ones(4, 3).half()), "weight must be fp32 or bf16"),
        ((torch.ones(2, 3), torch.ones(4, 3, device="meta")), "device|is on"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(op, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        op(*arguments)


# ---- which code


@needs_compiler
def test_the_op_follows_the_flag_and_the_dtype():
    for flag in ("auto", "own", "require"):
        op, kernel = choose_op(flag, CPU, "bf16", SHAPE)
        assert op is bf16_linear
        assert kernel.code == "cpu/library/library"
    assert choose_op("library", CPU, "bf16", SHAPE).op is bf16_linear_library
    assert choose_op("off", CPU, "bf16", SHAPE).op is None
    for dtype in ("fp32", "fp16"):
        op, kernel = choose_op("auto", CPU, dtype, SHAPE)
        assert op is None
        assert dtype in kernel.how


def test_where_the_kernels_cannot_be_built_the_library_computes_and_the_reason_is_told(monkeypatch):
    def fails():
        raise build.Unavailable("no C++ compiler: c++ is not on PATH")

    monkeypatch.setattr(build, "load", fails)
    for flag in ("auto", "own"):
        op, kernel = choose_op(flag, CPU, "bf16", SHAPE)
        assert op is bf16_linear_library
        assert kernel.code == LIBRARY
        assert "no C++ compiler" in kernel.how
    with pytest.raises(build.Unavailable, match="no C\\+\\+ compiler"):
        choose_op("require", CPU, "bf16", SHAPE)


@pytest.mark.parametrize(("flag", "version", "op", "code"), [
    ("auto", 5, bf16_linear, "cuda-v5/library/library"),
    ("auto", 4, bf16_linear_library, LIBRARY),
    ("own", 4, bf16_linear, "cuda-v4/library/library"),
    ("require", 4, bf16_linear, "cuda-v4/library/library"),
])  # fmt: skip
def test_on_cuda_auto_takes_our_code_only_where_tensor_cores_compute(monkeypatch, flag, version, op, code):
    def cuda_version_for(n, m, k, x_bf16, weight_bf16):
        assert (n, m, k, x_bf16, weight_bf16) == (*SHAPE, True, False)
        return version

    monkeypatch.setattr(build, "load", lambda: SimpleNamespace(with_cuda=True, cuda_version_for=cuda_version_for))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    chosen = choose_op(flag, torch.device("cuda"), "bf16", SHAPE)
    assert chosen.op is op
    assert chosen.kernel.code == code
    assert f"v{version}" in chosen.kernel.how


SIZES = dict(preset="cpu", corpus="stdlib", n_layer=1, n_head=2, n_embd=16, block_size=16, steps=4, log_every=1)
TINY = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@needs_compiler
def test_header_and_log_name_the_code_that_computes(tmp_path, capsys):
    lines = {}
    for kernel in ("own", "library", "off"):
        out = tmp_path / kernel
        assert train.main([*TINY, "--dtype", "bf16", "--emulation", "on", "--kernel", kernel, "--out", str(out)]) == 0
        header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("kernel"))
        lines[kernel] = header, [row.kernel for row in read_log(out / "log.csv")], read_log(out / "log.csv")[0].loss
    assert "csrc/bf16_linear_cpu.cpp" in lines["own"][0]
    assert lines["own"][1] == ["cpu/library/library"] * 4
    assert lines["library"][1] == lines["off"][1] == ["library/library/library"] * 4
    assert "--kernel off" in lines["off"][0]
    assert lines["own"][2] == pytest.approx(lines["off"][2], rel=1e-4)  # one bf16 rounding may fall the other way


def test_kernel_own_is_refused_in_a_run_that_is_not_bf16(capsys):
    assert train.main([*TINY, "--dtype", "fp32", "--kernel", "own"]) == 2
    assert "--kernel own: the kernel is for bf16, this run is fp32" in capsys.readouterr().err


def test_the_op_computes_in_a_process_that_has_not_loaded_the_kernels():
    script = (
        "import torch; from model.bf16_linear import bf16_linear; from csrc import build;"
        "print(bf16_linear(torch.ones(2, 3), torch.full((1, 3), 1 + 2**-9)).tolist(), build._loaded)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[[3.0], [3.0]] None\n"
