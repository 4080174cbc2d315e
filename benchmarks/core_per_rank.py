"""Import this before NumPy: its BLAS then computes on one thread, so that each rank takes one core.

torch is told by `torch.set_num_threads(1)`.
"""

import os

for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"
