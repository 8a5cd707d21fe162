"""The machine and the versions that a run or a benchmark was made with."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from .. import __version__


def without_ranks() -> dict[str, str]:
    """Return the environment for a child process that is no rank: this process's, without its place among ranks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in names and not k.startswith("TORCHELASTIC_")}


def processor() -> str:
    """Return number and model of the processor cores that this process may use."""
    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{len(os.sched_getaffinity(0))} cores of {model}"


def hardware() -> str:
    """Return the accelerators of this machine, or the processor if there are none."""
    import torch

    from ..base.device import device_type

    if device_type() == "cpu":
        return processor()
    accelerator = getattr(torch, device_type())
    return f"{accelerator.device_count()} x {accelerator.get_device_name()}"


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python, and of the libraries below that are imported."""
    used = {"megatron-lossy": __version__}
    for name, module in (("megatron-core", "megatron.core"), ("torch", "torch"), ("numpy", "numpy")):
        if module in sys.modules:
            used[name] = sys.modules[module].__version__
    return {**used, "python": platform.python_version()}
