"""The JIT build: what it depends on, and that whatever goes wrong is one line and never a hang."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

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
    """An empty cache, and a module that has not loaded anything yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(build, "_reason", None)
    return tmp_path / "kernels"


def load_in_a_process(**environment) -> subprocess.Popen:
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.Popen(
        [sys.executable, "-c", LOAD],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def reason() -> str:
    with pytest.raises(build.Unavailable) as caught:
        build.load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_compiler(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert reason() == "no C++ compiler: no-such-compiler is not on PATH (CXX can name another)"


def test_the_reason_is_found_once(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    first = reason()
    monkeypatch.setattr(build, "build", lambda cuda: pytest.fail("asked again"))
    assert reason() == first


def test_no_ninja(folder, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    compiler = shutil.which(build.compiler()) or sys.executable
    (tmp_path / "bin" / Path(build.compiler()).name).symlink_to(compiler)
    monkeypatch.setenv("CXX", Path(build.compiler()).name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setitem(sys.modules, "ninja", None)
    assert reason() == "ninja is missing: pip install ninja"


@needs_compiler
def test_ninja_is_found_in_its_package_when_it_is_not_on_path(monkeypatch):
    ninja = pytest.importorskip("ninja")
    monkeypatch.setenv("PATH", "/usr/bin-without-ninja")
    with build._tools_on_path():
        assert shutil.which("ninja") == str(Path(ninja.BIN_DIR) / "ninja")
    assert os.environ["PATH"] == "/usr/bin-without-ninja"


@needs_compiler
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written(folder):
    folder.parent.chmod(0o500)
    assert "cannot be used (Permission denied)" in reason()


@needs_compiler
def test_a_cache_that_is_a_file(folder):
    folder.write_text("")
    assert reason() == f"the cache {folder} cannot be used (File exists)"


@needs_compiler
def test_a_cache_that_cannot_even_be_looked_into(folder, monkeypatch):
    """As of another user's home; root looks everywhere, so the refusal is put in."""

    def refuses(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuses)
    assert reason() == f"the cache {folder} cannot be used (Permission denied)"


@needs_compiler
def test_a_missing_cuda_toolkit_is_not_blamed_on_the_cache(folder, monkeypatch):
    from torch.utils import cpp_extension

    def load(*arguments, **options):
        raise OSError("CUDA_HOME environment variable is not set")

    monkeypatch.setattr(cpp_extension, "load", load)
    assert reason().startswith("CUDA_HOME environment variable is not set (all of it in ")


@needs_compiler
def test_without_a_cuda_build_the_cpu_has_its_code(folder, monkeypatch):
    def only_cpu(cuda):
        if cuda:
            raise build.Unavailable("nvcc is not on PATH")
        return "the CPU's"

    monkeypatch.setattr(build, "build", only_cpu)
    monkeypatch.setattr(build, "_cuda_reason", None)
    monkeypatch.setattr(build.torch.version, "cuda", "13.0")
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: True)
    assert build.load() == "the CPU's"
    assert build.cuda_reason() == "nvcc is not on PATH"


@needs_compiler
def test_a_build_that_another_process_never_ends(folder, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr(build, "LOCK_SECONDS", 0.2)
    folder.mkdir()
    with FileLock(folder / (build.name_of(False) + ".lock")):
        assert "another process has been building" in reason()


@needs_compiler
def test_the_compilers_output_is_kept_and_its_cause_told(folder, monkeypatch, tmp_path, capsys):
    here = tmp_path / "csrc"
    shutil.copytree(build.HERE, here)
    (here / "bindings.cpp").write_text('#include "no_such_header.h"\n')
    (here / "bf16_linear_cpu.cpp").write_text("")
    monkeypatch.setattr(build, "HERE", here)
    text = reason()
    assert "no_such_header.h" in text
    log = Path(text.rsplit("(all of it in ", 1)[1].rstrip(")"))
    assert "bindings.cpp" in log.read_text()
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []
    assert "building csrc/bf16_gemv, first run only" in capsys.readouterr().err


@needs_compiler
def test_a_library_that_cannot_be_loaded(folder):
    name = build.name_of(False)
    (folder / name).mkdir(parents=True)
    (folder / name / f"{name}.so").write_bytes(b"no library")
    (folder / name / f"{name}.size").write_text("10")
    assert "cannot be loaded" in reason()


@needs_compiler
def test_half_a_library_is_not_loaded_but_built_again(folder, monkeypatch):
    """The linker's mapping of one would kill the process."""
    name = build.name_of(False)
    (folder / name).mkdir(parents=True)
    (folder / name / f"{name}.so").write_bytes(b"half a li")
    monkeypatch.setattr(build, "_compile", lambda name, folder, cuda: "built again")
    for size in (None, "10"):
        if size:
            (folder / name / f"{name}.size").write_text(size)
        assert build.build(cuda=False) == "built again"


def test_the_name_follows_what_the_build_depends_on(monkeypatch, tmp_path):
    first = build.name_of(False)
    assert build.name_of(False) == first
    changed = set()
    for name, value in (("compiler", "other++"), ("cpu_features", "avx3"), ("cpu_flags", ["-O0"])):
        with monkeypatch.context() as patch:
            patch.setattr(build, name, lambda value=value: value)
            changed.add(build.name_of(False))
    with monkeypatch.context() as patch:
        patch.setattr(build.torch, "__version__", "9.9")
        changed.add(build.name_of(False))
    here = tmp_path / "csrc"
    shutil.copytree(build.HERE, here)
    with open(here / "bf16_linear_cpu.cpp", "a") as file:
        file.write("// a change\n")
    with monkeypatch.context() as patch:
        patch.setattr(build, "HERE", here)
        changed.add(build.name_of(False))
    assert len(changed | {first}) == 6


def test_the_doctor_names_what_it_found(capsys):
    build.doctor()
    labels = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"torch", "gpu", "nvcc", "compiler", "ninja", "cpu", "flags", "kernels"} <= set(labels)
    build.main(["1", "7", "9"])
    assert "asked for: 1 x 9 times 7 x 9" in capsys.readouterr().out
    with pytest.raises(BadInput, match="three whole numbers"):
        build.main(["1", "x", "9"])


def test_a_wrapper_of_nvcc_is_seen_through(tmp_path, monkeypatch, request):
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
