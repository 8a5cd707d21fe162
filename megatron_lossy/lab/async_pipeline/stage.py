"""A stage of an asynchronous pipeline: its order of passes, its messages, its weights (docs/async_pipeline.md).

1F1B without a flush (PipeDream, SOSP 2019, section 3.2), with an update after every global batch as in AsyncMesh (section 3).
Stage s of P is P-1-s batches ahead of its updates. In iteration n it goes forward through batch n+P-1-s, then backward
through batch n, and updates its weights. So a batch goes forward and backward at the weights after max(0, batch - (P-1-s))
updates.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ...base import device


@dataclass(frozen=True)
class Pass:
    """A step of a stage with one micro-batch: ``receive`` its input, go ``forward``, or go ``backward``.

    ``batch``: in the whole run, from 0. ``micro``: the micro-batch in it.
    """

    kind: str
    batch: int
    micro: int


@dataclass(frozen=True)
class Stage:
    """Stage ``number`` of ``stages``, from 0."""

    number: int
    stages: int

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.stages - 1

    @property
    def delay(self) -> int:
        """The number of batches that this stage is ahead of its updates, and of updates that its gradients are late."""
        return self.stages - 1 - self.number

    def filled(self, iteration: int, iterations: int) -> int:
        """Return the next batch to go forward when ``iteration``, of ``iterations``, begins in the middle of a run."""
        return min(iteration + self.delay, iterations)

    def passes(
        self, iteration: int, iterations: int, micro_batches: int, forwarded: int, received: int
    ) -> Iterator[Pass]:
        """Yield the steps of the stage in ``iteration`` of ``iterations`` before its update, in order.

        ``forwarded``, ``received``: the next batch to go forward, and the next to be received. If the pipe is full
        these are :meth:`filled`, and one more. If it is empty, both are ``iteration``: then the pipe is filled first.

        A message has the same place in the order of both its ends: activations of a batch leave a stage before the
        gradients of the batch in that stage come back. So an end may wait for the other end, or for its own earlier
        messages.
        """
        ahead = self.filled(iteration, iterations)
        for batch in range(forwarded, ahead):
            for micro in range(micro_batches):
                yield from self._receive(batch, micro, received)
                yield Pass("forward", batch, micro)
        if ahead < iterations:
            for micro in range(micro_batches):
                yield from self._receive(ahead, micro, received)
        for micro in range(micro_batches):
            if ahead + 1 < iterations:
                yield from self._receive(ahead + 1, micro, received)
            if ahead < iterations:
                yield Pass("forward", ahead, micro)
            yield Pass("backward", iteration, micro)

    def _receive(self, batch: int, micro: int, received: int) -> Iterator[Pass]:
        if not self.first and batch >= received:
            yield Pass("receive", batch, micro)


class StageMessages:
    """The messages of this rank to and from its neighbours in the pipeline: contiguous tensors of ``shape``.

    Sends and receives of a pair of stages begin in one order at both ends (:meth:`Stage.passes`). NCCL needs this: it runs
    those of a pair one after another, or all of a rank.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._group = parallel_state.get_pipeline_model_parallel_group()
        ranks, place = dist.get_process_group_ranks(self._group), self._group.rank()
        self.previous = ranks[place - 1] if place else None
        self.next = ranks[place + 1] if place + 1 < len(ranks) else None
        self._inputs: deque[tuple[torch.Tensor, Any]] = deque()
        self._sent: list[tuple[torch.Tensor, Any]] = []

    def begin_input(self) -> None:
        """Begin to receive the next activations from the previous stage."""
        self._inputs.append(self._receive(self.previous))

    def next_input(self) -> torch.Tensor:
        """Wait for the oldest activations that were begun, and return them."""
        tensor, work = self._inputs.popleft()
        if work is not None:
            work.wait()
        return tensor.requires_grad_()

    def gradient(self) -> torch.Tensor:
        """Wait for the gradient of the oldest sent activations, and return it."""
        tensor, work = self._receive(self.next)
        work.wait()
        return tensor

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Begin to send activations to the ``next`` stage, or the gradient of received ones to the ``previous``."""
        tensor = tensor.detach().contiguous()
        self._sent.append((tensor, dist.isend(tensor, peer, group=self._group)))

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


class Version:
    """A copy of the weights: ``flats``, one tensor for each dtype, and ``views`` of them in the parameters' shapes."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sizes: dict[torch.dtype, int] = {}
        places = []
        for parameter in parameters:
            start = sizes.get(parameter.dtype, 0)
            places.append((parameter.dtype, start))
            sizes[parameter.dtype] = start + parameter.numel()
        device = parameters[0].device
        self.flats = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        self.views = [
            self.flats[dtype][start : start + parameter.numel()].view(parameter.shape)
            for parameter, (dtype, start) in zip(parameters, places)
        ]


class Stash:
    """The versions of the weights of one stage: a batch goes backward with those of its forward pass (PipeDream, section 3.3).

    Parameters point at a version while a pass uses it. So autograd keeps that version, whether it keeps a parameter itself
    or a view of its memory. Optimizer, checkpoints and exchanges see only the newest weights, in the usual memory of the
    parameters. ``parameters``: all of the stage.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._free: list[Version] = []

    def newest(self) -> Version:
        """Return a copy of the present weights."""
        version = self._free.pop() if self._free else Version(self._parameters)
        torch._foreach_copy_(version.views, [parameter.data for parameter in self._parameters])
        return version

    def release(self, version: Version) -> None:
        """Free ``version``; a later version takes its memory."""
        self._free.append(version)

    @contextlib.contextmanager
    def using(self, version: Version | None) -> Iterator[None]:
        """Return a context in which the parameters are ``version``; ``None`` stands for the newest."""
        if version is None:
            yield
            return
        own = [parameter.data for parameter in self._parameters]
        try:
            for parameter, view in zip(self._parameters, version.views):
                parameter.data = view
            yield
        finally:
            for parameter, data in zip(self._parameters, own):
                parameter.data = data

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Return a context in which the newest weights may change although backward passes are ahead.

        Autograd would refuse such passes if the change is made through a view of a parameter, as in float32. If the
        change is made to the buffer of all parameters, autograd notices nothing.
        """
        with contextlib.ExitStack() as unchanged:
            for parameter in self._parameters:
                unchanged.enter_context(_unsafe_preserve_version_counter(parameter))
            yield

    def state_dict(self, version: Version) -> list[torch.Tensor]:
        """Return the tensors of ``version``, for :meth:`restored`."""
        return list(version.flats.values())

    def restored(self, state: Sequence[torch.Tensor]) -> Version:
        """Return the version whose tensors :meth:`state_dict` returned."""
        version = Version(self._parameters)
        for flat, saved in zip(version.flats.values(), state):
            flat.copy_(saved)
        return version
