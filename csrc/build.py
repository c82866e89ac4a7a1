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
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock, Timeout

from base.cache import cache_folder
from base.errors import BadInput, run_script

HERE = Path(__file__).resolve().parent
CPU_SOURCES, CUDA_SOURCES = ("bindings.cpp", "bf16_linear_cpu.cpp"), ("bf16_linear.cu",)
HEADERS = ("bf16_linear.h", "bf16_linear_cpu.h")
LOCK_SECONDS = 300  # to wait for another process that builds

_loaded: ModuleType | None = None
_reason: str | None = None  # why there is none
_cuda_reason: str | None = None  # why there is one without CUDA, where a GPU is


class Unavailable(RuntimeError):
    """The kernels cannot be built or loaded here; the message is one line with the cause."""


def load() -> ModuleType:
    """The extension module, built where that is new; the second call costs nothing. Unavailable where it cannot be."""
    global _loaded, _reason, _cuda_reason
    if _reason is not None:
        raise Unavailable(_reason)
    if _loaded is None and torch.version.cuda is not None and torch.cuda.is_available():
        try:
            _loaded = build(cuda=True)
        except Unavailable as error:  # the CPU's code may do all the same
            _cuda_reason = str(error)
    if _loaded is None:
        try:
            _loaded = build(cuda=False)
        except Unavailable as error:
            _reason = str(error)
            raise
    return _loaded


def cuda_reason() -> str | None:
    """Why the loaded kernels have no CUDA code, on a machine with a GPU."""
    return _cuda_reason


def build(cuda: bool) -> ModuleType:
    """Finds or builds the extension, with or without bf16_linear.cu, and imports it."""
    if sys.platform == "win32":
        raise Unavailable("the kernels need g++ or clang++, which PyTorch does not use on Windows")
    if shutil.which(compiler()) is None:
        raise Unavailable(f"no C++ compiler: {compiler()} is not on PATH (CXX can name another)")
    if cuda and nvcc() is None:
        raise Unavailable("nvcc is not on PATH and CUDA_HOME does not name a toolkit")
    name = name_of(cuda)
    folder = builds_folder() / name
    library = folder / (name + ".so")
    try:
        if _is_whole(library):
            return _import(name, library)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_suffix(".lock")):
            return _import(name, library) if _is_whole(library) else _compile(name, folder, cuda)
    except OSError as error:
        raise Unavailable(f"the cache {folder.parent} cannot be used ({error.strerror})") from None


def _is_whole(library: Path) -> bool:
    """Whether the library is there with the size that was written beside it: half of one would kill the process."""
    size = library.with_suffix(".size")
    return library.is_file() and size.is_file() and size.read_text() == str(library.stat().st_size)


@contextmanager
def _alone(path: Path):
    """One builder at a time. The lock is the system's, so it ends with a process that is killed."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _note("another process builds csrc/bf16_gemv: waiting for it …")
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
    parts += [sys.version, platform.machine(), cpu_features(), compiler(), version_of(compiler())]
    if cuda:
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        parts += [*cuda_flags(), version_of(nvcc()), str(capability), os.environ.get("TORCH_CUDA_ARCH_LIST", "")]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"bf16_gemv_{'cuda' if cuda else 'cpu'}_{digest}"


@cache
def version_of(tool: str) -> str:
    """What a compiler says of itself."""
    try:
        return subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


@cache
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
    _note("building csrc/bf16_gemv, first run only …")
    started = time.perf_counter()
    for left in folder.parent.glob(f"{name}.*.tmp"):  # by a process that was killed, since we have the lock
        shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_suffix(f".{os.getpid()}.tmp")
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
    shutil.rmtree(folder, ignore_errors=True)  # damaged
    temporary.rename(folder)
    _note(f"built in {time.perf_counter() - started:.0f} s, kept in {folder}")
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


def doctor(shape: tuple[int, int, int] | None = None) -> None:
    """Prints what a build would use, what is cached, and which code the shape (N, M, K), or a few, would take."""
    found, features = shutil.which(compiler()), cpu_features().split()
    fitting = {name_of(False), name_of(nvcc() is not None)}
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16") if unit in features]
    print(f"torch     {torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}")
    print(f"gpu       {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none that PyTorch can use'}")
    print(f"nvcc      {nvcc() or 'not found'}")
    print(f"compiler  {f'{found}: {version_of(found).splitlines()[0]}' if found else f'{compiler()} is not on PATH'}")
    print(f"ninja     {shutil.which('ninja') or _ninja_package() or 'missing: pip install ninja'}")
    print(f"cpu       {platform.machine()}: {', '.join(units) or 'no vector units that we know'}")
    print(f"flags     {' '.join(cpu_flags())}")
    for folder in sorted(builds_folder().glob("bf16_gemv_*/")):
        if _is_whole(folder / (folder.name + ".so")):
            print(f"cached    {folder}{' (fits)' if folder.name in fitting else ''}")
    try:
        kernels = load()
    except Unavailable as error:
        print(f"kernels   none: {error}")
        return
    if cuda_reason():
        print(f"kernels   without CUDA: {cuda_reason()}")
    on_cpu = f"CPU, {kernels.instruction_set()}"
    for what, n, m, k, training in [("asked for", *shape, shape[0] > 8)] if shape else SHAPES:
        version = kernels.choice(
            n, m, k, training, not training
        )  # training: bf16 x, fp32 masters; decoding: fp32, bf16
        print(f"kernels   {what}: {n} x {k} times {m} x {k}: {on_cpu if version < 0 else f'CUDA, v{version}'}")


SHAPES = (
    ("training, preset cpu", 768, 128, 512, True),
    ("training, preset gpu", 8192, 384, 1536, True),
    ("decoding, preset gpt2", 1, 768, 3072, False),
    ("decoding, its head", 1, 50257, 768, False),
)


def _ninja_package() -> str | None:
    try:
        import ninja
    except ImportError:
        return None
    return f"{ninja.BIN_DIR}, of the Python package"


def main(argv: list[str]) -> None:
    if len(argv) not in (0, 3) or not all(word.isdecimal() for word in argv):
        raise BadInput("python -m csrc.build [N M K]: N vectors times a weight (M, K), three whole numbers or none")
    doctor(tuple(map(int, argv)) or None)


if __name__ == "__main__":
    sys.exit(run_script("csrc.build", lambda: main(sys.argv[1:])))
