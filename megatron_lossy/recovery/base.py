"""What a recovery rule is: what is done before an exchange and after it about units that do not arrive.

Rules are pure: they know no process group. Torch is not imported here, so that flags can be checked without it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..exchange import BucketUnits, Delivery, Exchange, Lost
from . import copies
from .priority import Priority
from .rows import Rows, rows_for

if TYPE_CHECKING:
    import torch

    from ..config import LossyConfig


@dataclass(frozen=True)
class Reduction:
    """How the gradients of one exchange are reduced, beside who loses what.

    ``averaged``: the collective divides the sum by N (``ReduceOp.AVG``). ``loss_scale``: what the gradients are
    multiplied with (a number or a scalar tensor), or ``None``; with one, the step may be rejected. ``following()``:
    the delivery of the next exchange, or ``None`` if that has none (a trace ends); it is there for rules with
    :attr:`Rule.foresight`, if it is known which step is next. Of gradients, ``exchange`` is theirs. Of parameters, ``sent``
    [shard]: what this rank sends, for a rule to change and restore, ``step``: the update, and ``lead``: c and r of the
    lead it is sent with (``--param-send compensated``).
    """

    averaged: bool = False
    loss_scale: torch.Tensor | float | None = None
    following: Callable[[], Delivery | None] | None = None
    sent: torch.Tensor | None = None
    step: int | None = None
    lead: tuple[float, float] = (0.0, 0.0)
    exchange: Exchange | None = None


class Rule(ABC):
    """One rule for one bucket at one rank. Rules that keep data between steps hold them here.

    A step may be exchanged more than once (Megatron's rerun machine, repeated gathers); the result must not depend
    on that. ``units``: how the bucket is cut. ``rank``: this rank's index among the sources of a delivery.
    """

    #: What it is called: for gradients, the value of ``--grad-recovery``.
    name: ClassVar[str]
    #: Whether the rule wants to know what the next step will lose, which only drawn losses can tell.
    foresight: ClassVar[bool] = False
    #: Whether gradients of earlier steps enter the sum, which then must mean the same in all steps.
    carries_over: ClassVar[bool] = False

    def __init__(self, units: BucketUnits, rank: int) -> None:
        self.units = units
        self.rank = rank

    @staticmethod
    def rows(buffer: torch.Tensor) -> Rows:
        """How to change units of ``buffer``."""
        return rows_for(buffer.device)

    def before(self, buffer: torch.Tensor, delivery: Delivery | None, reduction: Reduction) -> Any:
        """Change ``buffer`` [N * shard] before the exchange; the result is given to :meth:`after`.

        ``delivery`` is ``None`` where the transport itself leaves out what does not arrive.
        """

    def after(self, output: torch.Tensor, delivery: Delivery, kept: Any, reduction: Reduction) -> None:
        """Correct ``output`` in place once the exchange has arrived. ``kept``: what :meth:`before` returned."""

    def finish_step(self, step: int, successful: bool) -> None:
        """``step`` is over; ``successful``: the optimizer used its gradients. It may have had no exchange here."""

    def restart(self) -> None:
        """Forget what is kept between steps: it is of another run than the one that goes on."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved for a run to continue bit for bit."""
        return {}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore :meth:`state_dict`, with tensors on ``device``."""


class GradRecovery(Rule):
    """A rule for gradients: what does not arrive is removed, and owners correct the sum of the rest.

    Senders remove it from what a collective adds up. Where owners get pieces, they remove it themselves
    (:attr:`from_pieces`): :meth:`before` is then given the pieces, one shard of each source, instead of what this rank sends
    to each destination. In :meth:`after`, ``output`` is the reduced shard [shard] of this rank.
    """

    #: Whether the owner removes what is missing; set by whoever knows the transport.
    from_pieces = False
    #: Which units are delivered all the same; set by whoever knows the flags.
    priority: Priority | None = None
    #: Where a sender chooses: of the latest exchange what was lost for good, or, where only the network knows what
    #: will be, bool[N, count] what must arrive.
    final: Lost | None = None
    must: np.ndarray | None = None
    #: Of which nobody has said what arrived: step, payload, loss scale.
    _sent: tuple[int, torch.Tensor, Any] | None = None

    def __init__(self, units: BucketUnits, rank: int) -> None:
        super().__init__(units, rank)
        #: Steps that are over, and of which nobody has said yet what arrived.
        self.late: list[int] = []

    @property
    def at_sender(self) -> bool:
        """Whether senders remove what is missing even where owners get pieces: only they know their priorities."""
        return self.priority is not None

    def before(self, buffer: torch.Tensor, delivery: Delivery | None, reduction: Reduction) -> Any:
        self.correct(buffer, reduction)
        if delivery is None:
            assert self.priority is not None and reduction.exchange is not None
            self.must = self.priority.choose(buffer, reduction.exchange)
            self._sent = (reduction.exchange.step, buffer, reduction.loss_scale)
            return None
        lost = self.missing(delivery)
        if self.priority is not None:
            self.final = lost = self.priority.spare(buffer, lost, delivery.exchange)
        return self.remove(buffer, lost, delivery, reduction)

    def restart(self) -> None:
        self._sent, self.late = None, []

    def sent_in(self, step: int) -> bool:
        """Whether nobody has said yet what arrived of what was sent in ``step``."""
        return self._sent is not None and self._sent[0] == step

    def reported(self, step: int, lost: np.ndarray | None) -> None:
        """``lost`` bool[N, count] of what was sent in ``step`` did not arrive; ``None``: that is still to be said."""
        assert self.priority is not None
        if self.sent_in(step):
            self._sent = None
            if lost is None:
                self.late.append(step)
            else:
                self.final = Lost(lost)
                self.priority.tell(self.final)
        elif lost is not None:
            self.late.remove(step)

    def correct(self, buffer: torch.Tensor, reduction: Reduction) -> None:
        """Change ``buffer`` before anything is known of its losses."""

    def remove(self, buffer: torch.Tensor, lost: Lost, delivery: Delivery, reduction: Reduction) -> Any:
        """Take what is ``lost`` out of ``buffer``. The result is given to :meth:`after`."""
        self.rows(buffer).zero_(buffer, self.units, lost)

    def missing(self, delivery: Delivery) -> Lost:
        """What is missing in the buffer that :meth:`before` is given."""
        return delivery.lost_here(self.units) if self.from_pieces else delivery.lost_there(self.units)

    def combine(
        self, pieces: torch.Tensor, output: torch.Tensor, delivery: Delivery, kept: Any, reduction: Reduction
    ) -> None:
        """Put the recovered sum of ``pieces`` [N * shard], of all sources, into ``output`` [shard]; or their mean.

        What is missing in ``pieces`` may have any value. They are added in the order of the sources, in float32 at
        least, and rounded once. ``kept``: what :meth:`before` returned at the sender, where it removes what is missing.
        """
        copies.used_here((pieces,))  # which were allocated where the exchange began
        if self.from_pieces and not self.at_sender:
            kept = self.before(pieces, delivery, reduction)
        elif self.from_pieces:
            self.rows(pieces).zero_(pieces, self.units, delivery.lost_here(self.units))
        output.copy_(ordered_sum(pieces.view(len(delivery.sources), -1), reduction.averaged))
        self.after(output, delivery, kept, reduction)

    @classmethod
    def check(cls, config: LossyConfig) -> None:
        """Raise :class:`UsageError` if the rule cannot go with other flags."""

    @classmethod
    def kept_share(cls, lost: float) -> float:
        """Elements that the rule keeps between steps, per element of the gradients, if a step loses ``lost`` of them."""
        return 0.0


def ordered_sum(pieces: torch.Tensor, averaged: bool = False) -> torch.Tensor:
    """The sum [shard] of ``pieces`` [N, shard] one after another, in float32 at least; divided by N if ``averaged``."""
    total = pieces[0].float() if pieces.element_size() < 4 else pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    return total.div_(len(pieces)) if averaged else total
