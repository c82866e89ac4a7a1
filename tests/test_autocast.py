"""Emulated bf16 and fp16 against torch's own; torch.autocast and the emulation against the table."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp import policy
from amp.autocast import LOW_DTYPES, autocast, native_units
from model.config import GPTConfig, initial_weights
from model.minigpt import MiniGPT

LOW = ("bf16", "fp16")
CONFIG = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)

low = pytest.mark.parametrize("dtype", LOW)
both_ways = pytest.mark.parametrize("emulated", [False, True], ids=["native", "emulated"])


def emulation(dtype: str, **options):
    return autocast("cpu", dtype, emulated=True, **options)


def normal(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def tiny_gpt(seed: int = 0) -> MiniGPT:
    """Weights ten times as large as at the start of training, so that logits differ and attention attends."""
    gpt = MiniGPT(CONFIG)
    gpt.load_weights({name: w * 10 if w.ndim == 2 else w for name, w in initial_weights(CONFIG, seed).items()})
    return gpt


def tiny_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def is_representable(x: torch.Tensor, dtype: str) -> bool:
    return torch.equal(x.to(LOW_DTYPES[dtype]).to(x.dtype), x)


# ---- matrix products, one at a time, against torch's own

PRODUCTS = {
    "linear": (F.linear, [(6, 16), (5, 16), (5,)]),
    "linear without bias": (F.linear, [(6, 16), (5, 16)]),
    "linear of a batch": (F.linear, [(2, 3, 16), (5, 16), (5,)]),
    "torch.matmul": (torch.matmul, [(2, 3, 16), (2, 16, 5)]),
    "torch.matmul, broadcast": (torch.matmul, [(2, 3, 16), (16, 5)]),
    "@": (lambda x, y: x @ y, [(6, 16), (16, 5)]),
    "torch.linalg.matmul": (torch.linalg.matmul, [(6, 16), (16, 5)]),
    "Tensor.matmul": (torch.Tensor.matmul, [(6, 16), (16, 5)]),
    "torch.mm": (torch.mm, [(6, 16), (16, 5)]),
    "Tensor.mm": (torch.Tensor.mm, [(6, 16), (16, 5)]),
    "torch.bmm": (torch.bmm, [(2, 6, 16), (2, 16, 5)]),
    "torch.mv": (torch.mv, [(6, 16), (16,)]),
    "torch.dot": (torch.dot, [(16,), (16,)]),
    "torch.addmm": (torch.addmm, [(6, 5), (6, 16), (16, 5)]),
    "torch.addmm, row": (torch.addmm, [(5,), (6, 16), (16, 5)]),
    "torch.addmv": (torch.addmv, [(6,), (6, 16), (16,)]),
    "torch.baddbmm": (torch.baddbmm, [(2, 6, 5), (2, 6, 16), (2, 16, 5)]),
    # Not addbmm: torch's own rounds the sum after every product of the batch, the emulation once.
}


def forward_backward(function, operands, upstream, block=None) -> dict[str, torch.Tensor]:
    """The result, and the gradient of each operand for the gradient `upstream` of the result."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    with block or contextlib.nullcontext():
        result = function(*leaves)
    result.backward(upstream.to(result.dtype))
    return {"result": result.detach()} | {f"gradient of operand {n}": x.grad for n, x in enumerate(leaves)}


def compare_with_torch(function, shapes, dtype: str, seed: int):
    """What the emulation and torch's own low-precision operation give for the same normal operands."""
    *operands, upstream = normal(*shapes, function(*normal(*shapes)).shape, seed=seed)
    ours = forward_backward(function, operands, upstream, emulation(dtype))
    theirs = forward_backward(function, [x.to(LOW_DTYPES[dtype]) for x in operands], upstream)
    return ours, theirs


def units_apart(ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> float:
    """The largest difference in units in the last place of the larger of the two.

    Where a sum cancels to less than 2^-8 of the tensor's largest value, it is measured as if it were that large: below
    that, fp32's own rounding of the summands exceeds a unit of fp16, and the order of summation decides.
    """
    ours, theirs = ours.double(), theirs.double()
    size = torch.maximum(ours.abs(), theirs.abs())
    exponent = size.clamp(min=size.max().item() * 2**-8).log2().floor()
    return ((ours - theirs).abs() / exponent.exp2() / torch.finfo(LOW_DTYPES[dtype]).eps).max().item()


@low
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_and_its_gradients_are_within_one_unit_of_torch(name, dtype):
    # Both round the same operands and add up in fp32, in any order. So the two sums differ by much less than a unit of
    # the low dtype, and can only fall on different sides of a midpoint: one unit, rarely.
    for seed in range(20):
        ours, theirs = compare_with_torch(*PRODUCTS[name], dtype, seed)
        for what, tensor in ours.items():
            assert units_apart(tensor, theirs[what], dtype) <= 1, f"{name}, {what}, seed {seed}"


@low
@pytest.mark.parametrize("name", [*PRODUCTS, "torch.addbmm"])
def test_a_product_and_its_gradients_are_fp32_tensors_with_low_values(name, dtype):
    function, shapes = PRODUCTS.get(name) or (torch.addbmm, [(6, 5), (2, 6, 16), (2, 16, 5)])
    *operands, upstream = normal(*shapes, function(*normal(*shapes)).shape)
    for what, tensor in forward_backward(function, operands, upstream, emulation(dtype)).items():
        assert tensor.dtype == torch.float32, what
        assert is_representable(tensor, dtype), what


@low
def test_operands_by_keyword_are_rounded_too(dtype):
    x, weight, bias = normal((6, 16), (5, 16), (5,))
    with emulation(dtype):
        assert torch.equal(F.linear(input=x, weight=weight, bias=bias), F.linear(x, weight, bias))


@low
def test_a_bias_is_rounded_before_it_is_added(dtype):
    unit = torch.finfo(LOW_DTYPES[dtype]).eps
    bias = torch.tensor([1 + 0.375 * unit])  # alone it rounds to 1; with 0.25 more units it would round to 1 + unit
    with emulation(dtype):
        assert F.linear(torch.ones(1, 1), torch.tensor([[0.25 * unit]]), bias).item() == 1


@low
@pytest.mark.parametrize("function", [F.linear, torch.matmul])
def test_fp64_operands_pass_as_under_torch_autocast(function, dtype):
    x, y = (t.double() for t in normal((16, 16), (16, 16)))
    exact = function(x, y)
    with emulation(dtype):
        product = function(x, y)
    assert product.dtype == torch.float64
    assert torch.equal(product, exact)


# ---- attention


@low
@pytest.mark.parametrize("seed", range(3))
def test_attention_s_error_is_at_most_twice_that_of_torch(seed, dtype):
    # Not one unit: torch's own rounds the softmax between the two products as well. Errors are against fp64.
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    *operands, upstream = normal(*[(2, 2, 16, 8)] * 4, seed=seed)
    exact = forward_backward(attention, [x.double() for x in operands], upstream.double())
    ours = forward_backward(attention, operands, upstream, emulation(dtype))
    theirs = forward_backward(attention, [x.to(LOW_DTYPES[dtype]) for x in operands], upstream)
    for what, reference in exact.items():
        our_error, their_error = ((x[what].double() - reference).norm().item() for x in (ours, theirs))
        assert 0 < our_error <= 2 * their_error, f"{what}: {our_error} against {their_error}"
        assert is_representable(ours[what], dtype), what


@low
def test_a_float_attention_mask_is_an_operand(dtype):
    q, k, v, mask = normal((1, 1, 8, 8), (1, 1, 8, 8), (1, 1, 8, 8), (8, 8))
    low_mask = mask.to(LOW_DTYPES[dtype]).float()
    with emulation(dtype):
        ours = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert torch.equal(ours, F.scaled_dot_product_attention(q, k, v, attn_mask=low_mask))


# ---- the range of fp16


def product_and_gradient(x: float, weight: float, upstream: float = 1.0, terms: int = 1) -> tuple[float, float]:
    """The sum of `terms` products under emulated fp16, and the gradient of the first x."""
    leaf = torch.full((1, terms), float(x), requires_grad=True)
    with emulation("fp16"):
        y = F.linear(leaf, torch.full((1, terms), float(weight)))
    y.backward(torch.full((1, 1), float(upstream)))
    return y.item(), leaf.grad[0, 0].item()


def test_fp16_sums_go_beyond_65504_inside_a_product():
    # The sum is kept in fp32: 65504 + 65504 - 65504 - 65504 + ... ends where it began.
    x = torch.tensor([[65504.0, 65504.0, -65504.0, -65504.0, 1.0]])
    with emulation("fp16"):
        assert F.linear(x, torch.ones(1, 5)).item() == 1


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        *(((32752, 1, 1, 2), 65504), ((256, 256), math.inf), ((-256, 256), -math.inf)),  # the result overflows
        *(((65519, 2**-4), 4094), ((65520, 2**-4), math.inf)),  # an operand overflows
        *(((2**-12, 2**-12), 2**-24), ((2**-12, 2**-13), 0)),  # the result underflows
        *(((2**-24, 1024), 2**-14), ((2**-25, 1024), 0)),  # an operand underflows
    ],
)
def test_fp16_results_overflow_above_65504_and_underflow_below_2_to_the_minus_24(arguments, result):
    assert product_and_gradient(*arguments)[0] == result


@pytest.mark.parametrize(
    ("weight", "upstream", "gradient"),
    [
        *((1, 65504, 65504), (1, 65520, math.inf), (256, 256, math.inf)),
        *((1, 2**-25, 0), (2**-13, 2**-12, 0), (1, 2**-25 * 2**15, 2**-10)),  # a loss scale saves the last
    ],
)
def test_fp16_gradients_overflow_and_underflow_like_results(weight, upstream, gradient):
    assert product_and_gradient(1, weight, upstream)[1] == gradient


def test_bf16_has_the_range_of_fp32():
    x = torch.tensor([[2.0**100, 2.0**-100]], requires_grad=True)
    with emulation("bf16"):
        y = x * 2**-10 @ torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    y.backward(torch.full((1, 2), 2.0**-100))
    assert y.tolist() == [[2.0**90, 2.0**-110]]
    assert x.grad.tolist() == [[2.0**-110, 2.0**-110]]


# ---- products that the emulation does not know

A, V, B = normal((4, 4), (4,), (2, 4, 4))
UNKNOWN = {
    "torch.einsum": lambda: torch.einsum("ij,jk->ik", A, A),
    "torch.tensordot": lambda: torch.tensordot(A, A, 1),
    "torch.inner": lambda: torch.inner(A, A),
    "torch.vdot": lambda: torch.vdot(V, V),
    "torch.cdist": lambda: torch.cdist(A, A),
    "torch.chain_matmul": lambda: torch.chain_matmul(A, A, A),
    "torch.matrix_power": lambda: torch.matrix_power(A, 3),
    "Tensor.matrix_power": lambda: A.matrix_power(3),
    "torch.linalg.multi_dot": lambda: torch.linalg.multi_dot([A, A, A]),
    "torch.linalg.matrix_power": lambda: torch.linalg.matrix_power(A, 3),
    "torch.linalg.vecdot": lambda: torch.linalg.vecdot(A, A),
    "F.bilinear": lambda: F.bilinear(A, A, B),
    "nn.Bilinear": lambda: nn.Bilinear(4, 4, 2)(A, A),
    "F.conv1d": lambda: F.conv1d(B, B),
    "nn.Conv2d": lambda: nn.Conv2d(2, 1, 2)(B),
    "F.conv3d": lambda: F.conv3d(B[None, None], torch.ones(1, 1, 1, 1, 1)),
    "F.conv_transpose1d": lambda: F.conv_transpose1d(B, torch.ones(4, 1, 2)),
    "torch.convolution": lambda: torch.convolution(B, B, None, [1], [0], [1], False, [0], 1),
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention(4, 2)(A, A, A),
    "nn.MultiheadAttention, eval": lambda: nn.MultiheadAttention(4, 2, batch_first=True).eval()(B, B, B),
    "nn.TransformerEncoderLayer, eval": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()(B),
    "nn.LSTM": lambda: nn.LSTM(4, 4)(B),
    "nn.GRU": lambda: nn.GRU(4, 4)(B),
    "nn.RNN": lambda: nn.RNN(4, 4)(B),
    "nn.LSTMCell": lambda: nn.LSTMCell(4, 4)(A),
    "nn.GRUCell": lambda: nn.GRUCell(4, 4)(A),
    "nn.RNNCell": lambda: nn.RNNCell(4, 4)(A),
    "mm with out": lambda: torch.mm(A, A, out=torch.empty(4, 4)),
    "matmul with out": lambda: torch.matmul(A, A, out=torch.empty(4, 4)),
    "baddbmm with out": lambda: torch.baddbmm(B, B, B, out=torch.empty(2, 4, 4)),
    "addmm_": lambda: A.clone().addmm_(A, A),
    "addmv_": lambda: V.clone().addmv_(A, V),
    "addbmm_": lambda: A.clone().addbmm_(B, B),
    "baddbmm_": lambda: B.clone().baddbmm_(B, B),
    "addr": lambda: torch.addr(A, V, V),
    "addr_": lambda: A.clone().addr_(V, V),
    "ger": lambda: torch.ger(V, V),
}


@low
@pytest.mark.filterwarnings("ignore:.*chain_matmul.*:UserWarning")
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_product_raises_under_emulation_alone(name, dtype):
    before = active()
    with emulation(dtype), pytest.raises(NotImplementedError, match=f"emulated {dtype} does not know") as error:
        UNKNOWN[name]()
    assert ("with out=" in str(error.value)) == ("with out" in name)
    assert active() == before
    UNKNOWN[name]()
    with emulation(dtype), emulation(dtype, enabled=False):
        UNKNOWN[name]()


# ---- blocks: what is active, and what is active again after them


def active() -> tuple:
    """Returns the policy's dtype, what a product of fp32 matrices has in fact, and torch.autocast's two settings."""
    product = (A @ A).float()
    product_dtype = next((dtype for dtype in LOW if is_representable(product, dtype)), "fp32")
    return policy.compute_dtype(), product_dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


@low
@both_ways
def test_a_block_s_dtype_is_active_inside_and_what_was_active_comes_back(emulated, dtype):
    before = active()
    assert before[:3] == ("fp32", "fp32", False)
    with autocast("cpu", dtype, emulated):
        inside = active()
        assert inside[:3] == (dtype, dtype, not emulated)
        assert (A @ A).dtype == (torch.float32 if emulated else LOW_DTYPES[dtype])
        with pytest.raises(ZeroDivisionError), autocast("cpu", "bf16", not emulated):
            1 / 0  # noqa: B018
        assert active() == inside
    assert active() == before


@both_ways
def test_nested_blocks_each_have_their_own_dtype(emulated):
    with autocast("cpu", "bf16", emulated):
        outer = active()
        for inner in ("fp16", "fp32"):
            with autocast("cpu", inner, emulated):
                assert active()[:2] == (inner, inner)
            assert active() == outer
        with autocast("cpu", "bf16", emulated, enabled=False):
            assert active()[:2] == ("fp32", "fp32")
            with autocast("cpu", "fp16", emulated):
                assert active()[:2] == ("fp16", "fp16")
            assert active()[:2] == ("fp32", "fp32")
        assert active() == outer


def test_an_emulated_block_inside_torch_autocast_turns_that_off():
    with torch.autocast("cpu", torch.bfloat16):
        with emulation("fp16"):
            assert (A @ A).dtype == torch.float32
            assert active()[:2] == ("fp16", "fp16")
        assert (A @ A).dtype == torch.bfloat16


@both_ways
def test_fp32_changes_nothing(emulated):
    x, y = tiny_batch()
    results = []
    for block in (contextlib.nullcontext(), autocast("cpu", "fp32", emulated)):
        gpt = tiny_gpt()
        with block:
            loss = gpt(x, y).mean()
        loss.backward()
        results.append({"loss": loss.detach()} | {name: p.grad for name, p in gpt.named_parameters()})
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


@both_ways
@pytest.mark.parametrize("dtype", ["bf8", "float16", ""])
def test_an_unknown_dtype_is_refused(dtype, emulated):
    with pytest.raises(ValueError, match="unknown compute dtype"), autocast("cpu", dtype, emulated):
        pass
    assert policy.compute_dtype() == "fp32"


# ---- hardware


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_native_units_of_the_cpu_are_told_with_a_reason(dtype):
    native, why = native_units(torch.device("cpu"), dtype)
    assert type(native) is bool
    assert ("no" in why.split()) == (not native)


def test_fp32_is_native_everywhere():
    for device in ("cpu", "cuda", "mps"):
        assert native_units(torch.device(device), "fp32")[0]
