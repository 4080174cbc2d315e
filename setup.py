"""The compiled kernel, which is optional; pyproject.toml has everything else.

A wheel with the kernel is one for this system, and for all Pythons from 3.11 on where this Python
has their stable ABI. Where the kernel does not compile, the wheel is pure and says so.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# The buffers that the kernel reads are in the stable ABI since 3.11.
STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")


PARTS = [
    f"hpcdist/transport/{name}.c"
    for name in (
        "_attached",
        "_hot",
        "_hot_large",
        "_hot_heap",
        "_hot_objects",
        "_hot_plans",
        "_mail",
        "_mail_objects",
    )
]
"""What `_kernel.c` includes."""


class BuildKernel(build_ext):
    """Build what compiles, and let the distribution have no extension but that.

    `build_ext --debug` builds for a debugger: with symbols, and statement by statement.

    Nothing of an earlier build stays: it would be imported in place of this one.
    """

    def run(self):
        self.built = []
        if self.inplace:
            for name in ("_kernel", "_recorder", "_arrays"):
                for old in Path("hpcdist/transport").glob(f"{name}.*so"):
                    old.unlink()
        super().run()
        self.distribution.ext_modules[:] = self.built

    def build_extension(self, extension):
        if self.debug:  # the last flag counts
            extension.extra_compile_args += ["-O0", "-g3"]
        try:
            super().build_extension(extension)
        except Exception:
            Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            raise
        self.built.append(extension)


class Wheel(bdist_wheel):
    """Tag the wheel by what has been built."""

    def run(self):
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()


def extension(name, *flags, **more):
    """Return the description of the extension `name`, which may fail to compile."""
    return Extension(
        f"hpcdist.transport.{name}",
        sources=[f"hpcdist/transport/{name}.c"],
        extra_compile_args=["-O3", "-fwrapv", "-g0", *flags],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
        py_limited_api=STABLE,
        optional=True,
        **more,
    )


setup(
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": Wheel},
    ext_modules=[
        # no fused multiply-add, which rounds once where NumPy rounds twice
        extension(
            "_kernel",
            "-ffp-contract=off",
            "-fno-math-errno",
            depends=[*PARTS, "hpcdist/transport/_recorder.h"],
        ),
        extension("_recorder", depends=["hpcdist/transport/_recorder.h"]),
        extension("_arrays"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
