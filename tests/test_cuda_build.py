"""nvcc compiles the CUDA extension for three generations of cards, without a GPU. `make cuda-check` runs these."""

import re
import subprocess

import pytest
import torch

from csrc import build
from model.bf16_linear import bf16_linear

pytestmark = pytest.mark.cuda_build
ARCHITECTURES = ("75", "80", "90")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    assert torch.version.cuda is not None, "this environment has a PyTorch without CUDA: make cuda-check makes another"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setenv("TORCH_CUDA_ARCH_LIST", ";".join(f"{a[0]}.{a[1]}" for a in ARCHITECTURES))
        yield build.find_or_build(cuda=True)


def test_the_extension_compiles_links_and_imports(kernels):
    assert kernels.with_cuda


def test_the_op_is_registered_for_both_devices(kernels):
    for key in ("CPU", "CUDA", "Meta", "Autograd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("minigpt::bf16_linear", key), key
    schema = "minigpt::bf16_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"
    assert str(bf16_linear._schema) == schema


def test_the_meta_device_and_the_cpu_give_results(kernels):
    x, weight = torch.ones(2, 3, 8), torch.ones(5, 8)
    assert bf16_linear(x.to("meta"), weight.to("meta")).shape == (2, 3, 5)
    assert torch.equal(bf16_linear(x, weight), torch.full((2, 3, 5), 8.0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills_registers(architecture, tmp_path):
    done = subprocess.run(
        [build.nvcc(), "-std=c++17", *build.cuda_flags(), f"-arch=sm_{architecture}", "-Xptxas", "-v"]
        + ["-cubin", str(build.HERE / "bf16_linear.cu"), "-o", str(tmp_path / "kernels.cubin")],
        capture_output=True,
        text=True,
        check=True,
    )
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert len(spills) > 20
    assert set(spills) == {("0", "0")}
