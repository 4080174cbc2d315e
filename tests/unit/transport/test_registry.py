"""Transports by name: what is built in, what packages bring, and what is told of all else."""

import os
import sys
from subprocess import run

import pytest

import hpcdist as dist
from hpcdist.transport import registry


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a distribution importable that has these entry points."""

    def make(**transports):
        info = tmp_path / "toys-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
        lines = [f"{name} = {where}" for name, where in transports.items()]
        (info / "entry_points.txt").write_text("\n".join(["[hpcdist.transports]", *lines]))
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    yield make
    sys.modules.pop("toy_transport", None)


def test_names_that_ask_for_nothing_in_particular_mean_mpi():
    for backend in (None, "auto", "mpi", "MPI", "gloo"):
        assert registry.transport_name(backend) == "mpi"


@pytest.mark.parametrize("backend", ["hub", "nccl", "", 3, ["mpi"]])
def test_an_unknown_name_is_told_which_there_are(backend, install):
    install(toy="toy_transport:start", Other="toy_transport:start")
    with pytest.raises(dist.UsageError, match=r"'mpi'.*'local'.*'other', 'toy'") as caught:
        dist.init_parallel_env(backend=backend)
    assert repr(backend) in str(caught.value)
    assert ("NCCL" in str(caught.value)) == (backend == "nccl")


def test_what_a_package_brings_is_found_by_its_name_and_started(install):
    folder = install(toy="toy_transport:start")
    (folder / "toy_transport.py").write_text(
        "def start(request):\n    raise LookupError(request.timeout_s, request.comm)\n"
    )
    assert registry.transport_name("Toy") == "toy"
    with pytest.raises(LookupError) as caught:
        dist.init_parallel_env(backend="toy", timeout=7, comm="mine")
    assert caught.value.args == (7.0, "mine")
    assert not dist.is_initialized()


def test_a_package_cannot_stand_in_for_what_is_built_in(install):
    install(mpi="toy_transport:start")
    assert "mpi" not in registry.installed_transports()
    assert registry.load_start("mpi").__module__.startswith("hpcdist.")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("no_such_module:start", "ModuleNotFoundError.*uninstall"),
        ("toy_transport:missing", "AttributeError.*uninstall"),
        ("toy_transport:number", "must be a function.*got 3"),
    ],
)
def test_a_transport_that_cannot_be_imported_is_named(install, where, words):
    (install(toy=where) / "toy_transport.py").write_text("number = 3\n")
    with pytest.raises(dist.TransportError, match=rf"'toy' \({where}\).*{words}"):
        dist.init_parallel_env(backend="toy")


def test_groups_have_the_transport_of_the_world(install):
    install(toy="toy_transport:start")
    for fits in (None, "auto", "gloo", "TOY"):
        registry.check_backend_of_group(fits, "Toy")
    registry.check_backend_of_group("mpi", "LOCAL")
    for backend, world in (("mpi", "TOY"), ("toy", "MPI"), ("local", "MPI")):
        with pytest.raises(dist.UsageError, match=f"'{backend}' differs.*'{world.lower()}'"):
            registry.check_backend_of_group(backend, world)


def test_a_process_can_be_a_world_of_its_own_without_mpi():
    program = (
        "import sys, hpcdist as dist, numpy as np\n"
        "world = dist.init_parallel_env(backend='local')\n"
        "assert (world.nranks, dist.get_backend()) == (1, 'LOCAL')\n"
        "dist.all_reduce(x := np.ones(3))\n"
        "assert x.tolist() == [1, 1, 1]\n"
        "assert dist.new_group([0], 'local').backend == 'LOCAL'\n"
        "assert 'mpi4py' not in sys.modules\n"
    )
    run([sys.executable, "-c", program], check=True)


def test_processes_that_a_launcher_started_are_not_made_worlds_of_their_own():
    program = (
        "import hpcdist as dist\n"
        "try:\n    dist.init_parallel_env(backend='local')\n"
        "except dist.UsageError as error:\n    print(error)\n"
    )
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    told = run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, **ranks},
        capture_output=True,
        text=True,
    )
    assert "openmpi started 2 of them" in told.stdout
