"""Reports on a network: metrics, a line for each problem that a user can mend, and a table at the end of a run."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch.distributed as dist

from ..run.monitor.observer import Look, Observer
from ..run.monitor.window import Window

logger = logging.getLogger(__name__)

_EVERY = 10  # iterations between looks at the counters
_MUCH = 0.2


class Carrier(Protocol):
    """An end of a link over a network: its name, and its rank on that link."""

    name: str
    rank: int

    def counters(self) -> dict[int, dict[str, int]]: ...

    def rates(self) -> dict[int, dict[str, float]]: ...


class NetworkMonitor(Observer):
    """Counts messages over all ranks. ``transports``: returns those of this process, once there are any.

    ``rank``: the number of this process, if it is not its rank: every island has a rank 0.
    """

    #: The network in names, the counters that become metrics, and those of the table.
    network: ClassVar[str]
    columns: ClassVar[Sequence[str]]
    table: ClassVar[Sequence[str]]

    def __init__(self, transports: Callable[[], Sequence[Carrier]], rank: int | None = None) -> None:
        self._transports = transports
        self._called = rank
        self._window = Window(self.columns)
        self._counted: Counter[str] = Counter()
        self._said: set[str] = set()
        self._units: Counter[str] = Counter()  # of this iteration
        self._much = 0

    @abstractmethod
    def totals(self, peers: Sequence[Mapping[str, int]]) -> Counter[str]:
        """The columns of this process, from the counters of its peers and of its sockets."""

    @abstractmethod
    def advice(self, now: Mapping[str, int], much_loss_since: int) -> dict[str, str]:
        """Lines of advice, by the name of the reason. ``much_loss_since``: iterations in a row with much loss."""

    def _now(self) -> Counter[str]:
        return self.totals([peer for one in self._transports() for peer in one.counters().values()])

    def observe(self, delivery) -> None:
        arrived = delivery.arrived[delivery.crossing]
        self._units["all"] += arrived.size
        self._units["arrived"] += int(arrived.sum())

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        lost = self._units["all"] - self._units["arrived"]
        self._much = self._much + 1 if lost > _MUCH * max(self._units["all"], 1) else 0
        self._units.clear()
        if iteration % _EVERY:
            return
        for reason, line in self.advice(self._now(), self._much).items():
            if reason not in self._said:
                self._said.add(reason)
                logger.warning("rank %d: %s (said once)", self._rank(), line)

    def metrics(self) -> dict[str, float]:
        now = self._now()
        self._window.add(**{column: now[column] - self._counted[column] for column in self.columns})
        self._counted = now
        return {f"{self.network} {column.replace('_', ' ')}": value for column, value in self._window.close().items()}

    def close(self) -> None:
        for line in self.summary():
            print(line, flush=True)

    def _rank(self) -> int:
        if self._called is not None:
            return self._called
        return dist.get_rank() if dist.is_initialized() else 0

    def summary(self) -> list[str]:
        """Lines with the totals of this rank; on the first rank also a line for each peer of each stream."""
        lines, total, rank = [], Counter(), self._rank()
        for transport in self._transports():
            rates = transport.rates()
            for peer, counts in transport.counters().items():
                total.update(counts)
                line = f"{self.network}, {transport.name}, ranks {transport.rank} and {peer}: {self._words(counts)}"
                if peer in rates:
                    line += f"; {rates[peer]['rate'] / 1e6:.1f} MB/s, round trip {1e3 * rates[peer]['rtt_min']:.1f} ms"
                lines.append(line)
        if not total:
            return []
        return [*(lines if rank == 0 else []), f"{self.network}, rank {rank}, all: {self._words(total)}"]

    def _words(self, counts: Mapping[str, int]) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {counts.get(name, 0):,}" for name in self.table)
