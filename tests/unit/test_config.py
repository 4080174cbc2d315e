"""Settings: what the environment says, and what is wrong in it."""

import pytest

import hpcdist as dist
from hpcdist.config import Config, read_config, unknown_settings


def test_the_configuration_is_read_from_the_environment():
    assert read_config({}) == Config(timeout_s=1800.0, piece_mb=4.0, allow_singleton=False)
    given = {"HPCDIST_TIMEOUT_S": "2.5", "HPCDIST_PIECE_MB": "1", "HPCDIST_ALLOW_SINGLETON": "Yes"}
    assert read_config(given) == Config(timeout_s=2.5, piece_mb=1.0, allow_singleton=True)
    assert read_config({"HPCDIST_TIMEOUT_S": ""}) == Config()
    assert read_config({"HPCDIST_ARRAY_PLACEMENTS": "S-1, r"}).array_placements == (-1, None)


def test_a_former_variable_counts_where_the_new_one_is_not_set():
    former, new = "HPCDIST_DEVICE_WAY", "HPCDIST_DEVICE_BACKEND"
    assert read_config({former: "staged"}).device_backend == "staged"
    assert read_config({former: "staged", new: "MPI"}).device_backend == "mpi"
    with pytest.raises(dist.UsageError, match=f"{former}='tcp' is none of auto, nccl, mpi, staged"):
        read_config({former: "tcp"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIMEOUT_S", "soon"),
        ("TIMEOUT_S", "0"),
        ("TIMEOUT_S", "nan"),
        ("PIECE_MB", "-1"),
        ("STALL_S", "-1"),
        ("ALLOW_SINGLETON", "2"),
        ("ARRAY_REPLICATE", "gather"),
        ("ARRAY_PLACEMENTS", "S"),
        ("ARRAY_PLACEMENTS", "S0,P"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(name, value):
    with pytest.raises(dist.UsageError, match=f"HPCDIST_{name}='{value}'"):
        read_config({f"HPCDIST_{name}": value})


def test_a_setting_that_may_be_0_says_so():
    assert read_config({"HPCDIST_STALL_S": "0"}).stall_s is None
    with pytest.raises(dist.UsageError, match="not a positive number, nor 0 for never"):
        read_config({"HPCDIST_STALL_S": "-1"})


def test_a_variable_that_is_no_setting_is_told_with_what_was_meant():
    given = {"HPCDIST_TIMOUT_S": "5", "HPCDIST_QQQ": "1", "HPCDIST_KERNEL": "auto", "PATH": "/"}
    assert unknown_settings(given) == [
        "HPCDIST_QQQ is set and has no effect; unset it",
        "HPCDIST_TIMOUT_S is set and has no effect; did you mean HPCDIST_TIMEOUT_S?",
    ]


def test_what_hpcdist_sets_for_its_own_processes_is_known():
    assert unknown_settings({"HPCDIST_SPARES": "2", "HPCDIST_DEVICE_WAY": "nccl"}) == []
