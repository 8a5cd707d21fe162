"""What megatron.training (a checkout of Megatron-LM) needs on CPU beyond :mod:`.cpu`.

Its checks ask whether CUDA is there, its logs ask about memory, and its start compiles kernels for the GPU.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_lossy.hooks.ledger import Patch

from .cpu import _nothing, _patch


def _properties(device: Any = None) -> types.SimpleNamespace:
    """What Megatron reads of ``torch.cuda.get_device_properties``."""
    return types.SimpleNamespace(name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=1)


def _iterate_without_drawing(original: Callable) -> Callable:
    """``DataLoader.__iter__``, which draws a seed for its workers, leaving the random state as it was."""

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return original(self)
        finally:
            torch.set_rng_state(state)

    return __iter__


def patches() -> list[Patch]:
    """Every attribute that megatron.training needs replaced on a machine without an accelerator."""
    asks = "initialization asserts that CUDA is available and counts devices"
    memory = "the log reports memory of the GPU"
    return [
        _patch("torch.cuda:is_available", lambda: True, asks),
        _patch("torch.cuda:device_count", lambda: 1, asks),
        _patch("torch.cuda:get_device_properties", _properties, asks),
        _patch("torch.cuda:get_device_capability", lambda device=None: (0, 0), asks),
        _patch("torch.cuda:get_device_name", lambda device=None: "cpu", asks),
        _patch("torch.cuda:memory_allocated", lambda device=None: 0, memory),
        _patch("torch.cuda:max_memory_allocated", lambda device=None: 0, memory),
        _patch("torch.cuda:memory_reserved", lambda device=None: 0, memory),
        _patch("torch.cuda:max_memory_reserved", lambda device=None: 0, memory),
        _patch("torch.cuda:memory_stats", lambda device=None: {}, memory),
        _patch("torch.cuda:mem_get_info", lambda device=None: (0, 0), memory),
        _patch("torch.cuda:reset_peak_memory_stats", _nothing, memory),
        _patch("torch.cuda.nvtx:range_push", _nothing, "marks ranges for the GPU's profiler"),
        _patch("torch.cuda.nvtx:range_pop", _nothing, "marks ranges for the GPU's profiler"),
        Patch(
            "torch.utils.data:DataLoader.__iter__",
            _iterate_without_drawing,
            "on a GPU data loaders and dropout have generators of their own; a resumed run must not draw one seed more",
            "megatron-core 0.12 to 0.19",
            "Megatron trains on CPU",
        ),
        _patch(
            "megatron.training.initialize:fused_kernels.load",
            _nothing,
            "would compile kernels with nvcc",
            optional=True,
        ),
    ]
