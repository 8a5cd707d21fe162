"""How an exchange crosses. A wire carries it, and calls the verbs of the rule that it needs on its way.

A wire knows how the buckets of one group are cut, and whether a phase can lose anything. It may know a delivery before the
exchange, as drawn losses are known, or only after it, as on a real network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..exchange import BucketUnits, Delivery, Exchange, Stream
from ..recovery import Gradients, GradRecovery, Parameters, Priority, Stale


class Transfer:
    """An exchange under way. :meth:`wait` completes it, recovery included; it may be called again.

    ``work``: the handle of what carries the exchange, or ``None`` if nobody has to wait for it here. ``deliver``: completes
    the exchange once that has arrived, and returns what :meth:`wait` does. Other attributes are those of ``work``, until then.
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
        """Call ``act`` with the delivery when the exchange is complete, after what was asked for before."""
        self._then.append(act)
        return self

    def wait(self) -> Any:
        """Wait until the exchange has arrived and recovery is done; returns its :class:`Delivery`."""
        # Only until it is complete: every wait of gloo's reduce-scatter copies the unrecovered result into the output again.
        if self._work is not None:
            self._work.wait()
        return self.complete()

    def complete(self) -> Any:
        """As :meth:`wait`, where somebody has waited already for what carries the exchange."""
        if not self._done:
            with torch.no_grad():
                self._result = self._deliver()
                for act in self._then:
                    act(self._result)
            self._done = True
            # They hold buffers, and whoever keeps a transfer need not keep those.
            self._work, self._deliver, self._then = None, _nothing, []
        return self._result

    #: Ends it where the coalescing context that it was begun in has waited for all collectives.
    end_of_context = complete

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_work"], name)


class Crossing(Transfer):
    """An exchange that crosses in a way of its own, for which no coalescing context waits."""

    end_of_context = Transfer.wait


def _nothing() -> None:
    return None


class Wire(ABC):
    """How the exchanges of one stream cross, for one rank of a group.

    Args:
        stream: what the buckets belong to.
        members: the group's ranks within the full group (all of it with one optimizer instance).
        rank: this process's rank in the group.
        cut: by phase, how each bucket is cut into units.
    """

    #: Whether a delivery is known only after the exchange.
    observed = False

    def __init__(
        self, stream: Stream, members: Sequence[int], rank: int, cut: dict[str, Sequence[BucketUnits]]
    ) -> None:
        self.stream = stream
        self.members = list(members)
        self.size = len(members)
        self.rank = rank
        self.cut = cut

    @abstractmethod
    def lossless(self, phase: str) -> bool:
        """Whether nothing can be lost in ``phase``; its exchanges then need not go through here."""

    @abstractmethod
    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        """Begin the exchange of the gradients ``x``, of whose lost units ``rule`` takes care."""

    @abstractmethod
    def all_gather(self, x: Parameters, rule: Stale) -> Transfer:
        """Begin the exchange of the parameters ``x``, of whose lost units ``rule`` takes care."""

    @abstractmethod
    def protected(self, rule: GradRecovery, priority: Priority) -> GradRecovery:
        """``rule``, with senders whose ``priority`` chooses units that have to arrive."""

    def note_all_reduce(self, x: Callable[[], Gradients], rule: GradRecovery) -> None:
        """The gradients ``x()`` are about to be all-reduced: all of them arrive."""

    def foresee(self, exchange: Exchange) -> Delivery | None:
        """The delivery of ``exchange``, if it is known whether or not the exchange was made.

        Raises :class:`UsageError` where a recorded run that is replayed does not go so far.
        """
        return None

    def delivery(self, exchange: Exchange) -> Delivery | None:
        """The delivery of ``exchange``, if it was one of the latest two of its phase or can be foreseen."""
        return self.foresee(exchange)

    def restore(self, delivery: Delivery) -> None:
        """``delivery`` was made before the checkpoint was saved that is loaded now. Made again, it must be the same."""

    def restart(self) -> None:
        """A checkpoint was loaded: no exchange was made yet."""

    def hear(self, rule: GradRecovery, bucket: int, step: int, seconds: float) -> None:
        """Tell ``rule`` which of its units of ``step`` arrived, if it wants to know. Waits so long for others to say so."""

    def hear_late(self, rule: GradRecovery, bucket: int, seconds: float) -> None:
        """As :meth:`hear`, for steps that are over."""

    def agree(self, phase: str, bucket: int, replicated: np.ndarray, group: dist.ProcessGroup) -> None:
        """Let the ranks of ``group``, which have copies of the same parameters, lose the same of them.

        ``replicated`` bool[N, units]: where they are, by shard. Drawn losses are the same anyway.
        """

    def lag(self, exchange: Exchange) -> tuple[float, float] | None:
        """The share of the other ranks that miss what this one sends, and how many updates they are late on average.

        In the steady state, where that is known beforehand; else ``None``.
        """
        return None

    def steps(self, phase: str) -> int | None:
        """How many steps, from 0 on, can be foreseen; ``None``: any."""
        return None

    def prepare(self, exchange: Exchange) -> None:
        """``exchange`` comes next."""

    def close(self) -> None:
        """There are no more exchanges."""
