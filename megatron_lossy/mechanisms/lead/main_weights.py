"""The weights that a lead is made of: the optimizer's float32 weights, whose copies that are sent may have 16 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...hooks.main_weights import main_pieces


class MainWeights:
    """A function that returns the float32 weights, in ``optimizers``, of the shard ``own`` [shard] of ``bucket``.

    Includes padding. Raises :class:`UsageError` where an optimizer keeps such weights to itself.
    """

    def __init__(self, optimizers: Iterable[Any], bucket: Any, own: torch.Tensor) -> None:
        self._own = own.detach()
        self._pieces = (
            [] if own.dtype == torch.float32 else main_pieces(optimizers, bucket, own, "--param-send compensated")
        )

    def __call__(self) -> torch.Tensor:
        result = self._own.float()
        for start, piece in self._pieces:
            result[start : start + piece.numel()] = piece.view(-1)
        return result
