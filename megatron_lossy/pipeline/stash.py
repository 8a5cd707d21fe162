"""Weight stashing: a batch goes backward with the weights with which it went forward (PipeDream, SOSP 2019, section 3.3).

Parameters are pointed at a version of the weights while something is computed with it. So whatever autograd has kept, a
parameter itself or a view of its memory, is that version. Optimizer, checkpoints and exchanges know nothing but the
newest weights, in the memory that the parameters have otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class Version:
    """A copy of the weights: ``flats``, one tensor for each dtype, and ``views`` of them with the shapes of the parameters."""

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
    """The versions of the weights of one stage. ``parameters``: all of the stage's."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._free: list[Version] = []

    def newest(self) -> Version:
        """A copy of the weights as they are."""
        version = self._free.pop() if self._free else Version(self._parameters)
        torch._foreach_copy_(version.views, [parameter.data for parameter in self._parameters])
        return version

    def release(self, version: Version) -> None:
        """``version`` is not used any more; its memory is that of a later one."""
        self._free.append(version)

    @contextlib.contextmanager
    def using(self, version: Version | None) -> Iterator[None]:
        """Within this context the parameters are ``version``; ``None`` stands for the newest."""
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
        """Within this context the newest weights may change although backward passes are ahead.

        Autograd would refuse them where the change is made through a view of a parameter, as in float32; where it is
        made to the buffer that has all parameters, it notices nothing.
        """
        with contextlib.ExitStack() as unchanged:
            for parameter in self._parameters:
                unchanged.enter_context(_unsafe_preserve_version_counter(parameter))
            yield

    def state_dict(self, version: Version) -> list[torch.Tensor]:
        """What :meth:`restored` takes."""
        return list(version.flats.values())

    def restored(self, state: Sequence[torch.Tensor]) -> Version:
        """The version that :meth:`state_dict` was given."""
        version = Version(self._parameters)
        for flat, saved in zip(version.flats.values(), state):
            flat.copy_(saved)
        return version
