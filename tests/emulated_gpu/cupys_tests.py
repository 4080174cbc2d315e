"""Run CuPy's own tests on emulated GPUs: python tests/emulated_gpu/cupys_tests.py [FILE...].

They come with CuPy's source archive, which `make emulated-gpu` unpacks. The files below pass, but
for the tests that are named with them, which need what is not emulated. Most of the time goes into
compiling thousands of kernels, once.
"""

import os
import subprocess
import sys

from build import ARCHIVE, CUPY, HERE

TESTS = ARCHIVE / f"cupy-{CUPY}" / "tests"

FILES = {
    "cuda_tests/test_stream.py": "",
    "cuda_tests/test_memory.py": "managed",  # memory
    "cuda_tests/test_device.py": "cusolver or cusparse",
    "core_tests/test_flags.py": "",
    "core_tests/test_internal.py": "",
    "core_tests/test_ndarray_contiguity.py": "",
    "core_tests/test_ndarray_conversion.py": "",
    "core_tests/test_scan.py": "",
    "core_tests/test_reduction.py": "",
    "core_tests/test_ndarray.py": "",
    "core_tests/test_elementwise.py": "",
    "core_tests/test_carray.py": "",
    "core_tests/test_core.py": "",
    "creation_tests/test_basic.py": "",
    "creation_tests/test_from_data.py": "",
    "creation_tests/test_matrix.py": "",
    "creation_tests/test_ranges.py": "",
}
"""By file: the tests of it that need what is not there."""


def run(name):
    """Run the tests of a file; return the exit code of pytest."""
    left_out = f" and not ({FILES[name]})" if FILES.get(name) else ""
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "-m",
        "not slow",
        "-k",
        f"test{left_out}",
    ]
    pytest = [sys.executable, "-m", "pytest", *options, f"cupy_tests/{name}"]
    one = {"EMULATED_GPU_COUNT": "1", "EMULATED_GPU_DELAY_US": "0", "CUPY_TEST_GPU_LIMIT": "1"}
    command = [HERE / "with_gpus.sh", *pytest]
    return subprocess.run(command, cwd=TESTS, env=os.environ | one, check=False).returncode


if __name__ == "__main__":
    failed = [name for name in sys.argv[1:] or FILES if run(name)]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    sys.exit(bool(failed))
