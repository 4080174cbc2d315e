#!/usr/bin/env bash
# Run all tests: tests/run.sh BIN, where BIN holds python (and mpiexec).
#
# First those that need one process, then those under a private Slurm, then tests/mpi; the latter
# two with every MPI that is here: the one in BIN, on 1, 2 and 4 ranks, and an MPICH in .mpich, used
# the way a centre's module is, on 3. SUITE_RANKS and MPICH_RANKS say otherwise ("1 2 3 4" for all).
# A suite that fails hides none of those after it: the end tells how each of them went.
set -uo pipefail
bin=$(cd "${1:?usage: tests/run.sh BIN}" && pwd) || exit
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

tests() { # PATH...: a suite of one process
    "$bin/python" -m pytest -q -m "not slow" "$@"
}

mpi_tests() { # MPIEXEC RANKS: every rank runs every test; what the others say, and the
    # last words of rank 0, which a launcher may drop, are kept for failures
    local mpiexec=$1 n=$2 code log
    rm -f "$logs"/rank.*
    LOGS=$logs "$mpiexec" -n "$n" bash -c '
        rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
        [ "$rank" = 0 ] && exec 2>"$LOGS/rank.0" || exec >"$LOGS/rank.$rank" 2>&1
        exec "$@"' - \
        "$bin/python" -m pytest -q --with-mpi -p no:cacheprovider -m "not slow" tests/mpi && return
    code=$?
    printf '\n%s ended with exit code %d\n' "$mpiexec" $code
    for log in "$logs"/rank.*; do
        [ -e "$log" ] && printf '\n--- %s\n' "${log##*/}" && tail -n 60 "$log"
    done
    return $code
}

suite "one process" tests tests/unit tests/contract tests/docs tests/launch
suite "a private Slurm" tests tests/slurm
if [ -x "$bin/mpiexec" ]; then
    library=$("$bin/mpiexec" --version | head -n 1)
    for n in ${SUITE_RANKS:-1 2 4}; do
        suite "$library, $n rank(s)" mpi_tests "$bin/mpiexec" "$n"
    done
fi
if [ -x .mpich/bin/mpiexec ]; then
    export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH=$PWD/.mpich/lib
    for n in ${MPICH_RANKS:-3}; do
        suite "MPICH (site MPI, same mpi4py), $n rank(s)" mpi_tests "$PWD/.mpich/bin/mpiexec" "$n"
    done
fi
printf '\n=== all suites\n'
cat "$logs/summary"
exit $failed
