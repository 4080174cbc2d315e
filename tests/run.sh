#!/usr/bin/env bash
# Run all tests: tests/run.sh BIN, where BIN holds python (and mpiexec).
#
# First those that need one process, then those under a private Slurm, then tests/mpi; the latter
# two with every MPI that is here: the one in BIN, on 1 to 4 ranks, and an MPICH in .mpich, used the
# way a centre's module is, on 2 and 3 (MPICH_RANKS="1 2 3 4" for all).
set -euo pipefail
bin=$(cd "${1:?usage: tests/run.sh BIN}" && pwd)
cd "$(dirname "$0")/.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_osc=^ucx
export PATH=$bin:$PATH
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

mpi_suite() { # NAME MPIEXEC RANKS: every rank runs every test; what the others say, and the
# last words of rank 0, which a launcher may drop, are kept for failures
    local name=$1 mpiexec=$2 n
    for n in $3; do
        printf '\n=== %s, %s rank(s)\n' "$name" "$n"
        rm -f "$logs"/rank.*
        LOGS=$logs "$mpiexec" -n "$n" bash -c '
            rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
            [ "$rank" = 0 ] && exec 2>"$LOGS/rank.0" || exec >"$LOGS/rank.$rank" 2>&1
            exec "$@"' - \
            "$bin/python" -m pytest -q --with-mpi -p no:cacheprovider -m "not slow" tests/mpi || {
            printf '\n%s ended with exit code %d\n' "$mpiexec" $?
            for log in "$logs"/rank.*; do
                [ -e "$log" ] && printf '\n--- %s\n' "${log##*/}" && tail -n 60 "$log"
            done
            return 1
        }
    done
}

"$bin/python" -m pytest -q -m "not slow" tests/unit tests/contract tests/docs tests/launch
printf '\n=== a private Slurm\n'
"$bin/python" -m pytest -q -m "not slow" tests/slurm
if [ -x "$bin/mpiexec" ]; then
    mpi_suite "$("$bin/mpiexec" --version | head -n 1)" "$bin/mpiexec" "1 2 3 4"
fi
if [ -x .mpich/bin/mpiexec ]; then
    export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH=$PWD/.mpich/lib
    mpi_suite "MPICH (site MPI, same mpi4py)" "$PWD/.mpich/bin/mpiexec" "${MPICH_RANKS:-2 3}"
fi
