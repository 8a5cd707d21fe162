"""The base class of error models: a model decides which errors hit the reduced gradients of a rank.

Definition 2.1 of PAFT: rank m receives g + e_m in place of the reduced gradient g, with an error e_m of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...base.exchange import Exchange, Stream
from ...base.registry import GRAD_ERRORS
from ...config import LossyConfig
from ...config.grad_errors import ErrorFlags
from ..draws import Uniforms

#: Purposes of draws: whether an error happens, its noise, the elements and the bits that it hits.
HAPPENS, NOISE, ELEMENTS, BITS = 16, 17, 18, 19
#: The largest number of float32. Noise is drawn and added in float32.
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Event:
    """One error in one bucket of one rank.

    ``iteration``: the attempted iteration, from 0. ``rank``: in the group; for an error of the reduction, its owner or
    0. ``kind``: the model that makes the error again, "gaussian" or "bit-flip". ``std``: the standard deviation of the
    noise, in units of the gradient that the optimizer sees. If ``relative``, its unit is the root mean square of the
    bucket's gradient, until the error is applied. ``seed``: 64 bits, for the noise. ``elements``, ``bits``: the
    elements that are hit, counted without padding, and the bit of each.
    """

    iteration: int
    stream: Stream
    bucket: int
    rank: int
    kind: str
    std: float = 0.0
    relative: bool = False
    seed: int = 0
    elements: tuple[int, ...] = ()
    bits: tuple[int, ...] = ()


class Corruption:
    """One model of errors: a pure function of the flags and the arguments, the same in every process and any order."""

    #: The value of ``--grad-error``.
    name: ClassVar[str]

    def __init__(self, config: LossyConfig) -> None:
        self.config = config

    @classmethod
    def check(cls, config: ErrorFlags) -> None:
        """Raise :class:`UsageError` for flags of this model that are not allowed."""

    @classmethod
    def describe(cls, config: ErrorFlags) -> str:
        """Return the errors of this model in words."""
        return cls.name

    def events(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        """Return the errors of ``rank`` in the gradients of ``exchange``, at most one per bucket, in canonical order.

        ``exchange``: of phase "grad"; its step is the attempted iteration. ``rank``: the rank that has the gradients,
        in the full group; for ``--grad-error-at reduce`` the owner of the shard, or 0 for all replicas. ``sizes``: for
        each bucket the number of elements without padding, or the number in the owner's shard. ``width``: bits of an
        element.
        """
        ranks = self.config.grad_error_ranks
        if ranks is not None and rank not in ranks:
            return []
        here = np.array([rank])
        happens = Uniforms(self.config.loss_seed, HAPPENS, exchange, here, here, 1).below(self.config.grad_error_rate)
        return self.draw(exchange, rank, sizes, width) if happens.item() else []

    def draw(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        """Return the errors as :meth:`events` does, for an exchange in which errors happen."""
        return []


class Nothing(Corruption):
    """No errors."""

    name = "none"


def make_corruption(config: LossyConfig) -> Corruption:
    """Return the model of errors that the flags ask for."""
    return GRAD_ERRORS.load(config.error_kind)(config)
