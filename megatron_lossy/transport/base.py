"""The base classes of transports. A wire carries an exchange, and calls the verbs of the rule on its way.

A wire knows how the buckets of one group are cut, and whether a phase can lose anything. A wire with drawn losses knows
a delivery before the exchange; a wire over a real network knows it only afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.exchange import BucketUnits, Delivery, Exchange, Stream, units_of
from ..recovery import Gradients, GradRecovery, Parameters, Stale
from .coded import Coded


class Transfer:
    """An exchange under way. :meth:`wait` completes it, recovery included; it may be called again.

    ``work``: the handle of the collective that carries the exchange, or ``None`` if nobody has to wait for it here.
    ``deliver``: completes the exchange once its data has arrived, and returns the result of :meth:`wait`. Until then
    all other attributes are those of ``work``.
    """

    def __init__(self, work: Any, deliver: Callable[[], Any]) -> None:
        self._work = work
        self._deliver = deliver
        self._then: list[Callable[[Any], None]] = []
        self._done = False
        self._result: Any = None

    @property
    def has_work(self) -> bool:
        """Whether there is a handle to wait for."""
        return self._work is not None

    def then(self, act: Callable[[Any], None]) -> Transfer:
        """Call ``act`` with the delivery when the exchange is complete, after all earlier requests."""
        self._then.append(act)
        return self

    def wait(self) -> Any:
        """Wait until the exchange has arrived and recovery is done; returns its :class:`Delivery`."""
        # A complete exchange has no handle: each wait of gloo's reduce-scatter copies the unrecovered result again.
        if self._work is not None:
            self._work.wait()
        return self.complete()

    def complete(self) -> Any:
        """Completes the exchange as :meth:`wait` does, for callers that have waited already for the handle."""
        if not self._done:
            with torch.no_grad():
                self._result = self._deliver()
                for act in self._then:
                    act(self._result)
            self._done = True
            # These hold buffers, and a kept transfer should not keep them.
            self._work, self._deliver, self._then = None, _nothing, []
        return self._result

    #: Completes the exchange after its coalescing context has waited for all collectives.
    end_of_context = complete

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_work"], name)


class Crossing(Transfer):
    """An exchange with a collective of its own, which no coalescing context waits for."""

    end_of_context = Transfer.wait


def _nothing() -> None:
    return None


class Wire(ABC):
    """The exchanges of one stream, for one rank of a group.

    Args:
        stream: the stream of the buckets.
        members: the group's ranks within the full group (all of it with one optimizer instance).
        rank: this process's rank in the group.
        cut: by phase, how each bucket is cut into units.
        coded: the codes of each phase whose values cross in codes.
    """

    #: Whether a delivery is known only after the exchange.
    observed = False

    #: By phase, the bytes of a shard of all buckets as they cross.
    shard_bytes: Mapping[str, int] = {}

    def __init__(
        self,
        stream: Stream,
        members: Sequence[int],
        rank: int,
        cut: dict[str, Sequence[BucketUnits]],
        coded: Mapping[str, Coded] | None = None,
    ) -> None:
        self.stream = stream
        self.members = list(members)
        self.size = len(members)
        self.rank = rank
        self.cut = cut
        self.coded = coded or {}
        #: By phase, the units of a link and step.
        self.count = {phase: units_of(parts) for phase, parts in cut.items()}

    @abstractmethod
    def lossless(self, phase: str) -> bool:
        """Whether nothing can be lost in ``phase``; its exchanges then need not use this wire."""

    @abstractmethod
    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        """Begin the exchange of the gradients ``x``; ``rule`` handles their lost units."""

    @abstractmethod
    def all_gather(self, x: Parameters, rule: Stale) -> Transfer:
        """Begin the exchange of the parameters ``x``; ``rule`` handles their lost units."""

    def note_all_reduce(self, x: Callable[[], Gradients], rule: GradRecovery) -> None:
        """Note that the gradients ``x()`` are about to be all-reduced: all of them arrive."""

    def foresee(self, exchange: Exchange) -> Delivery | None:
        """The delivery of ``exchange``, if the wire knows it without making the exchange.

        Raises :class:`UsageError` if a replayed run is too short for it.
        """
        return None

    def delivery(self, exchange: Exchange) -> Delivery | None:
        """The delivery of ``exchange``, if it was one of the latest two of its phase or can be foreseen."""
        return self.foresee(exchange)

    def restore(self, exchange: Exchange, lost: Mapping[int, np.ndarray]) -> None:
        """Restore ``exchange``, made before the loaded checkpoint was saved. Made again, it must lose the same.

        ``lost``: bool[N, count] by bucket, the units that this rank missed; it missed none of the other buckets.
        """
        cut = self.cut[exchange.phase]
        arrived = np.ones((1, self.size, self.count[exchange.phase]), dtype=bool)
        for bucket, missed in lost.items():
            arrived[0][:, cut[bucket].numbers] = ~missed
        self._remember(Delivery(exchange, self.members, self.members[self.rank : self.rank + 1], arrived, cut))

    def _remember(self, delivery: Delivery) -> None:
        """Take ``delivery`` for the one of its exchange."""

    def restart(self) -> None:
        """Forget all exchanges: a checkpoint was loaded."""

    def hear(self, rule: GradRecovery, bucket: int, step: int, seconds: float) -> None:
        """Tell ``rule`` which of its units of ``step`` arrived, if it asks. Waits ``seconds`` at most for reports."""

    def hear_late(self, rule: GradRecovery, bucket: int, seconds: float) -> None:
        """Tells ``rule`` the same as :meth:`hear`, for steps that are over."""

    def agree(self, phase: str, bucket: int, replicated: np.ndarray, group: dist.ProcessGroup) -> None:
        """Make the ranks of ``group``, which hold copies of the same parameters, lose the same units of them.

        ``replicated`` bool[N, units]: the units with copies, by shard. Drawn losses are the same anyway.
        """

    def lag(self, exchange: Exchange) -> tuple[float, float] | None:
        """The share of other ranks that miss a unit of this rank, and the mean number of updates that they are late.

        Both are of the steady state; ``None`` if they are not known beforehand.
        """
        return None

    def steps(self, phase: str) -> int | None:
        """The number of steps, from 0 on, that can be foreseen; ``None``: any."""
        return None

    def prepare(self, exchange: Exchange) -> None:
        """Prepare ``exchange``, which comes next."""

    def close(self) -> None:
        """Close the wire after the last exchange."""
