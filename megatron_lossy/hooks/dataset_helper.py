"""Megatron-core's dataset helper, a library in C++ that samples are indexed with."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from ..base.errors import UsageError


def build_helper(checkout: Path | None = None) -> None:
    """Build megatron-core's dataset helper if it is missing: a wheel has it, a fresh checkout does not.

    Megatron-LM does the same later, on a rank whose error is lost among those of the others. Here it is built for this
    Python, and nothing is imported. ``checkout``: of Megatron-LM, whose own Megatron comes first. Raise
    :class:`UsageError` if that fails.
    """
    folder, suffix = Path(checkout or "", "megatron/core/datasets"), sysconfig.get_config_var("EXT_SUFFIX")
    if checkout is None or not folder.is_dir():
        found = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
        if found is None or found.origin is None:
            return  # there is no Megatron either
        folder = Path(found.origin).with_name("datasets")
    if any((folder / f"helpers_cpp{ending}").exists() for ending in importlib.machinery.EXTENSION_SUFFIXES):
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
