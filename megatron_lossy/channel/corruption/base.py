"""What a model of errors is: a function that says which errors hit the reduced gradients of a rank.

Definition 2.1 of PAFT: rank m receives g + e_m in place of the reduced gradient g, with an error e_m of its own.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ...config import LossyConfig
from ...config.errors import ErrorFlags
from ...exchange import Exchange, Stream
from ...registry import GRAD_ERRORS
from ..draws import Uniforms

logger = logging.getLogger(__name__)

#: Purposes of draws: whether an error happens, its noise, the elements and the bits that it hits.
HAPPENS, NOISE, ELEMENTS, BITS = 16, 17, 18, 19
#: Of float32, in which noise is drawn and added.
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Event:
    """One error in one bucket of one rank.

    ``iteration``: attempted, from 0. ``rank``: in the group; of an error of the reduction, its owner or 0. ``kind``: the
    model that makes it again, "gaussian" or "bit-flip". ``std``: of the noise, in units of the gradient that the
    optimizer sees; or of the root mean square of the bucket's gradient, if ``relative``, until it is applied. ``seed``: of
    the noise, 64 bits. ``elements``, ``bits``: which elements are hit, counted over all that are no padding, and which bit
    of each. ``digest``: what told the bucket afterwards where it was recorded; empty if nobody did.
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
    digest: bytes = field(default=b"", compare=False)


class Corruption(ABC):
    """One model of errors: a pure function of the flags and the arguments, the same in every process and any order."""

    #: The value of ``--grad-error``.
    name: ClassVar[str]
    #: Flags that this model reads, of those that not all read.
    flags: ClassVar[tuple[str, ...]] = ("grad_error_rate", "grad_error_at", "grad_error_ranks")

    def __init__(self, config: LossyConfig, recorded: Iterable[Event] = ()) -> None:
        self.config = config

    @classmethod
    def check(cls, config: ErrorFlags) -> None:
        """Raise :class:`UsageError` for flags of this model that are not allowed."""

    @classmethod
    def describe(cls, config: ErrorFlags) -> str:
        """What happens, in words."""
        return cls.name

    def events(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        """The errors of ``rank`` in the gradients of ``exchange``, at most one per bucket, in canonical order.

        ``exchange``: of phase "grad", its step the attempted iteration. ``rank``: whose gradients, in the full group;
        for ``--grad-error-at reduce`` the owner of the shard, or 0 for all replicas. ``sizes``: of each bucket the
        elements that are no padding, or those of the owner's shard. ``width``: bits of an element.
        """
        ranks = self.config.grad_error_ranks
        if ranks is not None and rank not in ranks:
            return []
        here = np.array([rank])
        happens = Uniforms(self.config.loss_seed, HAPPENS, exchange, here, here, 1).below(self.config.grad_error_rate)
        return self.draw(exchange, rank, sizes, width) if happens.item() else []

    @abstractmethod
    def draw(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        """As :meth:`events`, of an error that happens."""

    def differs(self, event: Event) -> None:
        """The bucket is not what it was where ``event`` was recorded."""


class Nothing(Corruption):
    """No errors."""

    name = "none"
    flags = ()

    def events(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        return []

    def draw(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        return []


def warn_of_one_rank(config: ErrorFlags, ranks: int) -> None:
    """Say that no error happens where one of ``ranks`` is all there is."""
    if config.errs and ranks == 1:
        logger.warning("--grad-error with one data-parallel rank: nothing is reduced, so that no error happens")


def make_corruption(config: LossyConfig, recorded: Iterable[Event] = ()) -> Corruption:
    """The model of errors that the flags ask for. ``recorded``: what ``--grad-error-trace`` holds."""
    return GRAD_ERRORS.load(config.grad_error)(config, recorded)
