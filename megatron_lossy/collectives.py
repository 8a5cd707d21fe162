"""The former name of :mod:`megatron_lossy.transport`, for programs that import it."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("megatron_lossy.collectives is megatron_lossy.transport now", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("megatron_lossy.transport"), name)
