"""Role makers: who is who, told by the program or by the environment."""

import pytest

import hpcdist as dist
from hpcdist.fleet import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker
from hpcdist.fleet.roles import Roles, read_roles

ENDPOINTS = ("n1:6170", "n2:6170")


def test_the_program_says_who_is_who():
    maker = UserDefinedRoleMaker(
        is_collective=True, current_id=1, worker_num=2, worker_endpoints=[*ENDPOINTS]
    )
    assert maker.roles == Roles(Role.WORKER, 1, 2, ENDPOINTS)
    assert (maker.worker_num(), maker.worker_index(), maker.server_num()) == (2, 1, 0)
    assert (maker.is_worker(), maker.is_server(), maker.is_first_worker()) == (True, False, False)
    assert maker.get_trainer_endpoints() == [*ENDPOINTS]
    server = UserDefinedRoleMaker(role=Role.SERVER, worker_num=3, server_endpoints=["n3:1"])
    assert (server.is_server(), server.is_first_worker()) == (True, False)
    assert server.get_pserver_endpoints() == ["n3:1"]
    assert UserDefinedRoleMaker().roles == Roles(Role.WORKER, 0, 1)
    assert UserDefinedRoleMaker(worker_endpoints=ENDPOINTS).worker_num() == 2


def test_roles_have_paddles_numbers():
    assert [*Role] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"current_id": 2, "worker_num": 2}, "worker 2, but there are 2 of them, counted from 0"),
        ({"current_id": -1}, "current_id must be an integer of at least 0"),
        ({"current_id": "0"}, "current_id must be an integer"),
        ({"worker_num": 0}, "worker_num must be an integer of at least 1"),
        ({"worker_num": True}, "worker_num must be an integer"),
        ({"role": 9}, "role must be a Role"),
        ({"role": "WORKER"}, "role must be a Role"),
        ({"worker_endpoints": "n1:1"}, "worker_endpoints must be a list of strings"),
        ({"worker_endpoints": [1]}, "worker_endpoints must be a list of strings"),
        (
            {"worker_endpoints": ["a", "b"], "worker_num": 3},
            "worker_num=3, but worker_endpoints has 2",
        ),
        ({"role": Role.SERVER}, "server 0, but there are 0"),
        ({"worker_nums": 2}, "takes no 'worker_nums'; did you mean 'worker_num'"),
        ({"is_collective": 1}, "is_collective must be True or False"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_told(given, told):
    with pytest.raises(dist.UsageError, match=told):
        UserDefinedRoleMaker(**given)


def test_paddles_variables_say_who_is_who():
    told = {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_TRAINER_ENDPOINTS": "n1:6170,n2:6170"}  # fmt: skip
    assert read_roles(told, 0, 1) == Roles(Role.WORKER, 1, 2, ENDPOINTS)
    server = {"TRAINING_ROLE": "PSERVER", "POD_IP": "n2", "PADDLE_PORT": "6170",
              "PADDLE_TRAINERS_NUM": "4",
              "PADDLE_PSERVERS_IP_PORT_LIST": "n1:6170, n2:6170"}  # fmt: skip
    assert read_roles(server, 0, 1) == Roles(Role.SERVER, 1, 4, (), ENDPOINTS)


def test_without_them_the_place_in_the_job_does():
    assert read_roles({"PATH": "/bin"}, 3, 8) == Roles(Role.WORKER, 3, 8)


def test_a_maker_asks_mpi_or_the_launcher(monkeypatch):
    for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "TRAINING_ROLE"):
        monkeypatch.delenv(name, raising=False)

    def check():
        dist.init_parallel_env()
        maker = PaddleCloudRoleMaker(is_collective=True)
        return maker.worker_index(), maker.worker_num()

    assert dist.simulate(3, check) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PADDLE_TRAINER_ID": "0"}, "PADDLE_TRAINERS_NUM is not set"),
        ({"PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINER_ID is not set"),
        (
            {"PADDLE_TRAINER_ID": "x", "PADDLE_TRAINERS_NUM": "2"},
            "PADDLE_TRAINER_ID='x' is not an int",
        ),
        ({"PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "2"}, "worker 2, but there are 2"),
        ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "0"}, "at least 1"),
        ({"TRAINING_ROLE": "BOSS"}, "TRAINING_ROLE='BOSS' is not one of TRAINER"),
        ({"TRAINING_ROLE": "PSERVER", "PADDLE_TRAINERS_NUM": "1"}, "which is not one of"),
    ],
)
def test_variables_that_cannot_be_are_named(environ, told):
    with pytest.raises(dist.UsageError, match=told):
        read_roles(environ, 0, 1)


def test_a_cloud_maker_reads_late_and_refuses_other_words(monkeypatch):
    monkeypatch.setenv("TRAINING_ROLE", "BOSS")
    maker = PaddleCloudRoleMaker(init_gloo=True, path="/tmp/x")
    with pytest.raises(dist.UsageError, match="BOSS"):
        maker.worker_num()
    with pytest.raises(dist.UsageError, match="takes no 'gloo'"):
        PaddleCloudRoleMaker(gloo=True)
