"""The parts of the build that pyproject.toml cannot express: shipped folders and compiled C libraries."""

import platform
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))
from megatron_lossy.base import native  # noqa: E402

SHIPPED = {f"megatron_lossy.config.shipped_files.{name}": name for name in ("configs", "launch", "patches")}
#: The compiler of the libraries. Without one the wheel is for all machines, and each compiles at the first use.
COMPILER = native.compiler() if platform.system() == "Linux" else None


class Build(build_py):
    """The package with its libraries. An editable installation compiles at the first use."""

    def run(self):
        super().run()
        for library in (native.ENGINE, native.BLOCKS) if COMPILER and not self.editable_mode else ():
            library.compile(COMPILER, Path(self.build_lib, library.shipped().relative_to(ROOT)))


class Wheel(bdist_wheel):
    """A wheel for one processor and any Python 3: the libraries are loaded by ctypes."""

    def get_tag(self):
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if COMPILER else tag


class WithLibraries(Distribution):
    """A distribution that is not for all processors if it has libraries."""

    def has_ext_modules(self):
        return COMPILER is not None


setup(
    distclass=WithLibraries,
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
    packages=[*find_packages(include=["megatron_lossy*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={package: ["**/*"] for package in SHIPPED}
    | {
        "megatron_lossy.transport.udp": ["c/*.[ch]"],
        "megatron_lossy.base.coding": ["c/*.c"],
        "megatron_lossy.lab.calibration": ["budget.yaml"],
        "megatron_lossy.lab.plan": ["measured.yaml"],
    },
)
