"""The conditions of other machines, and how to have them here; `tests/elsewhere.py` runs tests so.

A condition is an environment, a command that runs others under it, a clone of its own, or several
of these. The settings of OpenBLAS stay as a machine has them: older releases compute wrongly on
some processors without.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".cache/elsewhere"
sys.path.append(str(ROOT / "packaging"))
import clean_installs  # noqa: E402


def refusal(command, **more):
    """Run a command; return nothing, or in one line why it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    told = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    return told.splitlines()[-1] if done.returncode else ""


class NotHereError(Exception):
    """This machine cannot have a condition, for the reason that is told."""


class Clone(NamedTuple):
    """A clone of its own: its folder, the Pythons that do, and what `make` sets it up with."""

    folder: str = ""
    pythons: Sequence[str] = ()
    environ: Mapping[str, str] = MappingProxyType({})
    newest: str = ""  # packages that are brought to their newest release afterwards


class Condition(NamedTuple):
    """A row of the table; what is a function returns the value, or raises NotHereError."""

    name: str
    stands_for: str
    environ: Mapping[str, str] | Callable[[], Mapping[str, str]] = MappingProxyType({})
    wrapper: Sequence[str] | Callable[[], Sequence[str]] = ()
    clone: Clone | None = None
    suites: str = "process openmpi mpich"
    turn: str = ""  # the tests that have a turn in continuous integration; none: it has no turn


# ---- what runs a command under a condition


def shell(script, *flags):
    """Return a command that runs another after a script, in namespaces of its own."""
    namespaces = ("unshare", *flags) if flags else ()
    return (*namespaces, "sh", "-ec", f'{script}\nexec "$@"', "elsewhere")


def up_for(seconds):
    """Return a function whose command runs others on a machine that is up for that long."""

    def wrapper():
        shift = str(seconds - int(float(Path("/proc/uptime").read_text().split()[0])))
        clocks = ("--monotonic", shift, "--boottime", shift)
        return ("unshare", "--time", *clocks, "--fork", "--kill-child")

    return wrapper


def one_core():
    return ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))


def ordinary_user():
    """Own the same files, without root's rights: in a user namespace, which has no other users."""
    if os.geteuid():
        return ()
    return ("unshare", "--user", "--map-user=1000", "--map-group=1000")


# A /dev of its own, with what programs look for there but no shm.
NO_SHM = """
dev=$(mktemp -d)
mount -t tmpfs -o mode=755 tmpfs "$dev"
for each in null zero full random urandom tty; do
    : >"$dev/$each"; mount --bind /dev/$each "$dev/$each"
done
mkdir "$dev/pts"; mount --rbind /dev/pts "$dev/pts"; ln -s pts/ptmx "$dev/ptmx"
ln -s /proc/self/fd "$dev/fd"
ln -s fd/0 "$dev/stdin"; ln -s fd/1 "$dev/stdout"; ln -s fd/2 "$dev/stderr"
mount --move "$dev" /dev
"""

NO_COMPILER = """
for each in cc c99 gcc g++ c++ clang clang++ icx nvc; do
    ! path=$(command -v $each) || mount --bind /dev/null "$(readlink -f "$path")"
done
"""

# A filter of system calls, as that of some containers: nobody reads the memory of another process.
UNREADABLE = """
import ctypes, errno, os, struct, sys
calls = {"x86_64": (101, 310, 311), "aarch64": (117, 270, 271)}[os.uname().machine]
step = lambda code, yes, no, value: struct.pack("HBBI", code, yes, no, value)
steps = [step(0x20, 0, 0, 0), *(step(0x15, 3 - i, 0, call) for i, call in enumerate(calls))]
steps += [step(0x06, 0, 0, 0x7FFF0000), step(0x06, 0, 0, 0x00050000 | errno.EPERM)]
code = ctypes.create_string_buffer(b"".join(steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program):
    sys.exit(f"no filter of system calls: {os.strerror(ctypes.get_errno())}")
os.execvp(sys.argv[1], sys.argv[1:])
"""


# ---- environments


def vector_units(**environ):
    """Return a function that gives these variables on x86-64, which they are about."""

    def variables():
        if os.uname().machine != "x86_64":
            raise NotHereError("it is about the vector units of x86-64")
        return environ

    return variables


def numpy_baseline():
    """Switch off what this processor has beyond NumPy's baseline; the names vary by release."""
    from numpy._core import _multiarray_umath as core

    used = [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]
    if not used:
        raise NotHereError("NumPy uses no more than its baseline here")
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(used)}


def unwritable_home():
    home = KEPT / "home"
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o555)
    return {"HOME": str(home), "XDG_CACHE_HOME": "", "USER": "", "LOGNAME": ""}


def turkish():
    """Compile the locale, which few machines have; there i is not the small letter of I."""
    compiled = KEPT / "locale/tr_TR.UTF-8"
    if not compiled.exists():
        compiled.parent.mkdir(parents=True, exist_ok=True)
        command = ["localedef", "--inputfile=tr_TR", "--charmap=UTF-8", str(compiled)]
        told = refusal(command)
        if not compiled.exists():
            raise NotHereError(f"no locale tr_TR.UTF-8: {told}")
    return {"LOCPATH": str(compiled.parent), "LC_ALL": compiled.name, "LANG": compiled.name}


def another_order(seed):
    """Return a function that gives what shuffles the tests, with an environment for its plugin."""

    def variables():
        plugin = KEPT / "randomly"
        if not plugin.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            told = refusal([*pip, "--target", str(plugin), "pytest-randomly"])
            if told:
                raise NotHereError(f"no pytest-randomly: {told}")
        options = f"--randomly-seed={seed} --hypothesis-seed={seed}"
        return {"PYTHONPATH": str(plugin), "PYTEST_ADDOPTS": options}

    return variables


# ---- the table

# What has a turn in continuous integration: the tests that a condition is most likely to break.
NUMERIC = (
    "tests/unit/optim tests/unit/torch tests/unit/parallel tests/docs/test_examples.py "
    "tests/mpi/test_torch_sharding.py tests/mpi/test_hybrid.py"
)
LAUNCHED = (
    "tests/unit/launch tests/unit/transport tests/unit/rpc tests/launch/test_run.py "
    "tests/mpi/test_flight.py tests/mpi/test_rpc.py"
)
SHARED = (
    "tests/unit/transport tests/launch/test_shared.py "
    "tests/mpi/test_shared.py tests/mpi/test_contract.py"
)
WORDS = "tests/unit/launch tests/unit/diagnostics tests/unit/checkpoint tests/unit/fs tests/docs"

CONDITIONS = (
    Condition(
        "torch-default",
        "torch without AVX2 and AVX-512",
        vector_units(ATEN_CPU_CAPABILITY="default"),
        suites="process openmpi",
        turn=NUMERIC,
    ),
    Condition(
        "torch-avx2",
        "torch with AVX2 at most",
        vector_units(ATEN_CPU_CAPABILITY="avx2"),
        suites="process openmpi",
        turn=NUMERIC,
    ),
    Condition(
        "numpy-baseline",
        "NumPy on a processor that has only its baseline",
        numpy_baseline,
        suites="process openmpi",
        turn=NUMERIC,
    ),
    Condition(
        "libraries-sse",
        "oneDNN, MKL and XLA without AVX",
        vector_units(
            ONEDNN_MAX_CPU_ISA="SSE41",
            MKL_ENABLE_INSTRUCTIONS="SSE4_2",
            MKL_CBWR="COMPATIBLE",
            XLA_FLAGS="--xla_cpu_max_isa=SSE4_2",
        ),
        suites="process openmpi",
        turn=NUMERIC,
    ),
    Condition(
        "kernel-baseline",
        "the compiled kernel on a processor without AVX2",
        vector_units(),
        clone=Clone(environ={"CFLAGS": "-DHPCDIST_BASELINE"}),
    ),
    Condition("young", "a machine that has just booted", wrapper=up_for(20), turn=LAUNCHED),
    Condition(
        "old", "a machine that is up for 400 days", wrapper=up_for(400 * 86400), turn=LAUNCHED
    ),
    Condition(
        "folder",
        "a clone in a folder with a space and a letter that is not ASCII",
        clone=Clone("a folder ä"),
    ),
    Condition("umask", "files that nobody else may read", wrapper=shell("umask 077"), turn=WORDS),
    Condition("C", "the locale C", {"LC_ALL": "C", "LANG": "C"}, turn=WORDS),
    Condition(
        "turkish",
        "the locale tr_TR.UTF-8",
        turkish,
        suites="process openmpi",  # MPICH's UCX does not find its own settings there, and ends
        turn=WORDS,
    ),
    Condition("kathmandu", "a time zone of +05:45", {"TZ": "Asia/Kathmandu"}, turn=WORDS),
    Condition("one-core", "one core for everything", wrapper=one_core, turn=LAUNCHED),
    Condition(
        "few-files",
        "256 open files at most",
        wrapper=("prlimit", "--nofile=256:256"),
        turn=LAUNCHED,
    ),
    Condition(
        "small-shm",
        "a container whose /dev/shm has 64 kB",
        {"OMPI_MCA_btl_sm_backing_directory": "/tmp"},  # else Open MPI complains at each start
        shell("mount -t tmpfs -o size=64k tmpfs /dev/shm", "--mount"),
        suites="process openmpi",  # ranks of MPICH end there by a bus error
        turn=SHARED,
    ),
    Condition(
        "no-shm",
        "no /dev/shm",
        {"UCX_LOG_LEVEL": "fatal", "OMPI_MCA_sharedfp": "^sm"},  # they complain, and cannot
        shell(NO_SHM, "--mount"),
        suites="process openmpi",
        turn=SHARED,
    ),
    Condition(
        "no-network",
        "loopback alone, and a host name that does not resolve",
        wrapper=shell("ip link set lo up; hostname nowhere.invalid", "--net", "--uts"),
        turn=LAUNCHED,
    ),
    Condition(
        "unreadable",
        "memory of other processes that cannot be read",
        wrapper=(sys.executable, "-c", UNREADABLE),
        suites="process openmpi",  # MPICH reads memory of other processes, too, and ends
        turn=SHARED,
    ),
    Condition(
        "no-compiler",
        "no compiler, and so no compiled kernel",
        wrapper=shell(NO_COMPILER, "--mount"),
        clone=Clone(environ={"CC": "/bin/false"}),
    ),
    Condition(
        "user",
        "an ordinary user without a name, whose home cannot be written",
        unwritable_home,
        ordinary_user,  # after what only root may do
        turn=LAUNCHED,
    ),
    Condition(
        "numpy-oldest",
        "the oldest NumPy that is supported",
        clone=Clone(  # for which there is no JAX
            pythons=("3.11", "3.10"),
            environ={"constraint": "numpy==1.24.*\npyarrow<18", "JAX": ""},
        ),
    ),
    Condition(
        "jax-oldest",
        "the oldest JAX that is supported",
        clone=Clone(pythons=("3.11", "3.10"), environ={"constraint": "jax==0.6.2\njaxlib==0.6.2"}),
    ),
    Condition("jax-newest", "the newest JAX", clone=Clone(newest="jax jaxlib")),
    Condition("numpy-newest", "the newest NumPy", clone=Clone(newest="numpy ml_dtypes")),
    *(
        Condition(f"python{version}", f"Python {version}", clone=Clone(pythons=(version,)))
        for version in clean_installs.supported()
        if version != f"3.{sys.version_info[1]}"
    ),
    *(
        Condition(
            f"order-{seed}",
            "the tests in another order",
            another_order(seed),
            turn="tests/unit tests/mpi/test_contract.py",
        )
        for seed in range(1, 6)
    ),
)

TOGETHER = (
    "kernel-baseline+young+C+order-1",
    "folder+old+umask+order-2",
    "numpy-oldest+no-network+kathmandu+order-3",
    "numpy-newest+few-files+user+order-4",
    "jax-oldest+turkish+small-shm+unreadable+torch-default+numpy-baseline",
    "jax-newest+no-shm+libraries-sse+torch-avx2+order-5",
)
"""Conditions that share a machine, where all are asked for; each of the others has its own."""


def chosen(names):
    """Return the conditions of each of these names, where `young+C` are two that hold together.

    Without names, all.
    """
    known = {each.name: each for each in CONDITIONS}
    if not names:
        alone = set(known).difference(*(each.split("+") for each in TOGETHER))
        names = (*TOGETHER, *(name for name in known if name in alone))
    groups = [name.split("+") for name in names]
    if unknown := {name for group in groups for name in group} - set(known):
        sys.exit(f"no such condition: {' '.join(unknown)}; there are {' '.join(known)}")
    return [[each for each in CONDITIONS if each.name in group] for group in groups]
