#!/usr/bin/env bash
# Run tests: tests/run.sh BIN [all|rest|gpu|gpu-all], where BIN holds python (and mpiexec).
#
# Without `all`, what takes minutes: everything that needs one process, jobs that fail, a job of a
# private Slurm, tests/mpi on 2 ranks of the MPI in BIN, and the contract on an MPICH in .mpich,
# used the way a centre's module is. What is marked as thorough is left out.
#
# With `all`, everything but what is marked as slow; tests/mpi on 1 and 2 ranks, on 3 of the MPICH, and
# on 4 what is marked as four_ranks. What is thorough runs once: on 4 ranks, or on 2 if it is marked as
# two_ranks. What has that mark runs on 1 and 2 ranks of the first MPI only.
#
# With `rest`, of what `all` runs and a run without it has not, every eighth file; the commit tells which.
#
# With `gpu`, what needs a GPU, on emulated ones (tests/emulated_gpu) that are late at random, on 2 ranks;
# with `gpu-all`, on 1 to 4 ranks of both MPIs, with several delays. Where they cannot be had, it says why.
#
# SUITE_RANKS and MPICH_RANKS name other numbers of ranks ("1 2 3 4"), which with `all` leave out nothing.
# Ranks of a launcher wait a good part of their time, so their suites run beside the others, which are
# shown first. A suite that fails hides none of those after it: the end tells how each of them went, which
# tests failed, and what to do about it.
set -uo pipefail
bin=$(cd "${1:?usage: tests/run.sh BIN [all|rest|gpu|gpu-all]}" && pwd) || exit
tier=${2:-usual}
cd "$(dirname "$0")/.." || exit
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_osc=^ucx
export OMP_NUM_THREADS=1 # more processes than cores already: threads that wait for each other would spin,
export OMPI_MCA_mpi_yield_when_idle=1 # and ranks, too
export PATH=$bin:$PATH
case $tier in gpu*) ;; *) export CUDA_VISIBLE_DEVICES= ;; esac # torch and JAX would put hosts' numbers on one
logs=$(mktemp -d)
export TEST_RESULTS=$logs/results
: >"$TEST_RESULTS"
beside=
trap '[ -z "$beside" ] || kill -- -$beside 2>/dev/null; rm -rf "$logs"' EXIT

suite() { # NAME COMMAND...: run a suite and note how it went
    local name=$1 code=0 began=$SECONDS
    shift
    printf '\n=== %s\n' "$name"
    "$@" || code=$?
    [ "$tier" = rest ] && [ "$code" = 5 ] && code=0 # pytest: the files whose turn it is have no such test
    printf '%-44s %-16s %4d s\n' "$name" \
        "$([ "$code" = 0 ] && echo passed || echo "FAILED (code $code)")" $((SECONDS - began)) \
        >>"$logs/summary"
}

tests() { # MARKS ARGUMENT...: a suite of one process, shared by two workers
    "$bin/python" -m pytest -q -n 2 -p no:cacheprovider -m "$@"
}

mpi_tests() { # MARKS MPIEXEC RANKS ARGUMENT...: every rank runs every test; what the others say, and
    # the last words of rank 0, which a launcher may drop, are kept for failures.
    local marks=$1 mpiexec=$2 n=$3 code log
    shift 3
    rm -f "$logs"/rank.*
    LOGS=$logs "$mpiexec" -n "$n" bash -c '
        rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
        [ "$rank" = 0 ] && exec 2>"$LOGS/rank.0" || exec >"$LOGS/rank.$rank" 2>&1
        [ "$rank" = 0 ] || TEST_RESULTS=$LOGS/others # each rank counts the same tests
        exec "$@"' - \
        "$bin/python" -m pytest -q --color=no --with-mpi -p no:cacheprovider -m "$marks" "$@" && return
    code=$?
    [ "$code" = 5 ] && return 5
    printf '\n%s ended with exit code %d\n' "$mpiexec" $code
    for log in "$logs"/rank.*; do
        [ -e "$log" ] || continue
        printf '\n--- %s\n' "${log##*/}"
        grep -am 1 -A 40 '^Fatal Python error' "$log" && echo ... # which thread died, and where
        grep -av ^SKIPPED "$log" | tail -n 60
    done
    return $code
}

every_eighth() { # FOLDER...: the files of tests whose turn it is at this commit
    local commit
    commit=$(git rev-parse --short=6 HEAD 2>/dev/null || date +%j)
    find "$@" -name 'test_*.py' | sort | awk "NR % 8 == $((16#$commit % 8))"
}

all="not slow" usual="not slow and not thorough"
process=$all files="tests/unit tests/contract tests/docs tests/launch" slurm=tests/slurm mpi=tests/mpi mpich=tests/mpi
ranks="1 2 4" mpich_ranks=3
declare -A marks=([1]=$usual [2]="$all and (not thorough or two_ranks)"
    [4]="$all and (thorough or four_ranks) and not two_ranks" [mpich]="$usual and not two_ranks")
case $tier in
all) [ -z "${SUITE_RANKS:-}${MPICH_RANKS:-}" ] || marks=() ;;
rest)
    process="$all and thorough" marks[2]="$all and thorough and two_ranks"
    files=$(every_eighth $files) slurm=$(every_eighth $slurm) mpi=$(every_eighth $mpi) mpich=$mpi
    ;;
*)
    process=$usual
    slurm=tests/slurm/test_srun.py::test_ranks_of_srun_know_their_job_and_its_nodes
    mpich=tests/mpi/test_contract.py
    ranks=2 mpich_ranks=2
    marks=([2]=$usual [mpich]=$usual [slurm]=$usual)
    ;;
esac

of_a_launcher() { # the suites whose ranks are started by a launcher
    local library n
    if [ -x "$bin/mpiexec" ]; then
        library=$("$bin/mpiexec" --version | head -n 1)
        for n in ${SUITE_RANKS:-$ranks}; do
            [ "$n" = 1 ] || suite "$library, $n ranks" mpi_tests "${marks[$n]:-$all}" "$bin/mpiexec" "$n" $mpi
        done
    fi
    if [ -x .mpich/bin/mpiexec ]; then
        export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH=$PWD/.mpich/lib
        for n in ${MPICH_RANKS:-$mpich_ranks}; do
            suite "MPICH (site MPI, same mpi4py), $n ranks" \
                mpi_tests "${marks[mpich]:-$all}" "$PWD/.mpich/bin/mpiexec" "$n" $mpich
        done
    fi
}

of_a_machine() { # all others, beside them
    set -m # a process group of its own, to be ended as a whole
    of_a_launcher >"$logs/beside" 2>&1 </dev/null &
    beside=$!
    set +m
    suite "one process" tests "$process" --dist loadgroup $files
    suite "a private Slurm" tests "${marks[slurm]:-$all}" --dist loadfile $slurm
    case " ${SUITE_RANKS:-$ranks} " in *" 1 "*) suite "one rank" tests "${marks[1]:-$all}" --with-mpi $mpi ;; esac
    wait "$beside"
    beside=
    cat "$logs/beside"
}

on_gpus() { # NAME MPIEXEC RANKS GPUS DELAY [FILES]: a suite of ranks on GPUs whose streams are up to DELAY us late
    local more="tests/mpi/test_device_mesh.py tests/mpi/test_device_sharding.py"
    EMULATED_GPU_COUNT=$4 EMULATED_GPU_DELAY_US=$5 suite "$1, $3 ranks, $4 GPUs, $5 us late" \
        mpi_tests "${marked:-$usual}" "$2" "$3" tests/mpi/test_gpu*.py ${6-$more}
}

of_gpus() { # the suites on emulated GPUs; its argument is 'all' for the long ones
    local code=0 n delay
    "$bin/python" tests/emulated_gpu/build.py || code=$?
    if [ "$code" = 3 ] && [[ ,${HPCDIST_REQUIRE:-}, != *,gpu,* ]]; then exit 0; fi # it has said why
    suite "emulated GPUs are built" test "$code" = 0
    [ "$code" = 0 ] || return
    . tests/emulated_gpu/with_gpus.sh
    suite "emulated GPUs, and deaths beside them" "$bin/python" -m pytest -q -p no:cacheprovider -m "$usual" \
        tests/unit/emulated_gpu tests/launch/test_gpu_deaths.py
    on_gpus MPI "$bin/mpiexec" 2 2 500
    [ "$1" = all ] || return
    for n in 1 3 4; do on_gpus MPI "$bin/mpiexec" "$n" "$n" 300; done
    for delay in 0 1500 5000; do on_gpus MPI "$bin/mpiexec" 2 2 "$delay"; done
    on_gpus MPI "$bin/mpiexec" 3 1 300 ""
    marked="$all and thorough" on_gpus "MPI, thorough" "$bin/mpiexec" 2 2 300 ""
    export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH=$PWD/.mpich/lib:$LD_LIBRARY_PATH
    for n in 2 3; do on_gpus MPICH "$PWD/.mpich/bin/mpiexec" "$n" "$n" 300; done
}

case $tier in
gpu) of_gpus usual ;;
gpu-all) of_gpus all ;;
*) of_a_machine ;;
esac
printf '\n=== all suites\n'
cat "$logs/summary"
cat "$TEST_RESULTS" "$logs/others" 2>/dev/null | sed -n 's/^failed //p' | sort -u >"$logs/failed"
awk '/^(passed|skipped) / { n[$1] += $2 } END { printf "\n%d passed, %d failed, %d skipped\n",
    n["passed"], failed, n["skipped"] }' failed="$(wc -l <"$logs/failed")" "$TEST_RESULTS"
sed -n 's/^again /  started again, as Slurm or MPI had not come up: /p' "$TEST_RESULTS"
grep -q FAILED "$logs/summary" || exit 0
sed 's/^/  failed: /' "$logs/failed"
printf '%s\n' "Run one of them alone: $bin/python -m pytest 'NAME' (tests/mpi: --with-mpi, under mpiexec)." \
    "Is the checkout unchanged? Then this is a defect: please report it, with its traceback and what" \
    "\`$bin/hpcdist doctor\` prints, at https://github.com/hpcdist/hpcdist/issues"
exit 1
