"""What a run or a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """Number and model of the processor cores that this process may use."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{len(os.sched_getaffinity(0))} cores of {model}"


def hardware() -> str:
    """The accelerator that this process computes on, or its processor."""
    import torch

    from . import device_type

    kind = device_type()
    return processor() if kind == "cpu" else getattr(torch, kind).get_device_name()
