"""Builds the kernels at first use, by torch.utils.cpp_extension.load. `python -m csrc.build` is the doctor.

The name of a build has a hash of everything that the build depends on: sources, flags, PyTorch, Python, compiler, and
the CPU, since -march=native makes code for this one. So machines may share a cache, and a build with the right name
fits. A build is made in a folder of its own, which is renamed once it is whole. A lock that ends with its owner lets
one process build at a time.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from base.cache import cache_folder
from base.errors import BadInput, run_script

HERE = Path(__file__).resolve().parent
CPU_SOURCES = ("bindings.cpp", "bf16_linear_cpu.cpp")
CPU_HEADERS = ("bf16_linear.h", "bf16_linear_cpu.h")
CUDA_SOURCES = ("bf16_linear.cu",)
CUDA_HEADERS = ("bf16_linear_numbers.cuh", "bf16_linear_vectors.cuh", "bf16_linear_tiles.cuh")
LOCK_SECONDS = 300  # to wait for another process that builds

_loaded: ModuleType | None = None
_why_unavailable: str | None = None
_why_without_cuda: str | None = None  # on a machine with a GPU


class Unavailable(RuntimeError):
    """The kernels cannot be built or loaded here; the message is one line with the cause."""


def load() -> ModuleType:
    """The extension module, built at the first call on a machine. Unavailable where it cannot be built or imported."""
    global _loaded, _why_unavailable, _why_without_cuda
    if _why_unavailable is not None:
        raise Unavailable(_why_unavailable)
    if _loaded is None and torch.version.cuda is not None and torch.cuda.is_available():
        try:
            _loaded = find_or_build(cuda=True)
        except Unavailable as error:  # the CPU's code may still build
            _why_without_cuda = str(error)
    if _loaded is None:
        try:
            _loaded = find_or_build(cuda=False)
        except Unavailable as error:
            _why_unavailable = str(error)
            raise
    return _loaded


def why_without_cuda() -> str | None:
    """The reason why the loaded kernels have no CUDA code on a machine with a GPU, else None."""
    return _why_without_cuda


def find_or_build(cuda: bool) -> ModuleType:
    """Finds or builds the extension, with or without bf16_linear.cu, and imports it. Unavailable with the reason."""
    if sys.platform == "win32":
        raise Unavailable("the kernels need g++ or clang++, which PyTorch does not use on Windows")
    if shutil.which(compiler()) is None:
        raise Unavailable(f"no C++ compiler: {compiler()} is not on PATH (CXX can name another)")
    if cuda and nvcc() is None:
        raise Unavailable("nvcc is not on PATH and CUDA_HOME does not name a toolkit")
    name = build_name(cuda)
    folder = builds_folder() / name
    library = folder / (name + ".so")
    try:
        if _is_whole(library):
            return _import(name, library)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_builder(folder.with_suffix(".lock")):
            return _import(name, library) if _is_whole(library) else _compile(name, folder, cuda)
    except OSError as error:
        raise Unavailable(f"the cache {folder.parent} cannot be used ({error.strerror})") from None


def _is_whole(library: Path) -> bool:
    """Whether the library has the size that was written beside it. Importing half a library would kill the process."""
    size = library.with_suffix(".size")
    return library.is_file() and size.is_file() and size.read_text() == str(library.stat().st_size)


@contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    """Holds the lock file while the block runs. The lock is the system's, so it ends with a process that is killed."""
    from filelock import FileLock, Timeout  # takes longer to import than to find a build that is there

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _note("another process builds csrc/bf16_linear: waiting for it …")
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            raise Unavailable(f"another process has been building for {LOCK_SECONDS} s: {path}") from None
    try:
        yield
    finally:
        lock.release()


def _note(text: str) -> None:
    print(f"note    {text}", file=sys.stderr, flush=True)  # standard output is for a sample's text


# ---- what a build depends on


def builds_folder() -> Path:
    """The folder that holds a folder for each build."""
    base = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(base) if base else cache_folder() / "kernels"


def compiler() -> str:
    """The C++ compiler, as PyTorch chooses it."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "c++")


def cpu_flags() -> list[str]:
    """Flags of the C++ compiler. OpenMP is not linked: PyTorch has already loaded its library."""
    native = "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64") else "-march=native"
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
    return ["-O3", native, *openmp, "-ffp-contract=fast", "-Wno-psabi"]


def cuda_flags() -> list[str]:
    """Flags of nvcc."""
    return ["-O3", "--expt-relaxed-constexpr"]


def cpu_features() -> str:
    """The instruction sets of this CPU, as the system lists them; empty where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.lower().startswith(("flags", "features")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor()
    return ""


def build_name(cuda: bool) -> str:
    """The name of a build: words for people, and a hash of everything that the build depends on."""
    files = [*CPU_SOURCES, *CPU_HEADERS, *((*CUDA_SOURCES, *CUDA_HEADERS) if cuda else ())]
    parts = [*((HERE / file).read_text(encoding="utf-8") for file in files), *cpu_flags(), torch.__version__]
    parts += [sys.version, platform.machine(), cpu_features(), compiler(), version_of(compiler())]
    if cuda:
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        parts += [*cuda_flags(), version_of(nvcc()), str(capability), os.environ.get("TORCH_CUDA_ARCH_LIST", "")]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"bf16_linear_{'cuda' if cuda else 'cpu'}_{digest}"


@cache
def version_of(tool: str | None) -> str:
    """The answer of a compiler to --version; empty where there is no such compiler."""
    if tool is None:
        return ""
    try:
        return subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


@cache
def nvcc() -> str | None:
    """The path of the real nvcc, or None. An nvcc on PATH may be a wrapper script, and PyTorch would take the folder
    above the script for the toolkit."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")
    if path is None and Path("/usr/local/cuda/bin/nvcc").is_file():
        path = "/usr/local/cuda/bin/nvcc"
    if path is None or home:
        return path
    command = [path, "--dryrun", "-E", "-x", "cu", os.devnull]
    try:
        dry_run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    toolkit = re.search(r"^#\$ TOP=(.*)$", dry_run.stderr, re.MULTILINE)
    real = Path(toolkit[1].strip()) / "bin" / "nvcc" if toolkit else None
    return str(real.resolve()) if real and real.is_file() else path


# ---- compiling


def _compile(name: str, folder: Path, cuda: bool) -> ModuleType:
    """Builds in a temporary folder and renames it. Where the compiler fails, its output is kept in a log beside it."""
    _note("building csrc/bf16_linear, first run only …")
    started = time.perf_counter()
    for abandoned in folder.parent.glob(f"{name}.*.tmp"):  # by a process that was killed: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    temporary = folder.with_suffix(f".{os.getpid()}.tmp")
    temporary.mkdir()
    log = folder.with_suffix(".log")
    try:
        with _ninja_on_path():
            from torch.utils import cpp_extension

            toolkit = nvcc()
            if cuda and toolkit:
                cpp_extension.CUDA_HOME = str(Path(toolkit).parent.parent)
            sources = [str(HERE / source) for source in (*CPU_SOURCES, *(CUDA_SOURCES if cuda else ()))]
            module: Any = cpp_extension.load(
                name,
                sources,
                extra_cflags=[*cpu_flags(), *(["-DWITH_CUDA"] if cuda else [])],
                extra_cuda_cflags=cuda_flags(),
                build_directory=str(temporary),
                with_cuda=cuda,
            )
    except Unavailable:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except Exception as error:  # RuntimeError with the whole output; OSError without a toolkit; CalledProcessError
        shutil.rmtree(temporary, ignore_errors=True)
        output = str(error)
        log.write_text(output, encoding="utf-8")
        raise Unavailable(f"{_cause(output)} (all of it in {log})") from None
    library = temporary / (name + ".so")
    library.with_suffix(".size").write_text(str(library.stat().st_size))
    shutil.rmtree(folder, ignore_errors=True)  # a damaged build, else nothing
    temporary.rename(folder)
    _note(f"built in {time.perf_counter() - started:.0f} s, kept in {folder}")
    return module


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Puts ninja on PATH while the block runs: that of the Python package, where the environment is not activated."""
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        folder = _ninja_package()
        if folder is None:
            raise Unavailable("ninja is missing: pip install ninja")
        os.environ["PATH"] = os.pathsep.join([folder, before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _ninja_package() -> str | None:
    """The folder with ninja of the Python package ninja; None where it is not installed."""
    try:
        import ninja
    except ImportError:
        return None
    return ninja.BIN_DIR


def _cause(output: str) -> str:
    """The line of a compiler's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        marked = re.search(r"\berror\b|not found|No such file|mismatch", line, re.IGNORECASE)
        if marked and "Error building extension" not in line:
            return line
    return lines[0] if lines else "no output"


def _import(name: str, library: Path) -> ModuleType:
    """Imports a compiled library. Unavailable where that fails, for example because PyTorch's own libraries changed."""
    spec = spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{library} is not a library that Python can import: delete its folder")
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (ImportError, OSError) as error:
        raise Unavailable(f"{library} cannot be loaded ({str(error).splitlines()[0]}): delete its folder") from None


# ---- the doctor


def doctor(shape: tuple[int, int, int] | None = None) -> None:
    """Prints the tools, the CPU, the cached builds, and the code that runs for the shape (N, M, K), or for a few."""
    path = shutil.which(compiler())
    fitting = {build_name(cuda=False), build_name(cuda=nvcc() is not None)}
    features = cpu_features().split()
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16") if unit in features]
    print(f"torch     {torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}")
    print(f"gpu       {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none that PyTorch can use'}")
    print(f"nvcc      {nvcc() or 'not found'}")
    print(f"compiler  {f'{path}: {version_of(path).splitlines()[0]}' if path else f'{compiler()} is not on PATH'}")
    print(f"ninja     {shutil.which('ninja') or _ninja_package() or 'missing: pip install ninja'}")
    print(f"cpu       {platform.machine()}: {', '.join(units) or 'no vector units that we know'}")
    print(f"flags     {' '.join(cpu_flags())}")
    for folder in sorted(builds_folder().glob("bf16_linear_*/")):
        if _is_whole(folder / (folder.name + ".so")):
            print(f"cached    {folder}{' (fits)' if folder.name in fitting else ''}")
    try:
        kernels = load()
    except Unavailable as error:
        print(f"kernels   none: {error}")
        return
    if why_without_cuda():
        print(f"kernels   without CUDA: {why_without_cuda()}")
    shapes = [("asked for", *shape, shape[0] > 8)] if shape else SHAPES
    for label, n, m, k, training in shapes:
        # Training has bf16 vectors and fp32 master weights, decoding fp32 vectors and bf16 weights.
        version = kernels.cuda_version_for(n, m, k, training, not training)
        code = f"CUDA, v{version}" if version >= 0 else f"CPU, {kernels.instruction_set()}"
        print(f"kernels   {label}: {n} x {k} times {m} x {k}: {code}")


SHAPES = (  # label, N, M, K, whether it is of training
    ("training, preset cpu", 768, 128, 512, True),
    ("training, preset gpu", 8192, 384, 1536, True),
    ("decoding, preset gpt2", 1, 768, 3072, False),
    ("decoding, its head", 1, 50257, 768, False),
)


def main(argv: list[str]) -> None:
    if len(argv) not in (0, 3) or not all(word.isdecimal() for word in argv):
        raise BadInput("python -m csrc.build [N M K]: N vectors times a weight (M, K), three whole numbers or none")
    if not argv:
        return doctor()
    n, m, k = map(int, argv)
    doctor((n, m, k))


if __name__ == "__main__":
    sys.exit(run_script("csrc.build", lambda: main(sys.argv[1:])))
