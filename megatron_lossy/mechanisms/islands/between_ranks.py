"""The mean over islands if this process belongs to one of them: the real exchange of :mod:`.mean`.

Every island sends each owner its piece (an all-to-all). Owners add up in the order of the islands, so that the result
is the same as for islands in one process. Then their means are gathered. Both halves run on a thread of their own while
training goes on. The carriers are in host memory. On CUDA vectors go there and back through page-locked memory, on a
stream of their own, for which the threads wait; training does not.

Its twin is :class:`megatron_lossy.lab.virtual.island_mean.InMemory`: here an island has one row of the exchange, and
finds NaN for elements without a sender.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from ...base.exchange import BucketUnits, Delivery, Exchange, Stream
from ...base.fetch import PendingArray, aside, is_here, stream_aside
from ...base.fingerprint import finite
from ...config import LossyConfig
from ...recovery.rows import to_device, used_here
from ...transport.base import draw
from .carrying import Carrier
from .flags import SYNC_PHASES
from .mean import Form, Mean, Rest, elements_of, finite_rows, mean_of, networks_between
from .vector import Places

_HOST = torch.device("cpu")
#: Integers as long as elements.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Pieces:
    """``own`` float32[k], which becomes what arrives, in ``islands`` pieces of ``form``.

    If some values are not finite, all pieces are blank, so that the others see that nothing comes from here. ``count``: k. ``shard``,
    ``units``: the elements of a piece. ``here``: whether they were in host memory from the beginning.
    """

    def __init__(self, own: torch.Tensor, islands: int, form: Form) -> None:
        self.count, self.device = len(own), own.device
        self.shard = -(-len(own) // islands)
        self.units = form.cut(self.shard)
        self._dtype = form.dtype
        self.here = is_here(own)
        missing = islands * self.shard - len(own)
        whole = torch.nn.functional.pad(own, (0, missing)) if missing else own
        rows = own.new_empty(islands, form.items(self.units), dtype=form.dtype)
        form.encode(whole.view(islands, self.shard), self.units, rows)
        if not form.exact:
            own.copy_(form.decode(rows, self.units).view(-1)[: len(own)])
        present = finite([own])
        self._present = PendingArray(present)  # before the long copy
        rows.masked_fill_(~present, form.blank)
        if rows.device.type == "cuda":
            stream_aside(rows.device).wait_stream(torch.cuda.current_stream(rows.device))
        with aside(rows.device):
            used_here((rows,))
            self._rows = PendingArray(rows.view(_BITS[rows.element_size()]))  # NumPy has no bfloat16

    @property
    def present(self) -> bool:
        """Whether all values are finite."""
        return bool(self._present.wait())

    @property
    def rows(self) -> torch.Tensor:
        """[M, items], in host memory."""
        return torch.from_numpy(self._rows.wait()).view(self._dtype)


class Task(NamedTuple):
    """An exchange that has begun, for the thread that makes it. ``step``: the iteration before it.

    ``drawn``: by phase bool[senders, units], the units that the draw delivers here; ``None``: everything. ``places``: of the elements, in
    host memory. ``rest``: of this island's means. ``before``: set once the means of the exchange before are rounded, whose rests go into
    these; ``rounded``: once these are.
    """

    step: int
    carrier: Carrier
    pieces: Pieces
    drawn: Sequence[np.ndarray | None]
    places: Places | None
    rest: Rest | None
    before: threading.Event
    rounded: threading.Event

    def arriving(self) -> Sequence[np.ndarray | None]:
        """Return ``drawn``; nothing if nothing comes from here: then nothing counts that comes here, either."""
        if self.pieces.present:
            return self.drawn
        return [np.zeros((len(self.pieces.rows), self.pieces.units.count), dtype=bool)] * len(self.drawn)


class Outcome(NamedTuple):
    """A finished exchange: its mean, and by phase the units that arrived here, bool[senders, units].

    ``brought``: the event, on CUDA, after which the mean is on the device.
    """

    mean: Mean
    brought: torch.cuda.Event | None
    arrived: list[np.ndarray]


class RankExchanges:
    """The exchanges of island ``island``, which this process belongs to.

    ``carrier``: returns that of an exchange by its number; as many as there are lanes cross at once, each on a thread of its own.
    ``told``: gets the deliveries at this island: when an exchange begins, if its arrivals are drawn then, else when its mean is asked
    for, or at :meth:`tell`. ``steps``: length of the run, if known. Raises :class:`UsageError` for a channel that cannot serve islands.
    """

    def __init__(
        self,
        config: LossyConfig,
        stream: Stream,
        island: int,
        carrier: Callable[[int], Carrier],
        steps: int | None,
        told: Callable[[Delivery], None],
    ) -> None:
        self._config, self._stream, self._island = config, stream, island
        self._form = Form(config)
        self.rest = None if self._form.exact else Rest()
        self._networks = networks_between(config, stream, steps)
        self._told, self._carrier = told, carrier
        self._threads = [ThreadPoolExecutor(1, "megatron-lossy-islands") for _ in range(config.lanes)]
        self._rounded = threading.Event()  # the mean of the latest exchange
        self._rounded.set()
        self._untold: Waiting | None = None

    def begin(self, step: int, sent: torch.Tensor, places: Places | None = None) -> Waiting:
        """Begin the exchange of ``sent`` float32[1, k]. See :meth:`.InMemory.begin`."""
        [own] = sent
        exchange = (step + 1) // self._config.sync_interval - 1
        carrier = self._carrier(exchange)
        pieces = Pieces(own, len(carrier.senders), self._form)
        drawn = [self._drawn(phase, step, pieces.units, carrier.senders) for phase in SYNC_PHASES]
        before, self._rounded = self._rounded, threading.Event()
        here = None if places is None else places.on(_HOST)
        task = Task(step, carrier, pieces, drawn, here, self.rest, before, self._rounded)
        future = self._threads[exchange % len(self._threads)].submit(self._run, task)
        if carrier.observes:
            return Waiting(future, own, lambda crossed: self._tell(task, crossed.arrived))
        waiting = Waiting(future, own, lambda _: self._tell(task, task.arriving()))
        if pieces.here:
            waiting.tell()
        self._untold = waiting
        return waiting

    def forget(self, island: int) -> None:
        """Let ``island``, that of this process, begin again, without the rests of exchanges under way."""
        self.rest = None if self.rest is None else Rest()

    def tell(self) -> None:
        """Report the arrivals of the latest exchange, if only the device had them when it began. This waits for the device."""
        if self._untold is not None:
            self._untold.tell()
            self._untold = None

    def _tell(self, task: Task, arrived: Sequence[np.ndarray | None]) -> None:
        owner = task.carrier.place is not None
        for phase, units in zip(SYNC_PHASES, arrived, strict=True):
            if units is not None and (owner or phase != SYNC_PHASES[0]):
                exchange = Exchange(phase, self._stream, task.step)
                self._told(Delivery(exchange, task.carrier.senders, [self._island], units[None], [task.pieces.units]))

    def _drawn(self, phase: str, step: int, units: BucketUnits, senders: Sequence[int]) -> np.ndarray | None:
        """Return bool[senders, units]: the units that the draw delivers here; ``None``: everything."""
        network, exchange = self._networks[phase], Exchange(phase, self._stream, step)
        if network.lossless:
            return None
        [arrived] = draw(network, exchange, senders, [self._island], units.count)
        return arrived.copy()  # torch wants to be able to write

    def _run(self, task: Task) -> Outcome:
        """Make both halves of the exchange, on a thread. The mean goes to the device."""
        try:
            return self._cross(task)
        finally:
            task.rounded.set()  # whatever happened, the next one need not wait
            task.carrier.end()

    def _cross(self, task: Task) -> Outcome:
        carrier, units, device = task.carrier, task.pieces.units, task.pieces.device
        sent, drawn = task.pieces.rows, task.arriving()
        received, arrived = carrier.scatter(sent)
        rows = self._form.decode(received, units)
        reduced = _complete(rows, units, drawn[0], arrived)
        here = None if reduced.all() else elements_of(reduced[None], units, rows.device)
        exact = mean_of(rows[:, None], here)[0]
        gathered, arrived = carrier.gather(self._message(task, exact, reduced.any(axis=0)))
        values = self._form.decode(gathered, units)
        complete = _complete(values, units, drawn[1], arrived)
        lossless = complete.all() and drawn[0] is None and drawn[1] is None
        with aside(device):
            # As units: the device makes elements of them.
            back = None if lossless else elements_of(complete[None], units, device)[0].reshape(-1)
            mine = Mean(to_device(values.reshape(-1), device), back)
        brought = stream_aside(device).record_event() if device.type == "cuda" else None
        return Outcome(mine, brought, [reduced, complete])

    def _message(self, task: Task, exact: torch.Tensor, averaged: np.ndarray) -> torch.Tensor:
        """Return the message [items] of the own means ``exact`` [shard]. ``averaged`` bool[units]."""
        units, place = task.pieces.units, task.carrier.place
        sent = torch.empty(self._form.items(units), dtype=self._form.dtype)

        def crosses(values: torch.Tensor) -> torch.Tensor:
            self._form.encode(values[None], units, sent[None])
            return self._form.decode(sent[None], units)[0]

        there = None if averaged.all() else elements_of(averaged[None, None], units, exact.device)[0, 0]
        if task.rest is not None and place is not None:
            task.before.wait()
            task.rest.crossing(0, place, task.places, task.pieces.count, exact, there, crosses)
            task.rounded.set()
        else:  # elements without a sender have no mean; NaN marks them for the others
            crosses(exact if there is None else exact.masked_fill(~there, torch.nan))
        return sent

    def close(self) -> None:
        """End the exchanges: those that all islands have begun come to their end."""
        for thread in self._threads:
            thread.shutdown()


def _complete(
    rows: torch.Tensor, units: BucketUnits, drawn: np.ndarray | None, arrived: np.ndarray | None
) -> np.ndarray:
    """Return bool[M, units]: the units of ``rows`` [M, shard] that arrived and count; only finite units count."""
    whole = finite_rows(rows)
    result = np.repeat(whole[:, None], units.count, axis=1)
    for row in np.flatnonzero(~whole):
        padded = rows.new_zeros(units.count * units.elements)
        padded[: units.shard] = rows[row]
        result[row] = padded.view(units.count, -1).isfinite().all(dim=1).cpu().numpy()
    for known in (drawn, arrived):
        result = result if known is None else result & known[:, : units.count]
    return result


class Waiting:
    """An exchange under way on a thread. ``own`` [k]: the vector of this island.

    ``tell``: reports arrivals; its argument is the finished exchange, or ``None`` if it is not finished.
    """

    def __init__(self, future: Future[Outcome], own: torch.Tensor, tell: Callable[[Outcome | None], None]) -> None:
        self._future, self._own = future, own
        self._tell: Callable[[Outcome | None], None] | None = tell
        self._mean: Mean | None = None

    def tell(self, crossed: Outcome | None = None) -> None:
        """Report the arrivals, past or drawn; once."""
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(crossed)

    def wait(self) -> Mean:
        """Return the result of the exchange, which is kept. Raise its errors: another island is gone, for example."""
        if self._mean is None:
            crossed = self._future.result()
            self.tell(crossed)
            (values, arrived), count = crossed.mean, len(self._own)
            if crossed.brought is not None:
                crossed.brought.wait()
                used_here(tensor for tensor in crossed.mean if tensor is not None)
            self._mean = Mean(values[:count], None if arrived is None else arrived[None, :count])
        return self._mean
