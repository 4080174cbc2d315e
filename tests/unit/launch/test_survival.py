"""A job that goes on when a rank dies: the command that starts it, and what it came to."""

import json

import pytest

from hpcdist.errors import UsageError
from hpcdist.launch.command import Family, Launcher, Options, Site, build_command
from hpcdist.launch.job.deaths import Deaths, End, judge, match_deaths, summary
from hpcdist.launch.survival import Survive

OPENMPI = Site(
    cpus=8, cores=8, uid=1, mpiexec="/o/mpiexec", family=Family.OPENMPI, version=5, srun="/s/srun"
)
SLURM = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "3,2"}


def build(site=OPENMPI, environ=(), **options):
    options = {"survive": Survive(), **options}
    return build_command(Options(("python", "x.py"), **options), site, dict(environ))


# ---- the command


def test_open_mpi_is_told_to_leave_the_others_alone_and_the_ranks_what_was_asked_for():
    argv = build(nprocs=4, survive=Survive(spares=2, min_ranks=3)).argv
    assert argv[:3] == ("/o/mpiexec", "--with-ft", "ulfm")
    told = [argv[at + 1] for at, word in enumerate(argv) if word == "-x"]
    assert told == ["HPCDIST_SURVIVE=1", "HPCDIST_SPARES=2", "HPCDIST_MIN_RANKS=3"]


def test_collectives_that_crash_after_a_death_are_left_out_unless_the_user_wants_them():
    assert build(nprocs=4).env["OMPI_MCA_coll_han_priority"] == "0"
    assert "OMPI_MCA_coll_han_priority" not in build(nprocs=4, survive=None).env
    wanted = {"OMPI_MCA_coll_han_priority": "35"}
    assert "OMPI_MCA_coll_han_priority" not in build(environ=wanted, nprocs=4).env


def test_spares_come_on_top_of_the_ranks_that_were_asked_for():
    command = build(nprocs=4, survive=Survive(spares=2))
    assert command.size == 6
    assert command.argv[-4:] == ("-n", "6", "python", "x.py")


def test_spares_are_among_the_processes_of_an_allocation_that_gives_the_number():
    command = build(environ=SLURM, survive=Survive(spares=2))
    assert command.argv[0] == "/o/mpiexec"
    assert command.size == 5


def test_ranks_per_node_count_the_spares_among_them():
    assert build(nprocs_per_node=3, survive=Survive(spares=1)).size == 3


def test_a_job_inside_such_a_job_does_not_inherit_that_it_survives():
    around = {"HPCDIST_SURVIVE": "1", "HPCDIST_SPARES": "1", "HPCDIST_REPORT_DIR": "/x"}
    assert set(around) <= set(build(environ=around, nprocs=2, survive=None).unset)


@pytest.mark.parametrize(
    ("site", "options", "reason"),
    [
        (OPENMPI, {"launcher": Launcher.SRUN}, "it cancels the whole step when a rank dies"),
        (
            Site(8, 8, 1, "/m/mpiexec", Family.MPICH, 5),
            {},
            "MPICH, whose mpiexec ends all ranks when one dies",
        ),
        (Site(8, 8, 1, "/o/mpiexec", Family.OPENMPI, 4), {}, "needs Open MPI 5, and this is 4"),
        (OPENMPI, {"survive": Survive(min_ranks=5)}, "--min-ranks 5 is more than the 4 ranks"),
        (OPENMPI, {"nprocs": None, "nprocs_per_node": 2, "survive": Survive(2)}, "leaves no rank"),
    ],
)
def test_what_cannot_survive_is_refused_with_the_reason(site, options, reason):
    with pytest.raises(UsageError, match=reason):
        build(site, **{"nprocs": 4, **options})


# ---- what a job came to


def well(*recoveries, state="ended", rank=0):
    """Return the report of a process that came to its end, after recoveries from these deaths."""
    return {
        "rank": rank,
        "state": state,
        "recoveries": [{"dead": list(dead), "seconds": 0.5} for dead in recoveries],
    }


PARKED = well(state="parked", rank=-1)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        pytest.param([End(0, 0, 9, well()), End(1, 0, 9, well())], 0, id="nobody died"),
        pytest.param([End(1, -9, 1), End(0, 0, 9, well([1]))], 0, id="all recovered"),
        pytest.param([End(1, 3, 1), End(0, 0, 9, well([1]))], 0, id="an exception, recovered"),
        pytest.param([End(1, -9, 1), End(0, 0, 9, well())], 137, id="not recovered"),
        pytest.param([End(1, 0, 1), End(0, 0, 9, well())], 1, id="left, not recovered"),
        pytest.param([End(0, -9, 1), End(1, 7, 2, well([0]))], 7, id="failed after a recovery"),
        pytest.param([End(0, -9, 1), End(1, -9, 2)], 137, id="all died"),
        pytest.param([End(0, 0, 9), End(1, 0, 9)], 0, id="without reports exit codes decide"),
        pytest.param([End(0, 0, 9), End(1, 4, 9)], 4, id="without reports a failure is one"),
    ],
)
def test_a_job_has_ended_well_where_its_ranks_recovered_from_every_death(ends, code):
    assert judge(ends, 2, 0, 0, 0).code == code


def test_a_process_that_nobody_heard_of_is_lost_whatever_the_launcher_says():
    outcome = judge([End(0, 0, 9, well([1]))], 2, 0, 0, 0)
    assert (outcome.code, outcome.lost) == (1, (1,))


def test_spares_that_wait_to_the_end_are_no_loss_but_no_success_either():
    assert judge([End(0, 0, 9, well()), End(1, 0, 9, PARKED)], 2, 1, 0, 0).code == 0
    assert judge([End(0, -9, 1), End(1, 0, 9, PARKED)], 2, 1, 0, 0).code == 137
    assert judge([End(1, 0, 9, PARKED), End(0, 0, 9, PARKED)], 2, 1, 0, 0).code == 1


def test_a_spare_that_dies_before_it_has_a_place_is_missed_by_nobody():
    ends = [End(2, -9, 1), End(0, 0, 9, well()), End(1, 0, 9, well())]
    assert judge(ends, 3, 1, 0, 0).code == 0


def test_a_spare_that_dies_in_the_place_it_took_is_a_rank():
    recovered = [End(1, -9, 1), End(2, -9, 2), End(0, 0, 9, well([1], [1]))]
    assert judge(recovered, 3, 1, 0, 0).code == 0
    failed = [End(1, -9, 1), End(2, 6, 2, well([1], rank=1, state="failed"))]
    assert judge([*failed, End(0, 0, 9, well([1]))], 3, 1, 0, 0).code == 6


def test_an_abort_has_its_code():
    assert judge([End(0, -15, 1), End(1, -9, 1)], 2, 0, 3, 0).code == 3


def test_ctrl_c_comes_before_everything():
    assert judge([End(0, -2, 1)], 2, 0, 0, 2).code == 130


def test_deaths_are_matched_with_recoveries_in_their_order():
    ends = [
        End(3, -9, 1.0),
        End(0, 1, 2.0, well(state="failed", rank=0)),
        End(4, -9, 3.0),
        End(1, 0, 9.0, well([3], [0])),
    ]
    found = match_deaths(ends, 5, 1)
    assert [(each.end.process, each.rank, each.is_open) for each in found] == [
        (3, 3, False),
        (0, 0, False),
        (4, -1, False),
    ]


def test_the_summary_tells_who_died_when_and_what_it_cost():
    ends = [End(2, -9, 1.25), End(3, -11, 4.0), End(1, 5, 8.0), End(0, 0, 9.0, well([2]))]
    assert summary(ends, 4, 1, 10.0) == [
        "3 of 4 processes died",
        "after  process  rank   ended with      recovery",
        "1.2 s  2        2      signal SIGKILL  0.500 s",
        "4.0 s  3        spare  signal SIGSEGV  none",
        "8.0 s  1        ?      exit code 5     none",
        "of 10.0 s the job spent 0.50 s in 1 recovery; without the dead it went on for 16.8 s, "
        "summed over them",
    ]
    assert summary([End(0, 0, 9.0, well())], 1, 0, 10.0) == []


def test_the_summary_tells_who_took_whose_place():
    recovery = {"dead": [0, 2], "who": [0, 2], "by": [4, -1], "seconds": 0.5}
    told = {"rank": 0, "state": "ended", "recoveries": [recovery]}
    ends = [End(2, -9, 1.0), End(0, -9, 1.0), End(1, 0, 9.0, told), End(4, 0, 9.0, told)]
    assert summary(ends, 5, 1, 10.0)[1:4] == [
        "after  process  rank  ended with      recovery  its place",
        "1.0 s  2        2     signal SIGKILL  0.500 s",
        "1.0 s  0        0     signal SIGKILL  0.500 s   taken by 4",
    ]


def test_deaths_that_recoveries_name_are_matched_whatever_is_heard_first():
    recovery = {"dead": [1], "who": [4], "by": [-1], "seconds": 0.5}
    told = {"rank": 0, "state": "ended", "recoveries": [recovery]}
    ends = [End(5, -9, 1.0), End(4, -9, 1.0), End(0, 0, 9.0, told)]
    found = match_deaths(ends, 6, 2)
    assert [(each.end.process, each.rank, each.was_needed) for each in found] == [
        (5, -1, False),
        (4, 1, True),
    ]


def test_that_too_few_are_left_is_said_once():
    deaths = Deaths(Survive(min_ranks=2), 4, lambda: 0.0)
    assert [deaths.note(process, -9, "") for process in range(4)] == [False, False, True, False]


def test_spares_that_wait_for_nobody_are_known_unless_one_may_have_a_place():
    def waits(*reports):
        deaths = Deaths(Survive(spares=1), 3, lambda: 0.0)
        for process, report in enumerate(reports):
            deaths.note(process, 0, json.dumps(report))
        return deaths.only_spares_wait()

    assert waits(well(), well())
    assert not waits(well())
    assert not waits(well(), well([1]))
    assert not waits(well(), well(), PARKED)


def test_spares_that_wait_are_known_by_the_latest_world_whoever_died_before():
    def waits(*worlds):
        deaths = Deaths(Survive(spares=2), 5, lambda: 0.0)
        deaths.note(0, -9, "")
        for process, world in enumerate(worlds, 1):
            deaths.note(process, 0, json.dumps({**well([0]), "world": world}))
        return deaths.only_spares_wait()

    assert waits([1, 3], [1, 3], [1, 3])  # a spare was one of them
    assert waits([2, 2], [2, 2])
    assert not waits([1, 3], [1, 3])
    assert not waits([1, 3], [1, 3], [2, 2])
