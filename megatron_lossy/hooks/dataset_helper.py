"""Megatron-core's dataset helper, a library in C++ that samples are indexed with."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import megatron.core.datasets

from ..base.errors import UsageError


def build_helper() -> None:
    """Build megatron-core's dataset helper if it is missing: a wheel has it, a fresh checkout does not.

    Megatron-LM does the same later, on a rank whose error is lost among those of the others. Here it is built for this
    Python. Raises :class:`UsageError` if that fails.
    """
    folder = Path(megatron.core.datasets.__path__[0])
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return
    command = ["make", "-C", str(folder), f"LIBEXT={suffix}"]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    try:
        built = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
        errors = [] if not built.returncode else built.stderr.strip().splitlines() or [f"status {built.returncode}"]
    except OSError as error:
        errors = [str(error)]
    if errors:
        raise UsageError(
            f"megatron-core: {folder} has no dataset helper, and it cannot be built ({errors[0].strip()}); that needs "
            "make, a C++ compiler and the package pybind11"
        )
