"""How an exchange crosses. A transport begins it, and waiting for it returns its delivery.

A transport knows how the buckets of one group are cut, and whether a phase can lose anything. It may know a delivery
before the exchange, as drawn losses are known, or only after it, as on a real network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ..exchange import BucketUnits, Delivery, Exchange, Stream

#: Runs somebody's collective and returns its handle, or ``None`` if it has completed or somebody else waits for it.
Collective = Callable[[], Any]


class Transfer:
    """An exchange under way. :meth:`wait` completes it, recovery included; it may be called again.

    ``work``: the handle of what carries the exchange, or ``None`` if nobody has to wait for it here. ``deliver``:
    called when it has arrived, returns what :meth:`wait` does. ``pieces`` [N * shard]: where each source's gradients
    arrive, of a transport that has them. Other attributes are those of ``work``, until then.
    """

    def __init__(self, work: Any, deliver: Callable[[], Any], pieces: torch.Tensor | None = None) -> None:
        self._work = work
        self._deliver = deliver
        self.pieces = pieces
        self._then: list[Callable[[Any], None]] = []
        self._arrived = self._done = False
        self._result: Any = None

    @property
    def has_work(self) -> bool:
        """Whether there is a handle to wait for."""
        return self._work is not None

    def then(self, act: Callable[[Any], None]) -> Transfer:
        """Call ``act`` with the delivery when the exchange has arrived, after what was asked for before."""
        self._then.append(act)
        return self

    def wait(self) -> Any:
        """Wait until the exchange has arrived and recovery is done; returns its :class:`Delivery`."""
        # Only once: every wait of gloo's reduce-scatter copies the unrecovered result into the output again.
        if not self._arrived and not self._done:
            if self._work is not None:
                self._work.wait()
            self._arrived = True
        return self.complete()

    def complete(self) -> Any:
        """As :meth:`wait`, where somebody has waited already for what carries the exchange."""
        if not self._done:
            self._result = self._deliver()
            with torch.no_grad():
                for act in self._then:
                    act(self._result)
            self._done = True
            # They hold buffers, and whoever keeps a transfer need not keep those.
            self._work, self._deliver, self._then, self.pieces = None, None, [], None
        return self._result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_work"], name)


class Transport(ABC):
    """How the exchanges of one stream cross, for one rank of a group.

    Args:
        stream: what the buckets belong to.
        members: the group's ranks within the full group (all of it with one optimizer instance).
        rank: this process's rank in the group.
        cut: by phase, how each bucket is cut into units.
    """

    #: Whether owners get the pieces of all sources and add them up, and whether units of a replica that do not arrive
    #: are not written. Else it runs a collective, from which the rules have removed what will not arrive.
    in_pieces: ClassVar[bool] = False
    #: Whether a delivery is known only after the exchange.
    observed: ClassVar[bool] = False

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
    def begin(
        self,
        exchange: Exchange,
        bucket: int,
        buffer: torch.Tensor,
        collective: Collective,
        sent: torch.Tensor | None = None,
    ) -> Transfer:
        """Begin the exchange of one bucket: ``buffer`` [N * shard], of parameters ``sent`` [shard] to all.

        ``collective``: what would have carried all of it, reliably. Neither may change until the exchange is over.
        """

    def restore(self, delivery: Delivery) -> None:
        """``delivery`` was made before the checkpoint was saved that is loaded now. Made again, it must be the same."""

    def recovered(self, exchange: Exchange, units: BucketUnits, lost: np.ndarray) -> None:
        """Of the bucket cut into ``units``, which this rank is about to send, ``lost`` bool[N, count] will be lost for good."""

    def require(self, exchange: Exchange, bucket: int, must: np.ndarray) -> None:
        """Of ``bucket``, which this rank is about to send, ``must`` bool[N, count] has to arrive. Of observed deliveries."""

    def reports(self, exchange: Exchange, bucket: int, seconds: float) -> np.ndarray | None:
        """bool[N, count]: what of this rank's ``bucket`` did not arrive at others; ``None``: not all of them have said so.

        Waits as long. Of observed deliveries; every exchange that :meth:`require` was called for must be asked for.
        """
        return None

    def foresee(self, exchange: Exchange) -> Delivery | None:
        """The delivery of ``exchange``, if it is known whether or not the exchange was made.

        Raises :class:`UsageError` where a recorded run that is replayed does not go so far.
        """
        return None

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
