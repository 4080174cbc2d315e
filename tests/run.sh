#!/usr/bin/env bash
# Run tests: tests/run.sh BIN [all], where BIN holds python (and mpiexec).
#
# Without `all`, what takes minutes: everything that needs one process, jobs that fail, a job of a
# private Slurm, tests/mpi on 2 ranks of the MPI in BIN, and the contract on an MPICH in .mpich,
# used the way a centre's module is. What is marked as thorough is left out.
#
# With `all`, everything but what is marked as slow; tests/mpi on 1, 2 and 4 ranks, and on 3 of the
# MPICH. What is marked as two_ranks runs on 1 and 2 only.
#
# SUITE_RANKS and MPICH_RANKS name other numbers of ranks ("1 2 3 4"), which with `all` leave out nothing.
# A suite that fails hides none of those after it: the end tells how each of them went.
set -uo pipefail
bin=$(cd "${1:?usage: tests/run.sh BIN [all]}" && pwd) || exit
tier=${2:-usual}
cd "$(dirname "$0")/.." || exit
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_osc=^ucx
export PATH=$bin:$PATH
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0

suite() { # NAME COMMAND...: run a suite and note how it went
    local name=$1 code=0 began=$SECONDS
    shift
    printf '\n=== %s\n' "$name"
    "$@" || code=$?
    [ "$code" = 0 ] || failed=1
    printf '%-44s %-16s %4d s\n' "$name" \
        "$([ "$code" = 0 ] && echo passed || echo "FAILED (code $code)")" $((SECONDS - began)) \
        >>"$logs/summary"
}

tests() { # ARGUMENT...: a suite of one process, shared by two workers
    "$bin/python" -m pytest -q -n 2 -m "$few" "$@"
}

mpi_tests() { # MPIEXEC RANKS ARGUMENT...: every rank runs every test; what the others say, and the
    # last words of rank 0, which a launcher may drop, are kept for failures. One rank needs no
    # launcher, so two of them share the tests.
    local mpiexec=$1 n=$2 marks=$many code log
    shift 2
    [ "$n" -gt 2 ] || marks=$few
    [ "$n" -gt 1 ] || { tests --with-mpi "$@"; return; }
    rm -f "$logs"/rank.*
    LOGS=$logs "$mpiexec" -n "$n" bash -c '
        rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
        [ "$rank" = 0 ] && exec 2>"$LOGS/rank.0" || exec >"$LOGS/rank.$rank" 2>&1
        exec "$@"' - \
        "$bin/python" -m pytest -q --with-mpi -p no:cacheprovider -m "$marks" "$@" && return
    code=$?
    printf '\n%s ended with exit code %d\n' "$mpiexec" $code
    for log in "$logs"/rank.*; do
        [ -e "$log" ] && printf '\n--- %s\n' "${log##*/}" && tail -n 60 "$log"
    done
    return $code
}

if [ "$tier" = all ]; then
    few="not slow" many="not slow and not two_ranks"
    slurm=tests/slurm mpich=tests/mpi
    ranks="1 2 4" mpich_ranks=3
else
    few="not slow and not thorough" many=$few
    slurm=tests/slurm/test_srun.py::test_ranks_of_srun_know_their_job_and_its_nodes
    mpich=tests/mpi/test_contract.py
    ranks=2 mpich_ranks=2
fi
[ -z "${SUITE_RANKS:-}${MPICH_RANKS:-}" ] || many=$few

suite "one process" tests --dist loadgroup tests/unit tests/contract tests/docs tests/launch
suite "a private Slurm" tests --dist loadfile "$slurm"
if [ -x "$bin/mpiexec" ]; then
    library=$("$bin/mpiexec" --version | head -n 1)
    for n in ${SUITE_RANKS:-$ranks}; do
        suite "$library, $n rank(s)" mpi_tests "$bin/mpiexec" "$n" tests/mpi
    done
fi
if [ -x .mpich/bin/mpiexec ]; then
    export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH=$PWD/.mpich/lib
    for n in ${MPICH_RANKS:-$mpich_ranks}; do
        suite "MPICH (site MPI, same mpi4py), $n rank(s)" \
            mpi_tests "$PWD/.mpich/bin/mpiexec" "$n" "$mpich"
    done
fi
printf '\n=== all suites\n'
cat "$logs/summary"
exit $failed
