#!/usr/bin/env bash
# Run a command with emulated GPUs and a CuPy that uses them: tests/emulated_gpu/with_gpus.sh COMMAND...
# Or source it, for all commands of a shell. `make emulated-gpu` builds them. These variables say what they are like:
#   EMULATED_GPU_COUNT         how many GPUs this machine has (2)
#   EMULATED_GPU_DELAY_US      each piece of work on a stream begins up to so many microseconds late (500)
#   EMULATED_GPU_NCCL_VERSION  what NCCL says it is (23203); before 23000 ranks cannot share a GPU
#   EMULATED_GPU_NCCL_SERIAL   1: each process has one operation of NCCL at a time
built=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.cache/emulated_gpu
[ -e "$built/.runtime" ] || echo "there are no emulated GPUs yet: make emulated-gpu" >&2
export EMULATED_GPU_COUNT=${EMULATED_GPU_COUNT:-2} EMULATED_GPU_DELAY_US=${EMULATED_GPU_DELAY_US:-500}
export HPCDIST_DEVICE=${HPCDIST_DEVICE:-gpu} # no /dev/nvidia0 tells of them
export PYTHONPATH=$built/site${PYTHONPATH:+:$PYTHONPATH}
export LD_LIBRARY_PATH=$built/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export CUDA_PATH=$built CUDA_HOME=$built             # CuPy looks there for CUDA's headers
export CUPY_CACHE_DIR=$built/kernels CUPY_ACCELERATORS= # CUB's kernels were compiled ahead of time
[ "${BASH_SOURCE[0]}" != "$0" ] || exec "$@"
