# SPDX-License-Identifier: Apache-2.0
"""Spack recipe of hpcdist.

As long as no release is on PyPI, build it from its sources, which spack does not fetch then:

    spack develop --path /path/to/hpcdist py-hpcdist@0.1.0
    spack install py-hpcdist@0.1.0 ^openmpi
"""

from contextlib import suppress

from spack.package import *

with suppress(ImportError):  # Spack 1.0 and newer; before, it came with the star
    from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpcdist(PythonPackage):
    """MPI collectives and distributed training for NumPy, torch and JAX: errors, not hangs."""

    pypi = "hpcdist/hpcdist-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")

    variant("torch", default=False, description="Train torch modules")

    depends_on("c", type="build")  # the compiled reductions

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numpy@1.24:")
        depends_on("py-ml-dtypes@0.4:")
        depends_on("py-click@8.1:")
        depends_on("py-rich@13:")
        depends_on("py-xxhash@3.0:")
        depends_on("py-torch@2.11: ~mpi", when="+torch")
