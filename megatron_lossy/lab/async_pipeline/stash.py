"""Weight stashing: a batch goes backward with the weights of its forward pass (PipeDream, SOSP 2019, section 3.3).

Parameters point at a version of the weights while a pass uses it. So autograd keeps that version, whether it keeps a
parameter itself or a view of its memory. Optimizer, checkpoints and exchanges see only the newest weights, in the usual
memory of the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


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
    """The versions of the weights of one stage. ``parameters``: all parameters of the stage."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._free: list[Version] = []

    def newest(self) -> Version:
        """A copy of the present weights."""
        version = self._free.pop() if self._free else Version(self._parameters)
        torch._foreach_copy_(version.views, [parameter.data for parameter in self._parameters])
        return version

    def release(self, version: Version) -> None:
        """Free ``version``; a later version takes its memory."""
        self._free.append(version)

    @contextlib.contextmanager
    def using(self, version: Version | None) -> Iterator[None]:
        """A context in which the parameters are ``version``; ``None`` stands for the newest."""
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
        """A context in which the newest weights may change although backward passes are ahead.

        Autograd would refuse such passes if the change is made through a view of a parameter, as in float32. If the
        change is made to the buffer of all parameters, autograd notices nothing.
        """
        with contextlib.ExitStack() as unchanged:
            for parameter in self._parameters:
                unchanged.enter_context(_unsafe_preserve_version_counter(parameter))
            yield

    def state_dict(self, version: Version) -> list[torch.Tensor]:
        """The tensors of ``version``, for :meth:`restored`."""
        return list(version.flats.values())

    def restored(self, state: Sequence[torch.Tensor]) -> Version:
        """The version whose tensors :meth:`state_dict` returned."""
        version = Version(self._parameters)
        for flat, saved in zip(version.flats.values(), state):
            flat.copy_(saved)
        return version
