"""What fails on one rank is raised on all: blocks, and what the first rank does for everyone."""

import subprocess
import sys
import time

import pytest
from together_checks import CHECKS

import hpcdist as dist


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_simulated_ranks(check, size):
    dist.simulate(size, check, timeout=60)


def test_simulate_raises_what_the_failing_rank_raised():
    def read(files):
        with dist.together():
            return files[dist.get_rank()]

    with pytest.raises(KeyError, match="2"):
        dist.simulate(3, read, {0: "a", 1: "b"})


def test_a_process_without_a_group_is_alone():
    script = """
import hpcdist as dist
assert dist.together().lead(max, [1, 3, 2]) == 3
try:
    with dist.together():
        raise KeyError("own")
except KeyError as error:
    assert error.args == ("own",) and not getattr(error, "__notes__", None)
assert not dist.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_ranks_that_are_not_connected_are_told_to_be():
    script = """
import hpcdist as dist
try:
    dist.together()
except dist.UsageError as error:
    print(error)
"""
    env = {"PYTHONPATH": ":".join(sys.path), "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    env |= {"SLURM_STEP_ID": "0"}
    told = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert "call hpcdist.init_parallel_env() first" in told.stdout


def test_a_rank_that_never_comes_to_the_end_is_named_and_ones_own_error_is_kept():
    def check():
        rank = dist.get_rank()
        if rank == 0:
            return
        if rank == 1:
            with pytest.raises(KeyError, match="own"), dist.together():
                raise KeyError("own")
        else:
            with pytest.raises(dist.RemoteError, match="rank 0 has ended"), dist.together():
                pass

    dist.simulate(3, check)


def test_a_block_that_a_rank_leaves_too_late_is_a_time_out_that_names_it():
    def check():
        rank, limited = dist.get_rank(), dist.new_group([0, 1], timeout=0.2)
        if rank == 1:
            with pytest.raises(dist.CollectiveTimeout) as caught, dist.together(limited):
                pass
            assert caught.value.missing == (0,)
        dist.barrier()

    dist.simulate(2, check, timeout=60)


def test_a_block_that_failed_with_a_time_out_ends_soon_for_who_does_not_come():
    def check():
        rank, limited = dist.get_rank(), dist.new_group([0, 1], timeout=0.2)
        if rank == 1:
            with pytest.raises(dist.CollectiveTimeout) as caught, dist.together():
                dist.barrier(limited)
            assert "within 0.2 s" in str(caught.value)
            assert "within 1 s" in str(caught.value.__notes__)
        else:
            time.sleep(3)
            with pytest.raises(dist.CollectiveTimeout), dist.together():
                pass
        dist.barrier()

    dist.simulate(2, check)
