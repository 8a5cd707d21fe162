"""Rules for units that do not arrive: the verbs that a wire calls, and the records that it hands over.

Rules are pure: they use no process group. Torch is not imported here, so that flags can be checked without it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..base.exchange import BucketUnits, Delivery, Exchange, Lost
from .rows import Saved, rows_for

if TYPE_CHECKING:
    import torch

    from ..config import LossyConfig

#: Runs the caller's collective. Returns its handle, or ``None`` if it has completed or another part waits for it.
Collective = Callable[[], Any]
#: Returns the factor of a loss, a number or a scalar tensor, or ``None`` without one.
LossScale = Callable[[], Any]


def nothing() -> None:
    """Do nothing: no collective is to run, or the loss has no factor."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of one bucket, as one rank exchanges them.

    Args:
        exchange: names the exchange; its step is the iteration.
        bucket: the number of the bucket.
        buffer: [N * shard], the gradients of this rank. It changes in place, and is free once the exchange has ended.
        output: [shard], receives the recovered sum. It may be part of ``buffer``.
        collective: would carry all of it, reliably; by default of no rank.
        averaged: the collective divides the sum by N (``ReduceOp.AVG``).
        loss_scale: returns a number or a scalar tensor that multiplied the gradients; with one, the step may be
            rejected. ``None`` without one.
        gapless: the next exchange of the bucket is that of the next step.
        rounding: gives a buffer [N * shard] the values that others get of it, in place. The wire sets it if values cross
            in codes, and calls it before :meth:`GradRecovery.before`, unless the rule does.
        coming: returns the units of the bucket that the exchange of the next step loses, or ``None`` if a trace ends
            before it. The wire sets it if ``gapless``, and losses can be foreseen.
    """

    exchange: Exchange
    bucket: int
    buffer: torch.Tensor
    output: torch.Tensor
    collective: Collective = nothing
    averaged: bool = False
    loss_scale: LossScale = nothing
    gapless: bool = False
    coming: Callable[[], Lost | None] | None = None
    rounding: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True)
class Parameters:
    """The parameters of one bucket, as one rank exchanges them.

    Args:
        exchange: names the exchange; its step is the update.
        bucket: the number of the bucket.
        buffer: [N * shard], the replica of this rank.
        sent: [shard], the fresh values of its own shard, in ``buffer`` or not.
        collective: would carry all of it, reliably.
    """

    exchange: Exchange
    bucket: int
    buffer: torch.Tensor
    sent: torch.Tensor
    collective: Collective


@dataclass
class SentUnits:
    """A record of the units of one bucket that a rank sent in a step.

    ``high``: units of high priority. ``lost``: units that the network lost; ``recovered`` of these arrived after all,
    and ``left`` are lost for good. ``residual`` and ``payload``: sums of |values| of the units lost for good, and of
    all units.
    """

    units: int = 0
    high: int = 0
    lost: int = 0
    recovered: int = 0
    left: int = 0
    residual: float = 0.0
    payload: float = 0.0
    oldest: int = 0


class Rule(ABC):
    """One rule for one bucket at one rank. Rules that keep data between steps hold them here.

    A step may be exchanged more than once (Megatron's rerun machine, repeated gathers); the result must not depend
    on that. ``units``: how the bucket is cut. ``rank``: this rank's index among the sources of a delivery.
    """

    #: The value of its flag.
    name: ClassVar[str]
    #: Objects with a state that the rules of a group share, by the names under which it is saved.
    shared: Mapping[str, Any] = {}

    def __init__(self, units: BucketUnits, rank: int) -> None:
        self.units = units
        self.rank = rank
        #: The operations that change units of a buffer.
        self.rows = rows_for()

    def finish_step(self, step: int, successful: bool) -> None:
        """End ``step``. ``successful``: the optimizer used its gradients. The step may have had no exchange here."""

    def restart(self) -> None:
        """Forget the data kept between steps: they belong to another run than the one that goes on."""

    def state_dict(self) -> dict[str, Any]:
        """Return state that must be saved for a run to continue bit for bit."""
        return {}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore :meth:`state_dict`, with tensors on ``device``."""


class GradRecovery(Rule):
    """A rule for gradients: lost units are removed, and the owner corrects the sum of the rest.

    ``before`` and ``after`` are for rules to override. With a ``combine`` of its own a rule cannot go with
    ``--grad-priority``, which has another.

    The wire decides at which end they are removed. Over a collective each sender removes them before it sends: ``lost``
    are units by destination. If owners get the pieces of all senders, they remove them: ``lost`` are units by source.
    """

    #: Whether the rule asks for :attr:`Gradients.coming`, which only drawn losses have.
    foresight: bool = False
    #: Whether gradients of earlier steps enter the sum. The sum must then mean the same in all steps.
    carries_over: bool = False
    #: Whether senders keep their losses, and send them again, with the verbs of :class:`.ErrorFeedback`.
    feeds_back: ClassVar[bool] = False
    #: Whether :meth:`before` calls :attr:`Gradients.rounding` itself: after it has kept or chosen values as they were.
    rounds: ClassVar[bool] = False
    #: Whether :meth:`before` leaves the units of :attr:`Lost.spared` alone; else it gets none.
    minds_spared: ClassVar[bool] = False

    def before(self, buffer: torch.Tensor, lost: Lost, delivery: Delivery, x: Gradients) -> Any:
        """Take the units that are ``lost`` out of ``buffer`` [N * shard]. The result is given to :meth:`after`."""
        self.rows.zero_(buffer, self.units, lost)

    def after(self, shard: torch.Tensor, delivery: Delivery, kept: Any, x: Gradients) -> None:
        """Correct ``shard`` [shard], the sum at its owner, in place. ``kept``: the result of :meth:`before`."""

    def combine(self, pieces: torch.Tensor, delivery: Delivery, kept: Any, x: Gradients) -> None:
        """Put the recovered sum of ``pieces`` [N * shard], one of each source, into ``x.output``; or their mean.

        A missing piece may have any value. Pieces are added in the order of the sources, in float32 at least, and
        rounded once. ``kept``: what :attr:`protected` returned where it removed units, else ``None``.
        """
        kept = self.before(pieces, delivery.lost_here(self.units), delivery, x)
        add_up(pieces, delivery, x)
        self.after(x.output, delivery, kept, x)

    #: This rule for wires, if its sender chooses units that must arrive (:mod:`.mechanisms.priority.protected`).
    protected: Any = None

    @classmethod
    def check(cls, config: LossyConfig) -> None:
        """Raise :class:`UsageError` if the rule cannot go with other flags."""


class Zero(GradRecovery):
    """``zero``: a lost unit counts as zero, the naive baseline. Expectation (g_own + (1-p) sum of others) / N."""

    name = "zero"
    minds_spared = True


class Stale(Rule):
    """``stale``: a lost unit of parameters keeps the value that the worker received last (paper, section 3 (4)).

    Some wires overwrite the whole replica: with those the rule puts lost units aside and puts them back. Others write only
    the units that arrive.
    """

    name = "stale"
    #: Whether units that arrived hold their owners' weights.
    exact: bool = True

    def put_aside(self, replica: torch.Tensor, delivery: Delivery) -> Saved | None:
        """Return copies of the units of ``replica`` [N * shard] that will be stale; ``None`` if there are none."""
        lost = delivery.lost_here(self.units)
        return None if self.rows.nothing(lost) else self.rows.take(replica, self.units, lost)

    def put_back(self, replica: torch.Tensor, delivery: Delivery, saved: Saved | None) -> None:
        """Write the units that :meth:`put_aside` returned back into ``replica``."""
        if saved is not None:
            self.rows.put_(replica, self.units, delivery.lost_here(self.units), saved)

    def send(self, x: Parameters) -> Any:
        """Put the values to send into ``x.sent``. The result is given to :meth:`sent`."""

    def sent(self, x: Parameters, own: Any, delivery: Delivery) -> None:
        """Put the owner's weights back into the own shard: the exchange has ended, and ``delivery`` arrived here."""

    def before_update(self, sent: torch.Tensor) -> None:
        """Keep what the next exchange needs of ``sent`` [shard], the own shard. Loops of users say no more than this."""


def add_up(pieces: torch.Tensor, delivery: Delivery, x: Gradients) -> None:
    """Put the sum of ``pieces`` [N * shard], or their mean, into ``x.output``."""
    rows = pieces.view(len(delivery.sources), -1)
    # On a CPU in parts that its cache holds: what is written to new memory costs more than the addition.
    part = _IN_CACHE if pieces.device.type == "cpu" else max(rows.shape[1], 1)
    for first in range(0, rows.shape[1], part):
        x.output[first : first + part].copy_(ordered_sum(rows[:, first : first + part], x.averaged))


#: Elements of a sum.
_IN_CACHE = 2**18


def ordered_sum(pieces: torch.Tensor, averaged: bool = False) -> torch.Tensor:
    """Return the sum [shard] of ``pieces`` [N, shard] in order, in float32 at least; divided by N if ``averaged``.

    The order of ``torch.sum`` depends on the device and the shape. A loop keeps the order, but launches N kernels. HPU
    compiles a loop into one graph, and a CPU adds fastest in a loop.
    """
    if pieces.device.type not in ("cpu", "hpu"):
        return _sum_in_few_kernels(pieces, averaged)
    total = pieces[0].float() if pieces.element_size() < 4 else pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    return total.div_(len(pieces)) if averaged else total


#: Parts in which half-precision pieces become float32, so that there is never a whole second copy.
_PARTS = 8


def _sum_in_few_kernels(pieces: torch.Tensor, averaged: bool) -> torch.Tensor:
    """Return :func:`ordered_sum` in a number of kernels that does not depend on N.

    A thread of ``embedding_bag`` adds up one column of a bag, row by row, in float32 at least (EmbeddingBag.cu,
    ``EmbeddingBag_updateOutputKernel_sum_mean``). So the bits are those of the loop, but for the sign of a sum of
    negative zeros. Its mean divides; ``div_`` by a number multiplies with the reciprocal on CUDA.
    """
    import torch

    rows = torch.arange(len(pieces), device=pieces.device)[None]
    mode = "mean" if averaged else "sum"
    parts = pieces.chunk(_PARTS, dim=1) if pieces.element_size() < 4 else [pieces]
    sums = [
        torch.nn.functional.embedding_bag(rows, part.to(torch.promote_types(part.dtype, torch.float32)), mode=mode)[0]
        for part in parts
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums)
