"""The JIT build: the name follows its inputs, and each failure is one line and never a hang."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from base.errors import BadInput
from csrc import build

ROOT = Path(__file__).resolve().parent.parent
needs_compiler = pytest.mark.skipif(shutil.which(build.compiler()) is None, reason="no C++ compiler")
LOAD = """
from csrc import build
from base.errors import BadInput
try:
    kernels = build.load()
except build.Unavailable as error:
    print("unavailable:", error)
else:
    import torch
    print("product:", kernels.bf16_gemv(torch.ones(2, 3), torch.ones(3)).tolist())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache, and a build module that has loaded nothing yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(build, "_why_unavailable", None)
    monkeypatch.setattr(build, "_why_without_cuda", None)
    return tmp_path / "kernels"


def load_in_a_process(**environment) -> subprocess.Popen:
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    command = [sys.executable, "-c", LOAD]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment, **streams)


def cached_library(folder: Path, content: bytes, name: str | None = None) -> Path:
    """A file in the place of a built library: of the build that fits, or of another name."""
    name = name or build.build_name(cuda=False)
    (folder / name).mkdir(parents=True)
    library = folder / name / f"{name}.so"
    library.write_bytes(content)
    return library


def why_unavailable() -> str:
    """The one line that load() gives as its reason."""
    with pytest.raises(build.Unavailable) as caught:
        build.load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_compiler_is_the_reason(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_unavailable() == "no C++ compiler: no-such-compiler is not on PATH (CXX can name another)"


def test_a_build_that_failed_is_not_tried_again_in_this_process(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    first = why_unavailable()
    monkeypatch.setattr(build, "find_or_build", lambda cuda: pytest.fail("asked again"))
    assert why_unavailable() == first


def test_a_missing_ninja_is_the_reason(folder, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    compiler = shutil.which(build.compiler()) or sys.executable
    (tmp_path / "bin" / Path(build.compiler()).name).symlink_to(compiler)
    monkeypatch.setenv("CXX", Path(build.compiler()).name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setitem(sys.modules, "ninja", None)
    assert why_unavailable() == "ninja is missing: pip install ninja"


@needs_compiler
def test_ninja_is_found_in_its_package_when_it_is_not_on_path(monkeypatch):
    ninja = pytest.importorskip("ninja")
    monkeypatch.setenv("PATH", "/usr/bin-without-ninja")
    with build._ninja_on_path():
        assert shutil.which("ninja") == str(Path(ninja.BIN_DIR) / "ninja")
    assert os.environ["PATH"] == "/usr/bin-without-ninja"


@needs_compiler
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written_is_the_reason(folder):
    folder.parent.chmod(0o500)
    assert "cannot be used (Permission denied)" in why_unavailable()


@needs_compiler
def test_a_cache_that_is_a_file_is_the_reason(folder):
    folder.write_text("")
    assert why_unavailable() == f"the cache {folder} cannot be used (File exists)"


@needs_compiler
def test_a_cache_that_cannot_be_read_is_the_reason(folder, monkeypatch):
    """Such as another user's folder. Root may read every folder, so the test replaces the call."""

    def refuses(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuses)
    assert why_unavailable() == f"the cache {folder} cannot be used (Permission denied)"


@needs_compiler
def test_a_missing_cuda_toolkit_is_not_blamed_on_the_cache(folder, monkeypatch):
    from torch.utils import cpp_extension

    def load(*arguments, **options):
        raise OSError("CUDA_HOME environment variable is not set")

    monkeypatch.setattr(cpp_extension, "load", load)
    assert why_unavailable().startswith("CUDA_HOME environment variable is not set (all of it in ")


@needs_compiler
def test_where_the_cuda_build_fails_the_cpu_still_has_its_code(folder, monkeypatch):
    def only_cpu(cuda):
        if cuda:
            raise build.Unavailable("nvcc is not on PATH")
        return "the CPU's"

    monkeypatch.setattr(build, "find_or_build", only_cpu)
    monkeypatch.setattr(build.torch.version, "cuda", "13.0")
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: True)
    assert build.load() == "the CPU's"
    assert build.why_without_cuda() == "nvcc is not on PATH"


@needs_compiler
def test_a_lock_that_another_process_keeps_is_the_reason(folder, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr(build, "LOCK_SECONDS", 0.2)
    folder.mkdir()
    with FileLock(folder / (build.build_name(cuda=False) + ".lock")):
        assert "another process has been building" in why_unavailable()


@needs_compiler
def test_the_compilers_output_is_kept_and_its_first_error_is_the_reason(folder, monkeypatch, tmp_path, capsys):
    here = tmp_path / "csrc"
    shutil.copytree(build.HERE, here)
    (here / "bindings.cpp").write_text('#include "no_such_header.h"\n')
    (here / "bf16_linear_cpu.cpp").write_text("")
    monkeypatch.setattr(build, "HERE", here)
    text = why_unavailable()
    assert "no_such_header.h" in text
    log = Path(text.rsplit("(all of it in ", 1)[1].rstrip(")"))
    assert "bindings.cpp" in log.read_text()
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []
    assert "building csrc/bf16_linear, first run only" in capsys.readouterr().err


@needs_compiler
def test_a_library_that_cannot_be_imported_is_the_reason(folder):
    library = cached_library(folder, b"no library")
    library.with_suffix(".size").write_text("10")
    assert f"{library} cannot be loaded" in why_unavailable()


@needs_compiler
def test_half_a_library_is_not_imported_but_built_again(folder, monkeypatch):
    """Importing one would kill the process."""
    library = cached_library(folder, b"half a li")
    monkeypatch.setattr(build, "_compile", lambda name, folder, cuda: "built again")
    assert build.find_or_build(cuda=False) == "built again"  # the size was never written
    library.with_suffix(".size").write_text("10")
    assert build.find_or_build(cuda=False) == "built again"  # the size is another one


TOOLS = {"compiler": "other++", "cpu_features": "avx3", "cpu_flags": ["-O0"], "version_of": "version 99"}
SOURCES = [path.name for path in sorted(build.HERE.iterdir()) if path.suffix in (".cpp", ".h", ".cu", ".cuh")]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_name_follows_the_tools(monkeypatch, tool):
    name = build.build_name(cuda=False)
    assert build.build_name(cuda=False) == name
    monkeypatch.setattr(build, tool, lambda *arguments: TOOLS[tool])
    assert build.build_name(cuda=False) != name


def test_the_name_follows_pytorch(monkeypatch):
    name = build.build_name(cuda=False)
    monkeypatch.setattr(build.torch, "__version__", "9.9")
    assert build.build_name(cuda=False) != name


@pytest.mark.parametrize("source", SOURCES)
def test_the_name_follows_every_source_and_header(monkeypatch, tmp_path, source):
    names = {cuda: build.build_name(cuda) for cuda in (False, True)}
    shutil.copytree(build.HERE, tmp_path / "csrc")
    with open(tmp_path / "csrc" / source, "a") as file:
        file.write("// a change\n")
    monkeypatch.setattr(build, "HERE", tmp_path / "csrc")
    assert build.build_name(cuda=True) != names[True]
    for_cuda_alone = source.endswith((".cu", ".cuh"))
    assert (build.build_name(cuda=False) == names[False]) == for_cuda_alone


def test_the_doctor_names_the_tools_the_builds_that_fit_and_the_code(folder, monkeypatch, capsys):
    fitting = cached_library(folder, b"fits")
    other = cached_library(folder, b"old", name="bf16_linear_cpu_0")
    for library in (fitting, other):
        library.with_suffix(".size").write_text(str(library.stat().st_size))
    monkeypatch.setattr(build, "load", lambda: SimpleNamespace(cuda_version_for=lambda *shape: 5))
    monkeypatch.setattr(build, "nvcc", lambda: None)
    build.doctor()
    lines = capsys.readouterr().out.splitlines()
    labels = [line.split()[0] for line in lines]
    assert {"torch", "gpu", "nvcc", "compiler", "ninja", "cpu", "flags", "kernels"} <= set(labels)
    cached = [line for line in lines if line.startswith("cached")]
    assert sorted(cached) == sorted([f"cached    {fitting.parent} (fits)", f"cached    {other.parent}"])
    build.main(["1", "7", "9"])
    assert "asked for: 1 x 9 times 7 x 9: CUDA, v5" in capsys.readouterr().out
    with pytest.raises(BadInput, match="three whole numbers"):
        build.main(["1", "x", "9"])


@needs_compiler
def test_the_doctor_names_the_code_of_this_cpu(capsys):
    build.main(["1", "7", "9"])
    kernels = build.load()
    if not kernels.with_cuda:
        assert f"asked for: 1 x 9 times 7 x 9: CPU, {kernels.instruction_set()}" in capsys.readouterr().out


def test_the_real_nvcc_is_found_behind_a_wrapper_script(tmp_path, monkeypatch, request):
    real = tmp_path / "toolkit" / "bin" / "nvcc"
    real.parent.mkdir(parents=True)
    real.write_text("")
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "#\\$ _HERE_={real.parent}" >&2\necho "#\\$ TOP={real.parent.parent}" >&2\n')
    for file in (real, wrapper):
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
    build.nvcc.cache_clear()
    request.addfinalizer(build.nvcc.cache_clear)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert build.nvcc() == str(real)


@needs_compiler
@pytest.mark.slow
def test_two_processes_at_once_in_a_path_with_spaces_and_letters_beyond_ascii(tmp_path):
    folder = tmp_path / "a cache with ü"
    both = [load_in_a_process(TORCH_EXTENSIONS_DIR=folder) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert all("product: [3.0, 3.0]" in output for output in outputs), outputs
    assert sum("built in" in output for output in outputs) == 1
    started = time.perf_counter()
    assert load_in_a_process(TORCH_EXTENSIONS_DIR=folder).communicate(timeout=100)[0] == "product: [3.0, 3.0]\n"
    print(f"a third process took {time.perf_counter() - started:.1f} s, import of torch included")


@needs_compiler
@pytest.mark.slow
def test_a_killed_build_leaves_nothing_that_stops_the_next(tmp_path):
    killed = load_in_a_process(TORCH_EXTENSIONS_DIR=tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.tmp/*.o")) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    assert not list(tmp_path.glob("*/*.so"))
    assert "product: [3.0, 3.0]" in load_in_a_process(TORCH_EXTENSIONS_DIR=tmp_path).communicate(timeout=300)[0]
