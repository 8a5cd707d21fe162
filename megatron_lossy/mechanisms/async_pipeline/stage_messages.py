"""Messages between stages of an asynchronous pipeline: activations to the next one, gradients to the previous.

Sends and receives of a pair of stages begin in one order at both ends (:meth:`megatron_lossy.pipeline.Stage.passes`).
NCCL needs this: it runs those of a pair one after another, or all of a rank.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed as dist

from ...base import device


class StageMessages:
    """The messages of this rank to and from its neighbours in the pipeline: contiguous tensors of ``shape``."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._group = parallel_state.get_pipeline_model_parallel_group()
        ranks, place = dist.get_process_group_ranks(self._group), self._group.rank()
        self._previous = ranks[place - 1] if place else None
        self._next = ranks[place + 1] if place + 1 < len(ranks) else None
        self._inputs: deque[tuple[torch.Tensor, Any]] = deque()
        self._sent: list[tuple[torch.Tensor, Any]] = []

    def begin_input(self) -> None:
        """Begin to receive the next activations from the previous stage."""
        self._inputs.append(self._receive(self._previous))

    def next_input(self) -> torch.Tensor:
        """Wait for the oldest activations that were begun, and return them."""
        tensor, work = self._inputs.popleft()
        if work is not None:
            work.wait()
        return tensor.requires_grad_()

    def gradient(self) -> torch.Tensor:
        """Wait for the gradient of the oldest sent activations, and return it."""
        tensor, work = self._receive(self._next)
        work.wait()
        return tensor

    def send_output(self, tensor: torch.Tensor) -> None:
        """Begin to send activations to the next stage."""
        self._send(tensor, self._next)

    def send_gradient(self, tensor: torch.Tensor) -> None:
        """Begin to send the gradient of received activations to the previous stage."""
        self._send(tensor, self._previous)

    def settle(self) -> None:
        """Wait for everything that was begun; activations stay to be taken. Neighbours wait no longer than needed."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()
        for _, work in self._inputs:
            if work is not None:
                work.wait()
        self._inputs = deque((tensor, None) for tensor, _ in self._inputs)

    @property
    def waiting(self) -> list[torch.Tensor]:
        """Activations that were received and not taken; valid after :meth:`settle`."""
        return [tensor for tensor, _ in self._inputs]

    def restore(self, waiting: list[torch.Tensor]) -> None:
        """Make ``waiting`` the received activations."""
        self._inputs = deque((tensor, None) for tensor in waiting)

    def _receive(self, peer: int) -> tuple[torch.Tensor, Any]:
        tensor = torch.empty(self._shape, dtype=self._dtype, device=device.current_device())
        return tensor, dist.irecv(tensor, peer, group=self._group)

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        tensor = tensor.detach().contiguous()
        self._sent.append((tensor, dist.isend(tensor, peer, group=self._group)))
