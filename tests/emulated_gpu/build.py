"""Build emulated GPUs and a CuPy that runs on them, in .cache/emulated_gpu: make emulated-gpu.

What is built is kept until its sources or the versions below change. Where it cannot be built, one
line says why, and the exit code is 3.

NVIDIA's runtime is linked into CuPy's wheel as a static library, which works with NVIDIA's driver
alone. So the one module of CuPy that has it is compiled anew, from CuPy's own source and as it is,
and linked to ours; it calls documented functions only. All other modules are those of the wheel.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / ".cache" / "emulated_gpu"
LIBRARIES, SITE, HEADERS = BUILT / "lib", BUILT / "site", BUILT / "include"
TOOLS, ARCHIVE = BUILT / "tools", BUILT / "source"

CUPY = "14.2.0"
ON_DEVICE = [f"cupy-cuda12x=={CUPY}", "cuda-pathfinder==1.9.1"]
FOR_BUILDING = ["nvidia-cuda-runtime-cu12==12.9.79", "cython==3.2.4"]
CUDA = TOOLS / "nvidia" / "cuda_runtime" / "include"
RUNTIME = "cupy_backends/cuda/api/runtime"
DEFINED = (
    "CUPY_USE_CUDA_PYTHON=False,CUPY_CUFFT_STATIC=False,CUPY_CUDA_VERSION=12090,CUPY_HIP_VERSION=0"
)

OLDEST_GCC = {"x86_64": 12, "aarch64": 13}
"""By machine: the first g++ with 16-bit floats."""

C = shlex.split(
    "gcc -std=gnu11 -O1 -g -fPIC -shared -Wall -Wextra -Werror -fvisibility=hidden -pthread"
)
FLAGS = "-fPIC -w -fpermissive -fno-strict-aliasing -ffp-contract=off -fvisibility=hidden " + (
    "-fno-gnu-unique -O1 -std=c++17"
)
"""Of kernels: as CUDA, no contraction across statements; small ones, so that compiling counts."""

FOLDERS = {
    "driver": ("libcuda.so.1", "-Wl,-z,defs"),
    "runtime": ("libcudart.so.12", "-lcuda"),
    "nvrtc": ("libnvrtc.so.12", ""),
    "nccl": ("libnccl.so.2", "-lcuda -lm"),
    "cublas": ("libcublas.so.12", f"-lcuda -Wl,--version-script={HERE}/cublas/exports.map"),
}
"""By folder of sources: the library that is made of it, and how it is linked."""

ALSO = {"libcuda.so": "libcuda.so.1", "libcudart.so": "libcudart.so.12"} | {
    "libcublasLt.so.12": "libcublas.so.12"  # only to be found: it has none of its functions
}


class NotHereError(Exception):
    """The emulated GPUs cannot be had on this machine; says why."""


def why_not():
    """Return why they cannot be built here; empty if they may."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in OLDEST_GCC:
        return f"they run on Linux, on x86-64 and AArch64, not on {sys.platform} on {machine}"
    if not (shutil.which("g++") and shutil.which("gcc")):
        return "there is no gcc and g++, which compile them and their kernels"
    version = subprocess.run(
        ["g++", "-dumpversion"], capture_output=True, text=True, check=True
    ).stdout
    oldest = OLDEST_GCC[machine]
    if int(version.split(".")[0]) < oldest:
        return f"g++ {version.strip()} is too old for 16-bit floats: {oldest} is needed"
    return ""


def do(*command, **more):
    """Run a command; what it says is shown if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        **more,
    )
    if done.returncode:
        said = done.stdout.decode(errors="replace")
        raise RuntimeError(f"{shlex.join(map(str, command))}:\n{said}")


# ---- the index of packages


def install(folder, packages):
    """Install wheels into a folder of their own, without what they depend on."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--target", folder]
        do(sys.executable, "-m", "pip", "install", *options, *packages)
    except RuntimeError as error:
        last = str(error).strip().splitlines()[-1]
        raise NotHereError(f"pip installs no {' '.join(packages)}: {last}") from None


def index():
    """Return the address of the index that pip uses."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        text=True,
        check=False,
    )
    return os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or "https://pypi.org/simple"


def fetch_source():
    """Unpack CuPy's source archive. `pip download` would first try to build it."""
    page = f"{index().rstrip('/')}/cupy/"
    try:
        with urllib.request.urlopen(page, timeout=60) as answer:
            text = answer.read().decode()
        found = re.search(rf'href="([^"#]*/cupy-{re.escape(CUPY)}\.tar\.gz)#sha256=(\w+)"', text)
        if not found:
            raise NotHereError(f"{page} has no cupy-{CUPY}.tar.gz")
        with urllib.request.urlopen(urllib.parse.urljoin(page, found[1]), timeout=60) as answer:
            archive = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise NotHereError(f"CuPy's source archive cannot be had from {page}: {error}") from None
    if hashlib.sha256(archive).hexdigest() != found[2]:
        raise NotHereError(f"{found[1]} is not what the index says it is")
    packed = BUILT / "cupy.tar.gz"
    packed.write_bytes(archive)
    shutil.rmtree(ARCHIVE, ignore_errors=True)
    with tarfile.open(packed) as file:
        file.extractall(ARCHIVE, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    packed.unlink()


# ---- building


def kernel_flags():
    """Return how kernels are compiled; thread-local variables are most of what they use."""
    return FLAGS + (" -mtls-dialect=gnu2" if platform.machine() == "x86_64" else "")


def compile_library(folder, into, *defined):
    """Compile a folder of C into its library."""
    name, more = FOLDERS[folder]
    includes = [f"-I{HERE}/headers", "-isystem", CUDA]
    ends = ["-o", into / name, f"-Wl,-soname,{name}", f"-L{LIBRARIES}", *more.split()]
    do(*C, *defined, *includes, *sorted((HERE / folder).glob("*.c")), *ends)


def compile_libraries(stamp):
    """Make all libraries, and the header of kernels, which is compiled in advance."""
    for folder in (LIBRARIES, HEADERS):
        shutil.rmtree(folder, ignore_errors=True)
    LIBRARIES.mkdir(parents=True)
    shutil.copytree(HERE / "include", HEADERS)
    for link, target in ALSO.items():
        (LIBRARIES / link).symlink_to(target)
    words = {"KERNEL_FLAGS": f"g++ -x c++ {kernel_flags()}", "STAMP": stamp}
    defined = [f'-D{each}="{value}"' for each, value in words.items()]
    for folder in FOLDERS:
        compile_library(folder, LIBRARIES, *defined)
    header = HEADERS / "emulated_kernel.h"
    do("g++", "-x", "c++-header", *kernel_flags().split(), header, "-o", f"{header}.gch")


def compile_runtime_of_cupy():
    """Compile CuPy's module `runtime` from its source, and put it in the place of the wheel's."""
    source = ARCHIVE / f"cupy-{CUPY}"
    cython = [sys.executable, "-m", "cython", "-3", "--cplus", "-E", DEFINED]
    environ = os.environ | {"PYTHONPATH": str(TOOLS)}
    made = [f"{RUNTIME}.pyx", "-o", "runtime.cpp"]
    do(*cython, *made, cwd=source, env=environ)
    python = sysconfig.get_path("include")
    folders = [".", "cupy_backends", "cupy_backends/cuda/api", HERE / "headers", CUDA, python]
    extension = SITE / f"{RUNTIME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ["-O1", "-w", "-fPIC", "-shared", *(f"-I{each}" for each in folders)]
    do("g++", *flags, "runtime.cpp", "-o", extension, f"-L{LIBRARIES}", "-lcudart", cwd=source)


# ---- doing only what is new


def digest(*texts):
    """Return what tells these texts, and those of files, from others."""
    total = hashlib.sha256()
    for each in texts:
        total.update(each.read_bytes() if isinstance(each, Path) else str(each).encode())
    return total.hexdigest()[:16]


def step(name, state, work):
    """Do `work` unless it was done for this state."""
    stamp = BUILT / f".{name}"
    if stamp.exists() and stamp.read_text() == state:
        return
    print(f"emulated GPU: {name}", flush=True)
    stamp.unlink(missing_ok=True)
    work()
    stamp.write_text(state)


def build():
    """Build what is missing or has changed; `NotHereError` says why that is not possible."""
    reason = why_not()
    if reason:
        raise NotHereError(reason)
    BUILT.mkdir(parents=True, exist_ok=True)
    python = f"{sys.version_info[:2]}"
    packages = digest(python, *ON_DEVICE)
    step("packages", packages, lambda: install(SITE, ON_DEVICE))
    step("tools", digest(python, *FOR_BUILDING), lambda: install(TOOLS, FOR_BUILDING))
    step("source", CUPY, fetch_source)
    kernels = digest(kernel_flags(), *sorted((HERE / "include").iterdir()))
    sources = sorted(each for each in HERE.rglob("*") if each.suffix in (".c", ".h", ".py", ".map"))
    libraries = digest(kernels, *sources)
    step("libraries", libraries, lambda: compile_libraries(kernels))
    step("runtime", digest(packages, libraries), compile_runtime_of_cupy)


if __name__ == "__main__":
    try:
        build()
    except NotHereError as error:
        print(f"emulated GPUs cannot be had here: {error}")
        sys.exit(3)
