"""Every random state that training draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..base import device


def rng_state() -> dict[str, Any]:
    """Return the states of Python, NumPy, torch, the device and Megatron's tracker."""
    from megatron.core import tensor_parallel  # whose absence others report

    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if device.device_type() != "cpu":
        state["device"] = torch.cuda.get_rng_state()
    return state


def on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with its tensors on the CPU, where torch wants random states; they may be on any device."""
    return {name: on_cpu(value) if isinstance(value, dict) else value.cpu() for name, value in state.items()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore :func:`rng_state`."""
    from megatron.core import tensor_parallel

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(state["tracker"]))  # it keeps and changes its argument
    torch.set_rng_state(state["torch"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"])
