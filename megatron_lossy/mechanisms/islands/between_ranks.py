"""The mean over islands if this process belongs to one of them: the real exchange of :mod:`.mean`.

Every island sends each owner its piece (an all-to-all). Owners add up in the order of the islands, so that the result
is the same as for islands in one process. Then their means are gathered. Both halves run on a thread of their own while
training goes on.

Its twin is :class:`.mean.InMemory`: here an island has one row of the exchange, and learns from NaN what nobody sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...config import LossyConfig
from ...exchange import BucketUnits, Delivery, Exchange, Stream, cut
from ...fingerprint import finite
from ...transport.drawn import draw
from .flags import SYNC_PHASES
from .mean import DTYPES, Mean, elements_of, finite_rows, mean_of, networks_between, owed_to
from .stopping import Stopping
from .world import Meeting

#: Elements behind each piece and each mean. They say whether to stop.
ASIDE = 1
#: Integers as long as elements.
_BITS = {2: torch.int16, 4: torch.int32}


class Carrier(Protocol):
    """Carries one exchange after the other between the islands, in host memory."""

    #: Whether it reports losses.
    observes: bool

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """Send ``pieces`` [M, n], one to each island. Returns the pieces for this island [M, n], and the arrived units.

        The second is bool[M, units or more]; ``None``: all. Elements that did not arrive are zero.
        """

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """[M, n]: ``own`` [n] of every island, and the units that arrived as in :meth:`scatter`."""

    def close(self) -> None:
        """Close the carrier after the last exchange."""


class Reliable:
    """Carries exchanges over torch. Only drawn losses occur."""

    observes = False

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._meeting.all_to_all(pieces), None

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._meeting.all_gather(own), None

    def close(self) -> None:
        pass


class Crossed(NamedTuple):
    """A finished exchange: its mean, and by phase the units that arrived here, bool[M, units]."""

    mean: Mean
    arrived: list[np.ndarray]


class BetweenRanks:
    """The exchanges of island ``island``, which this process belongs to.

    ``carriers``: take turns, each on a thread of its own. ``told``: gets the deliveries at this island. If losses are
    drawn alone, it gets them when an exchange begins, else when its mean is asked for. ``steps``: length of the run, if
    known. ``stopping``: its number crosses behind every piece and every mean. Raises :class:`UsageError` for a channel
    that cannot serve the islands.
    """

    def __init__(
        self,
        config: LossyConfig,
        stream: Stream,
        island: int,
        carriers: Sequence[Carrier],
        steps: int | None,
        told: Callable[[Delivery], None],
        stopping: Stopping | None = None,
    ) -> None:
        self._config, self._stream, self._island = config, stream, island
        self.dtype = DTYPES[config.sync_dtype]
        self._networks = networks_between(config, stream, steps)
        self._told = told
        self._stopping = stopping or Stopping()
        self.carriers = list(carriers)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="megatron-lossy-islands") for _ in carriers]
        self._begun = 0

    def begin(self, step: int, sent: torch.Tensor) -> Waiting:
        """Begin the exchange of ``sent`` float32[1, k], keyed by the iteration ``step``."""
        [own], islands = sent, self._config.islands
        shard = -(-len(own) // islands)
        present = bool(finite([own]))
        pieces = torch.empty(islands, shard + ASIDE, dtype=self.dtype, pin_memory=own.is_cuda)
        if present:
            for piece, part in zip_longest(pieces, own.split(shard), fillvalue=own[:0]):
                piece[: len(part)].copy_(part)
                piece[len(part) :].zero_()
        else:  # values that are not finite tell the others that nothing comes from here
            pieces.fill_(torch.nan)
        [units], _ = cut([shard], [self.dtype.itemsize], self._config.loss_unit, self._config.packet_bytes)
        arrived = [self._arrived(phase, step, units, present) for phase in SYNC_PHASES]
        turn, self._begun = self._begun % len(self.carriers), self._begun + 1
        carrier = self.carriers[turn]
        if not carrier.observes:
            self._tell(step, units, arrived)
        future = self._threads[turn].submit(self._cross, carrier, pieces, units, arrived)
        return Waiting(future, own, partial(self._tell, step, units) if carrier.observes else None)

    def _tell(self, step: int, units: BucketUnits, arrived: Sequence[np.ndarray | None]) -> None:
        islands, here = range(self._config.islands), [self._island]
        for phase, one in zip(SYNC_PHASES, arrived, strict=True):
            if one is not None:
                exchange = Exchange(phase, self._stream, step)
                self._told(Delivery(exchange, islands, here, one[None], [units]))

    def _arrived(self, phase: str, step: int, units: BucketUnits, present: bool) -> np.ndarray | None:
        """bool[M, units]: the units that the draw delivers here; ``None``: everything."""
        network, exchange = self._networks[phase], Exchange(phase, self._stream, step)
        if network.lossless and present:
            return None
        islands, here = range(self._config.islands), [self._island]
        arrived = draw(network, exchange, islands, here, units.count)[0].copy()
        if not present:
            arrived[:] = False
        return arrived

    def _cross(
        self, carrier: Carrier, pieces: torch.Tensor, units: BucketUnits, drawn: Sequence[np.ndarray | None]
    ) -> Crossed:
        """Make both halves of the exchange, on a thread. ``pieces`` [M, shard + ASIDE]."""
        self._say(pieces)
        received, arrived = carrier.scatter(pieces)
        rows = self._heard(received, units, drawn[0], arrived)
        reduced = _complete(rows, units, drawn[0], arrived)
        here = None if reduced.all() else elements_of(reduced[None], units, rows.device)
        exact = mean_of(rows[:, None], here)[0]
        mean = exact.to(self.dtype)
        averaged = reduced.any(axis=0)
        if not averaged.all():  # elements without a sender have no mean; NaN tells the others
            mean.masked_fill_(~elements_of(averaged[None, None], units, mean.device)[0, 0], torch.nan)
        sent = torch.cat([mean, mean.new_zeros(ASIDE)])
        self._say(sent)
        gathered, arrived = carrier.gather(sent)
        values = self._heard(gathered, units, drawn[1], arrived)
        complete = _complete(values, units, drawn[1], arrived)
        lossless = complete.all() and drawn[0] is None and drawn[1] is None
        back = None if lossless else elements_of(complete[None], units, values.device)[0].reshape(-1)
        owed = None
        if self.dtype != torch.float32:
            owed = owed_to([self._island], (exact - mean.float())[None], self._config.islands)
        return Crossed(Mean(values.reshape(-1), back, owed), [reduced, complete])

    def _say(self, rows: torch.Tensor) -> None:
        """Put the signal to stop behind each of ``rows``, as bits."""
        rows.view(_BITS[rows.element_size()])[..., -1] = self._stopping.number

    def _heard(
        self, rows: torch.Tensor, units: BucketUnits, drawn: np.ndarray | None, arrived: np.ndarray | None
    ) -> torch.Tensor:
        """``rows`` [M, shard] in float32, without the signals to stop behind them.

        A signal counts only if it arrived: with the last elements, or in a unit behind them.
        """
        said = rows.view(_BITS[rows.element_size()])[:, -1].numpy()
        if drawn is not None:
            said = said * drawn[:, -1]
        if arrived is not None:
            said = said * arrived[:, units.shard // units.elements]
        self._stopping.hear(int(said.max()))
        return rows[:, : units.shard].float()

    def close(self) -> None:
        """End the exchanges and close the carriers."""
        for thread in self._threads:
            thread.shutdown()  # exchanges that all islands have begun come to their end
        for carrier in self.carriers:
            carrier.close()


def _complete(
    rows: torch.Tensor, units: BucketUnits, drawn: np.ndarray | None, arrived: np.ndarray | None
) -> np.ndarray:
    """bool[M, units]: the units of ``rows`` [M, shard] that arrived and count; only finite units count."""
    finite = finite_rows(rows)
    result = np.repeat(finite[:, None], units.count, axis=1)
    for row in np.flatnonzero(~finite):
        padded = rows.new_zeros(units.count * units.elements)
        padded[: units.shard] = rows[row]
        result[row] = padded.view(units.count, -1).isfinite().all(dim=1).cpu().numpy()
    for known in (drawn, arrived):
        result = result if known is None else result & known[:, : units.count]
    return result


class Waiting:
    """An exchange under way on a thread. ``own`` [k]: the vector of this island.

    ``tell``: gets the units that arrived, or is ``None``.
    """

    def __init__(
        self, future: Future[Crossed], own: torch.Tensor, tell: Callable[[list[np.ndarray]], None] | None
    ) -> None:
        self._future, self._own, self._tell = future, own, tell
        self._mean: Mean | None = None

    def wait(self) -> Mean:
        """The result of the exchange, which is kept. Raises its errors: another island is gone, for example."""
        if self._mean is None:
            (values, arrived, owed), crossed = self._future.result()
            if self._tell is not None:
                self._tell(crossed)
            count, device = len(self._own), self._own.device
            if arrived is not None:
                arrived = arrived[None, :count].to(device)
            self._mean = Mean(values[:count].to(device), arrived, None if owed is None else owed[:, :count].to(device))
        return self._mean
