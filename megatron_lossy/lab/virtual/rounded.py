"""The values that owners of a virtual cluster send in codes (``--param-wire``)."""

from __future__ import annotations

from ...transport.coded import Coded
from .sending import Sending


class Rounded(Sending):
    """The values that ``inner`` sends, as they are decoded from codes."""

    changes = True

    def __init__(self, inner: Sending, workers: int, coded: Coded) -> None:
        super().__init__(inner.buffers, workers)
        self._inner, self._coded = inner, coded

    def before_update(self) -> None:
        self._inner.before_update()

    def after_update(self) -> None:
        self._inner.after_update()

    def change(self, step: int) -> None:
        self._inner.change(step)
        for bucket, buffer in enumerate(self.buffers):
            rounded = buffer.reshape(-1)
            self._coded.round_parameters(bucket, rounded)
            buffer.copy_(rounded.view_as(buffer))
