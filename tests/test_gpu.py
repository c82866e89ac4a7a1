"""Tests that need a CUDA device; `make gpu-check` runs them."""

import pytest
import torch

import train
from amp.autocast import LOW_DTYPES, autocast, native_units
from amp.scaler import DynamicLossScaler
from csrc import build
from model.bf16_linear import BF16Linear, bf16_linear
from run.log import read_log

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SMALL = "--device cuda --preset gpu --corpus stdlib --n-layer 2 --eval-every 0 --log-every 1"


def rows_of(tmp_path, name: str, flags: str):
    """The rows of the log of a small run."""
    assert train.main([*SMALL.split(), "--out", str(tmp_path / name), *flags.split()]) == 0
    return read_log(tmp_path / name / "log.csv")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_learns_in_every_precision(tmp_path, dtype):
    rows = rows_of(tmp_path, dtype, f"--dtype {dtype} --steps 60 --warmup 10")
    assert rows[-1].val < rows[0].loss - 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_emulation_agrees_with_the_hardware_units(dtype):
    if not native_units(torch.device("cuda"), dtype)[0]:
        pytest.skip(f"no {dtype} units")
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(s, device="cuda", generator=generator, requires_grad=True) for s in ((64, 96), (32, 96)))
    results = []
    for emulated in (False, True):
        with autocast("cuda", dtype, emulated):
            y = torch.nn.functional.linear(x, w)
        y.float().square().sum().backward()
        results.append((y.detach().float(), x.grad.clone(), w.grad.clone()))
        x.grad = w.grad = None
    for name, native, emulated in zip(("y", "dx", "dw"), *results, strict=True):
        # one unit in the last place of the low dtype at the largest value: the two sum in different orders
        unit = torch.finfo(LOW_DTYPES[dtype]).eps * native.abs().max()
        assert (native - emulated).abs().max() <= 2 * unit, name


def test_scales_and_weights_follow_gradscaler_bit_for_bit_on_cuda():
    ours = DynamicLossScaler(init_scale=2.0**8, growth_interval=3, min_scale=None)
    theirs = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=3)
    histories = []
    for scaler in (ours, theirs):
        w = torch.nn.Parameter(torch.ones(1000, device="cuda"))
        optimizer = torch.optim.AdamW([w], fused=True)
        history = []
        for factor in (1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0):
            scaler.scale((w * factor).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append((scaler.get_scale(), w.detach().cpu().clone()))
        histories.append(history)
    for step, ((our_scale, our_w), (their_scale, their_w)) in enumerate(zip(*histories, strict=True)):
        assert our_scale == their_scale, step
        assert torch.equal(our_w, their_w), step


def test_deterministic_runs_are_bit_equal(tmp_path):
    first, second = (rows_of(tmp_path, name, "--deterministic --steps 10") for name in "ab")
    assert [row.loss for row in first] == [row.loss for row in second]


# ---- our kernel


@pytest.fixture(scope="module")
def kernels():
    kernels = build.load()
    assert kernels.with_cuda, build.why_without_cuda()
    return kernels


def integers(*shape):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", range(6))
def test_every_version_gives_the_bits_of_the_cpu(kernels, version, x_dtype, weight_dtype):
    """With small integers every sum is exact in fp32, in any order."""
    if version == 5 and (x_dtype == torch.float32 or torch.cuda.get_device_capability() < (8, 0)):
        pytest.skip("v5 takes bf16 vectors, from sm_80 on")
    for n in {0: (1, 3), 1: (1, 3), 2: (1,), 3: (1,), 4: (2, 5, 8, 17), 5: (9, 64, 200)}[version]:
        for m, k in ((1, 8), (65, 64), (384, 1536), (50, 776)):
            x, weight, bias = integers(n, k).to(x_dtype), integers(m, k).to(weight_dtype), integers(m)
            expected = bf16_linear(x, weight, bias)
            got = kernels.bf16_linear(x.cuda(), weight.cuda(), bias.cuda(), version)
            assert torch.equal(got.cpu(), expected), (n, m, k)


def test_an_x_that_begins_between_multiples_of_16_bytes_is_read_right(kernels):
    numbers, weight = integers(9 * 64 + 1), integers(7, 64)
    x, x_cuda = numbers[1:].view(9, 64), numbers.cuda()[1:].view(9, 64)
    assert x_cuda.data_ptr() % 16 == 4
    assert torch.equal(bf16_linear(x_cuda, weight.cuda()).cpu(), bf16_linear(x, weight))


def test_empty_dimensions_on_the_device(kernels):
    ones = torch.ones(3, 0, device="cuda")
    assert torch.equal(bf16_linear(ones, torch.ones(2, 0, device="cuda")).cpu(), torch.zeros(3, 2))
    assert bf16_linear(torch.ones(0, 8, device="cuda"), torch.ones(2, 8, device="cuda")).shape == (0, 2)


def test_a_nan_reaches_only_its_row_on_the_device(kernels):
    weight = torch.ones(64, 64, device="cuda")
    weight[63, 63] = float("nan")
    for n in (1, 4, 100):
        y = bf16_linear(torch.ones(n, 64, device="cuda").bfloat16(), weight)
        assert y[:, 63].isnan().all(), n
        assert y[:, :63].isfinite().all(), n


def test_a_training_step_in_bf16_runs_the_tensor_core_version(kernels):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("before sm_80")
    layer = BF16Linear(1536, 384).cuda()
    layer.op = bf16_linear
    x = torch.randn(512, 1536, device="cuda", requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        with autocast("cuda", "bf16"):
            y = layer(x)
        y.sum().backward()
        torch.cuda.synchronize()
    assert any("v5_tensor_cores" in event.key for event in profiler.key_averages())
    assert layer.weight.grad.isfinite().all()
