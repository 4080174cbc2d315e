"""The compiled parts, which are optional, and README.md for indexes; pyproject.toml has the rest.

A wheel with them is one for this system, and for all Pythons from 3.11 on where this Python
has their stable ABI. Where none of them compiles, the wheel is pure and says so.
"""

import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# The buffers that the kernel reads are in the stable ABI since 3.11.
STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")

NATIVE = "hpcdist/native/*.h"
SHM = "hpcdist/transport/shm/native"
ALONE = [f"{SHM}/arrays.c", f"{SHM}/regions.c"]
"""They are an extension of their own: what they ask of the system, not every system has."""


class BuildNative(build_ext):
    """Build what compiles, and let the distribution have no extension but that.

    `build_ext --debug` builds for a debugger: with symbols, and statement by statement.

    Nothing of an earlier build stays: it would be imported in place of this one.
    """

    def run(self):
        self.built = []
        for each in self.extensions if self.inplace else ():
            place = Path(*each.name.split("."))
            for old in place.parent.glob(f"{place.name}.*so"):
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


def files(*patterns):
    """Return the files of some patterns, in order."""
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


def extension(name, folder, *flags, sources=None):
    """Return the description of the extension `name`, which may fail to compile.

    It is made of the C files of a folder, unless `sources` says of which. Each compiles by itself;
    what one has for others is in its header, and nobody outside sees it.
    """
    return Extension(
        f"hpcdist.{name}",
        sources=sources or [path for path in files(f"{folder}/*.c") if path not in ALONE],
        depends=files(f"{folder}/*.h", "hpcdist/transport/flight/native/*.h", NATIVE),
        extra_compile_args=["-O3", "-fwrapv", "-g0", "-fvisibility=hidden", *flags],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
        py_limited_api=STABLE,
        optional=True,
    )


def readme():
    """Return README.md with links and pictures that work outside of the repository, too.

    They lead to what the release had: an index goes on showing the page of each.
    """
    version = re.search(r'^__version__ = "(.+)"$', Path("hpcdist/__init__.py").read_text(), re.M)[1]
    home = f"hpcdist/hpcdist/{{}}v{version}/"
    files = "https://github.com/" + home.format("blob/")
    pictures = "https://raw.githubusercontent.com/" + home.format("")
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r'(!\[[^]]*\]\(|src(?:set)?=")(?=docs/)', rf"\1{pictures}", text)
    return re.sub(r"(\]\()(?![a-z]+:|#)", rf"\1{files}", text)


# no fused multiply-add, which rounds once where NumPy rounds twice
ROUNDED = "-ffp-contract=off", "-fno-math-errno"

setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
    ext_modules=[
        extension("transport._kernel", SHM, *ROUNDED),
        extension("transport._arrays", SHM, sources=ALONE),
        extension("transport._recorder", "hpcdist/transport/flight/native"),
        extension("mesh._native", "hpcdist/mesh/native", *ROUNDED),
        extension("data._native", "hpcdist/data/native"),
        extension("ps._native", "hpcdist/ps/native", *ROUNDED),
        extension("jax._handler", "hpcdist/jax/native"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
