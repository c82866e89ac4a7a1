"""Builds the kernels at first use, by torch.utils.cpp_extension.load. `python -m csrc.build` is the doctor.

A build is named after everything that it depends on: sources, flags, PyTorch, Python, compiler, and the CPU, since
-march=native makes code for this one. So a cache may be shared by machines, and whatever is found under the name fits.
It is made in a folder of its own and renamed when it is whole, under a lock that dies with its owner.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock, Timeout

from run.cache import cache_folder

HERE = Path(__file__).resolve().parent
CPU_SOURCES, CUDA_SOURCES = ("bindings.cpp", "bf16_gemv_cpu.cpp"), ("bf16_gemv.cu",)
HEADERS = ("bf16_gemv.h", "bf16_gemv_cpu.h")
LOCK_SECONDS = 300  # to wait for another process that builds

_loaded: ModuleType | None = None
_reason: str | None = None


class Unavailable(RuntimeError):
    """The kernels cannot be built or loaded here; the message is one line with the cause."""


def load() -> ModuleType:
    """The extension module, built where that is new; the second call costs nothing. Unavailable where it cannot be."""
    global _loaded, _reason
    if _reason is not None:
        raise Unavailable(_reason)
    if _loaded is None:
        try:
            _loaded = build()
        except Unavailable as error:
            _reason = str(error)
            raise
    return _loaded


def build(cuda: bool | None = None) -> ModuleType:
    """Finds or builds the extension and imports it. cuda: with bf16_gemv.cu; None: where a GPU and nvcc are."""
    if sys.platform == "win32":
        raise Unavailable("the kernels need g++ or clang++, which PyTorch does not use on Windows")
    cuda = wants_cuda() if cuda is None else cuda
    if cuda and nvcc() is None:
        raise Unavailable("nvcc is not on PATH and CUDA_HOME does not name a toolkit")
    name = name_of(cuda)
    folder = builds_folder() / name
    library = folder / (name + ".so")
    if library.is_file():
        return _import(name, library)
    if shutil.which(compiler()) is None:
        raise Unavailable(f"no C++ compiler: {compiler()} is not on PATH (CXX can name another)")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock"), timeout=LOCK_SECONDS):
            return _import(name, library) if library.is_file() else _compile(name, folder, cuda)
    except Timeout:
        raise Unavailable(f"another process has been building for {LOCK_SECONDS} s: {folder}.lock") from None
    except OSError as error:
        raise Unavailable(f"the cache {folder.parent} cannot be written ({error.strerror})") from None


# ---- what a build depends on


def wants_cuda() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available() and nvcc() is not None


def builds_folder() -> Path:
    base = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(base) if base else cache_folder() / "kernels"


def compiler() -> str:
    """As PyTorch chooses it."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "c++")


def cpu_flags() -> list[str]:
    """Flags of the C++ compiler. OpenMP is compiled in, not linked: its symbols are those that PyTorch has loaded."""
    native = "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64") else "-march=native"
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
    return ["-O3", native, *openmp, "-ffp-contract=fast", "-Wno-psabi"]


def cuda_flags() -> list[str]:
    return ["-O3", "--expt-relaxed-constexpr"]


def cpu_features() -> str:
    """The instruction sets of this CPU, as the system lists them; empty where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(
                (line.split(":", 1)[1].strip() for line in file if line.lower().startswith(("flags", "features"))), ""
            )
    except OSError:
        return platform.processor()


def name_of(cuda: bool) -> str:
    """The name of a build: a word for people and a hash for the rest."""
    sources = [*CPU_SOURCES, *HEADERS, *(CUDA_SOURCES if cuda else ())]
    parts = [*((HERE / name).read_text(encoding="utf-8") for name in sources), *cpu_flags(), torch.__version__]
    parts += [sys.version, platform.machine(), cpu_features(), compiler()]
    if cuda:
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        parts += [*cuda_flags(), str(nvcc()), str(capability), os.environ.get("TORCH_CUDA_ARCH_LIST", "")]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"bf16_gemv_{'cuda' if cuda else 'cpu'}_{digest}"


def nvcc() -> str | None:
    """The real nvcc. One on PATH may be a wrapper script, from whose place PyTorch infers a wrong CUDA_HOME."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")
    if found is None and Path("/usr/local/cuda/bin/nvcc").is_file():
        found = "/usr/local/cuda/bin/nvcc"
    if found is None or home:
        return found
    try:
        dry = subprocess.run(
            [found, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    top = re.search(r"^#\$ TOP=(.*)$", dry.stderr, re.MULTILINE)
    real = Path(top[1].strip()) / "bin" / "nvcc" if top else None
    return str(real.resolve()) if real and real.is_file() else found


# ---- compiling


def _compile(name: str, folder: Path, cuda: bool) -> ModuleType:
    """Builds in a folder of its own, then renames it; the compiler's output of a failure is kept beside it."""
    print("note    building csrc/bf16_gemv, first run only …", flush=True)
    started = time.perf_counter()
    temporary = folder.with_suffix(f".{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    log = folder.with_suffix(".log")
    try:
        with _tools_on_path():
            from torch.utils import cpp_extension

            if cuda:
                cpp_extension.CUDA_HOME = str(Path(nvcc()).parent.parent)
            sources = [str(HERE / source) for source in (*CPU_SOURCES, *(CUDA_SOURCES if cuda else ()))]
            module = cpp_extension.load(
                name,
                sources,
                extra_cflags=[*cpu_flags(), *(["-DWITH_CUDA"] if cuda else [])],
                extra_cuda_cflags=cuda_flags(),
                build_directory=str(temporary),
                with_cuda=cuda,
            )
        shutil.rmtree(folder, ignore_errors=True)  # left without its library, by hand
        temporary.rename(folder)
    except (OSError, Unavailable):
        raise
    except Exception as error:  # RuntimeError with the whole output, or CalledProcessError
        output = str(error)
        log.write_text(output, encoding="utf-8")
        raise Unavailable(f"{_cause(output)} (all of it in {log})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"note    built in {time.perf_counter() - started:.0f} s, kept in {folder}", flush=True)
    return module


@contextmanager
def _tools_on_path():
    """ninja from its Python package, where the environment that has it is not activated."""
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        try:
            import ninja
        except ImportError:
            raise Unavailable("ninja is missing: pip install ninja") from None
        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _cause(output: str) -> str:
    """The line of a compiler's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    marked = (line for line in lines if re.search(r"\berror\b|not found|No such file|mismatch", line, re.IGNORECASE))
    return next((line for line in marked if "Error building extension" not in line), lines[0] if lines else "no output")


def _import(name: str, library: Path) -> ModuleType:
    try:
        spec = spec_from_file_location(name, library)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (ImportError, OSError) as error:
        raise Unavailable(f"{library} cannot be loaded ({str(error).splitlines()[0]}): delete its folder") from None


# ---- the doctor


def doctor() -> None:
    """Prints what a build would use, what is cached, and which code a shape takes."""
    found, features = shutil.which(compiler()), cpu_features().split()
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16") if unit in features]
    print(f"torch     {torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}")
    print(f"gpu       {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none that PyTorch can use'}")
    print(f"nvcc      {nvcc() or 'not found'}")
    print(f"compiler  {f'{found}: {_first_line(found)}' if found else f'{compiler()} is not on PATH'}")
    print(f"ninja     {shutil.which('ninja') or _ninja_package() or 'missing: pip install ninja'}")
    print(f"cpu       {platform.machine()}: {', '.join(units) or 'no vector units that we know'}")
    print(f"flags     {' '.join(cpu_flags())}")
    for folder in sorted(builds_folder().glob("bf16_gemv_*/")):
        if (folder / (folder.name + ".so")).is_file():
            print(f"cached    {folder}{' (this one)' if folder.name == name_of(wants_cuda()) else ''}")
    try:
        kernels = load()
    except Unavailable as error:
        print(f"kernels   none: {error}")
        return
    on_cpu = f"CPU, {kernels.instruction_set()}"
    for what, n, m, k in SHAPES:
        version = kernels.choice(n, m, k, True, False)
        print(f"kernels   {what}: {n} x {k} times {m} x {k}: {on_cpu if version < 0 else f'CUDA, v{version}'}")


SHAPES = (
    ("training, preset cpu", 768, 128, 512),
    ("training, preset gpu", 8192, 384, 1536),
    ("decoding, preset gpt2", 1, 768, 3072),
    ("decoding, its head", 1, 50257, 768),
)


def _first_line(found: str) -> str:
    output = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    return output.splitlines()[0] if output else "says no version"


def _ninja_package() -> str | None:
    try:
        import ninja
    except ImportError:
        return None
    return f"{ninja.BIN_DIR}, of the Python package"


if __name__ == "__main__":
    doctor()
