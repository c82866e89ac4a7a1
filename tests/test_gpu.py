"""What only a CUDA device can show; `make gpu-check` runs these."""

import pytest
import torch

import train
from amp.autocast import LOW_DTYPES, autocast, native_units
from amp.scaler import DynamicLossScaler
from run.log import read_log

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SMALL = [
    "--device",
    "cuda",
    "--preset",
    "gpu",
    "--corpus",
    "stdlib",
    "--n-layer",
    "2",
    "--eval-every",
    "0",
    "--log-every",
    "1",
]


def rows_of(tmp_path, name: str, *flags: str):
    assert train.main([*SMALL, "--out", str(tmp_path / name), *flags]) == 0
    return read_log(tmp_path / name / "log.csv")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_learns_in_every_precision(tmp_path, dtype):
    rows = rows_of(tmp_path, dtype, "--dtype", dtype, "--steps", "60", "--warmup", "10")
    assert rows[-1].val < rows[0].loss - 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_emulation_agrees_with_the_units(dtype):
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


def test_scaler_lives_as_gradscaler_does_on_cuda():
    ours = DynamicLossScaler(init_scale=2.0**8, growth_interval=3, min_scale=None)
    theirs = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=3)
    lives = []
    for scaler in (ours, theirs):
        w = torch.nn.Parameter(torch.ones(1000, device="cuda"))
        optimizer, life = torch.optim.AdamW([w], fused=True), []
        for factor in (1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0):
            scaler.scale((w * factor).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            life.append((scaler.get_scale(), w.detach().cpu().clone()))
        lives.append(life)
    for step, ((our_scale, our_w), (their_scale, their_w)) in enumerate(zip(*lives, strict=True)):
        assert our_scale == their_scale, step
        assert torch.equal(our_w, their_w), step


def test_deterministic_runs_are_bit_equal(tmp_path):
    first, second = (rows_of(tmp_path, name, "--deterministic", "--steps", "10") for name in "ab")
    assert [row.loss for row in first] == [row.loss for row in second]
