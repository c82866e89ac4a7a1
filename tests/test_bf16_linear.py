"""The op minigpt::bf16_linear: our CPU kernel and the library's products, values, gradients, dispatch."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import train
from amp.autocast import autocast
from csrc import build
from model.bf16_linear import BF16Linear, bf16_linear, bf16_linear_library, choose
from run.log import read_log

BOTH = [bf16_linear, bf16_linear_library]
DTYPES = [torch.float32, torch.bfloat16]
CPU, SHAPE = torch.device("cpu"), (768, 128, 512)


needs_compiler = pytest.mark.skipif(shutil.which(build.compiler()) is None, reason="no C++ compiler")
if shutil.which(build.compiler()):
    build.load()  # with a compiler there is no excuse: what does not build fails here


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, weight, bias=None):
    """The fp64 product with rounded weights and bias, and the sum of the magnitudes that went into it."""
    x, weight = x.double(), weight.bfloat16().double()
    bias = torch.zeros(len(weight)).double() if bias is None else bias.bfloat16().double()
    return x @ weight.T + bias, x.abs() @ weight.T.abs() + bias.abs()


def check(y, x, weight, bias=None):
    """fp32: 1e-5 of the summed magnitudes (fp32 adds a relative 6e-8 a term, in the worst order K times). bf16: one
    unit in the last place of that more, 2^-8 of the value, for where the fp32 sum lies beside a tie."""
    product, magnitude = exact(x, weight, bias)
    bound = 1e-5 * magnitude + (2**-8 * product.abs() if y.dtype == torch.bfloat16 else 0) + 1e-37
    assert y.dtype == x.dtype
    assert ((y.double() - product).abs() <= bound).all()


# ---- values


@pytest.mark.parametrize("op", BOTH)
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
    """Their products and sums are exact in fp32, whatever the order."""
    integers = lambda *shape: torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(3)).float()  # noqa: E731
    x, weight, bias = integers(n, 96), integers(40, 96), integers(40)
    for dtype in DTYPES:
        expected = (x @ weight.T + bias).to(dtype)
        for op in BOTH:
            for weight_dtype in DTYPES:
                assert torch.equal(op(x.to(dtype), weight.to(weight_dtype), bias), expected)


@pytest.mark.parametrize("n", [1, 64])
def test_the_error_is_at_most_twice_that_of_pytorch(n):
    """Against the product that nothing was rounded for: twice torch's own bf16 linear."""
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


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_dimensions(op, dtype):
    bias = torch.tensor([1.5, -2.0])
    assert torch.equal(op(torch.ones(3, 0, dtype=dtype), torch.ones(2, 0), bias), bias.to(dtype).expand(3, 2))
    assert torch.equal(op(torch.ones(3, 0, dtype=dtype), torch.ones(2, 0)), torch.zeros(3, 2, dtype=dtype))
    assert op(torch.ones(0, 4, dtype=dtype), torch.ones(2, 4)).shape == (0, 2)
    assert op(torch.ones(3, 4, dtype=dtype), torch.ones(0, 4)).shape == (3, 0)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_pass_through(op, n, bad):
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


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_gradients_are_those_of_the_table(op, x_dtype):
    """dx, dW and db against fp64 products of the rounded operands: 1e-5 of the magnitudes for fp32, and with a bf16 x
    each is rounded to bf16 (2^-8) and dW and db are added into fp32."""
    x = random(4, 6, 48, dtype=x_dtype).requires_grad_()
    weight, bias = random(20, 48, seed=1).requires_grad_(), random(20, seed=2).requires_grad_()
    dy = random(4, 6, 20, dtype=x_dtype, seed=3)
    op(x, weight, bias).backward(dy)
    rows, wide = dy.reshape(-1, 20).double(), x.detach().reshape(-1, 48).double()
    low = weight.detach().bfloat16().double()
    for name, got, product, magnitude in (
        ("dx", x.grad.reshape(-1, 48), rows @ low, rows.abs() @ low.abs()),
        ("dW", weight.grad, rows.T @ wide, rows.T.abs() @ wide.abs()),
        ("db", bias.grad, rows.sum(0), rows.abs().sum(0)),
    ):
        relative = 2**-8 if x_dtype == torch.bfloat16 else 0
        assert ((got.double() - product).abs() <= relative * product.abs() + 1e-5 * magnitude).all(), name
    assert weight.grad.dtype == bias.grad.dtype == torch.float32
    if x_dtype == torch.bfloat16:
        assert torch.equal(weight.grad, weight.grad.bfloat16().float())


@pytest.mark.parametrize("op", BOTH)
def test_it_replaces_an_autocast_linear_number_for_number(op):
    """Integers up to 64 and powers of two: every product and sum is exact, so what is left to differ is roundings."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-64, 65, (24, 32), generator=generator).float()
    weight = torch.randint(-64, 65, (16, 32), generator=generator).float() / 1024 * (1 + 2**-12)  # rounds to bf16
    bias, dy = weight[:, 0] * 3, torch.randint(-64, 65, (24, 16), generator=generator).float()
    results = []
    for layer in (BF16Linear(32, 16), torch.nn.Linear(32, 16)):
        with torch.no_grad():
            layer.weight.copy_(weight), layer.bias.copy_(bias)
        layer.op = op
        own_x = x.clone().requires_grad_()
        with autocast("cpu", "bf16", emulated=True):
            y = layer(own_x)
        y.backward(dy)
        results.append((y.detach(), own_x.grad, layer.weight.grad, layer.bias.grad))
    for name, ours, theirs in zip(("y", "dx", "dW", "db"), *results, strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize(("n", "k", "m"), [(3, 0, 4), (3, 5, 0), (0, 5, 4), (0, 0, 0)])
def test_gradients_of_empty_dimensions(op, n, k, m):
    x, weight, bias = (torch.ones(*shape, requires_grad=True) for shape in ((n, k), (m, k), (m,)))
    op(x, weight, bias).sum().backward()
    assert torch.equal(x.grad, torch.full((n, k), float(m)))
    assert torch.equal(weight.grad, torch.full((m, k), float(n)))
    assert torch.equal(bias.grad, torch.full((m,), float(n)))


def test_without_an_op_it_is_a_linear_layer():
    layer, x = BF16Linear(8, 4), random(3, 8)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


# ---- PyTorch's machinery


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(op, dtype):
    x, weight, bias = random(2, 3, 8, dtype=dtype), random(5, 8, seed=1), random(5, seed=2)
    for arguments in ((x, weight, bias), (x, weight), (x[0, 0], weight.bfloat16())):
        leaves = [argument.detach().clone().requires_grad_() for argument in arguments]
        torch.library.opcheck(op, tuple(leaves))


@needs_compiler
def test_torch_compile_takes_it_whole():
    layer = BF16Linear(16, 8)
    layer.op = bf16_linear
    x = random(4, 16).requires_grad_()
    y = torch.compile(lambda x: F.gelu(layer(x)), fullgraph=True)(x)
    y.sum().backward()
    ours, layer.weight.grad, x.grad = (layer.weight.grad, x.grad), None, None
    F.gelu(layer(x)).sum().backward()
    for name, compiled, eager in zip(("dW", "dx"), ours, (layer.weight.grad, x.grad), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=2**-7, atol=2**-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("op", BOTH)
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
def test_what_does_not_fit_is_named(op, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        op(*arguments)


# ---- which code


@needs_compiler
def test_the_choice_follows_the_flag_and_the_dtype():
    assert choose("auto", CPU, "bf16", SHAPE).op is choose("require", CPU, "bf16", SHAPE).op is bf16_linear
    assert choose("auto", CPU, "bf16", SHAPE).kernel.code == "cpu/library/library"
    assert choose("library", CPU, "bf16", SHAPE).op is bf16_linear_library
    assert choose("off", CPU, "bf16", SHAPE).op is None
    for dtype in ("fp32", "fp16"):
        assert choose("auto", CPU, dtype, SHAPE).op is None
        assert dtype in choose("auto", CPU, dtype, SHAPE).kernel.how


def test_where_it_cannot_be_built_the_library_computes_and_the_reason_is_told(monkeypatch):
    def fails():
        raise build.Unavailable("no C++ compiler: c++ is not on PATH")

    monkeypatch.setattr(build, "load", fails)
    choice = choose("auto", CPU, "bf16", SHAPE)
    assert choice.op is bf16_linear_library
    assert "no C++ compiler" in choice.kernel.how
    with pytest.raises(build.Unavailable):
        choose("require", CPU, "bf16", SHAPE)


SIZES = dict(preset="cpu", corpus="stdlib", n_layer=1, n_head=2, n_embd=16, block_size=16, steps=4, log_every=1)
TINY = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@needs_compiler
def test_header_and_log_name_the_code(tmp_path, capsys):
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


def test_the_flag_is_refused_where_it_would_do_nothing(capsys):
    assert train.main([*TINY, "--dtype", "fp32", "--kernel", "own"]) == 2
    assert "--kernel own: the kernel is for bf16, this run is fp32" in capsys.readouterr().err


def test_without_csrc_the_op_is_there_all_the_same():
    """In a process that never loads the kernels."""
    script = (
        "import torch; from model.bf16_linear import bf16_linear; from csrc import build;"
        "print(bf16_linear(torch.ones(2, 3), torch.full((1, 3), 1 + 2**-9)).tolist(), build._loaded)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[[3.0], [3.0]] None\n"
