"""The mean over islands if this process belongs to one of them: the real exchange of :mod:`.mean`.

Every island sends each owner its piece (an all-to-all). Owners add up in the order of the islands, so that the result
is the same as for islands in one process. Then their means are gathered. Both halves run on a thread of their own while
training goes on. The carriers are in host memory. On CUDA vectors go there and back through page-locked memory, on their
own stream. The threads wait for that stream, and training does not.

Its twin is :class:`megatron_lossy.lab.virtual.island_mean.InMemory`: here an island has one row of the exchange, and
finds NaN for elements without a sender.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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

    If some values are not finite, all pieces are blank, so that the others see that nothing comes from here. ``count``: k, flat.
    ``shard``, ``units``: the elements of a piece.
    """

    def __init__(self, own: torch.Tensor, islands: int, form: Form) -> None:
        self.count, self.device = len(own), own.device
        self.shard = form.share(len(own), islands)
        self.units = form.cut(self.shard)
        self._dtype = form.dtype
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

    def forget(self) -> None:
        """Keep the rows no longer: they have left."""
        del self._rows


class RankExchange:
    """One exchange, whose halves :meth:`run` makes, and its mean. ``of``: the exchanges that it is one of.

    ``step``: the iteration before it. ``own`` [k]: the vector of this island, of the elements at ``places``. :attr:`rounded`: set once
    the means are rounded, whose rests go into those of the next exchange.
    """

    #: The result of :meth:`run`.
    future: Future[tuple[Mean, torch.cuda.Event | None, list[np.ndarray]]]

    def __init__(
        self, of: RankExchanges, step: int, carrier: Carrier, own: torch.Tensor, places: Places | None
    ) -> None:
        self._of, self._step, self._carrier, self._own = of, step, carrier, own
        self._pieces = Pieces(own, len(carrier.senders), of.form)
        #: By phase bool[senders, units], the units that the draw delivers here; ``None``: everything.
        self._drawn = [self._draw(phase) for phase in SYNC_PHASES]
        self._places = None if places is None else places.on(_HOST)
        self._rest, self._before, self.rounded = of.rest, of.rounded, threading.Event()
        self._told = False
        self._mean: Mean | None = None

    def _draw(self, phase: str) -> np.ndarray | None:
        network, exchange = self._of.networks[phase], Exchange(phase, self._of.stream, self._step)
        if network.lossless:
            return None
        [arrived] = draw(network, exchange, self._carrier.senders, [self._of.island], self._pieces.units.count)
        return arrived.copy()  # torch wants to be able to write

    def _arriving(self) -> Sequence[np.ndarray | None]:
        """Return the drawn units; nothing if nothing comes from here: then nothing counts that comes here, either."""
        if self._pieces.present:
            return self._drawn
        return [np.zeros((len(self._carrier.senders), self._pieces.units.count), dtype=bool)] * len(self._drawn)

    def tell(self) -> None:
        """Report the arrivals, past or drawn; once."""
        if self._told:
            return
        self._told = True
        arrived = self.future.result()[2] if self._carrier.observes else self._arriving()
        for phase, units in zip(SYNC_PHASES, arrived, strict=True):
            if units is not None and (self._carrier.place is not None or phase != SYNC_PHASES[0]):
                exchange = Exchange(phase, self._of.stream, self._step)
                cut = [self._pieces.units]
                self._of.told(Delivery(exchange, self._carrier.senders, [self._of.island], units[None], cut))

    def wait(self) -> Mean:
        """Return the result, which is kept. Raise the errors of the exchange: another island is gone, for example."""
        if self._mean is None:
            (values, arrived), brought, _ = self.future.result()
            self.tell()
            if brought is not None:
                brought.wait()
                used_here(tensor for tensor in (values, arrived) if tensor is not None)
            count = len(self._own)
            self._mean = Mean(values[:count], None if arrived is None else arrived[None, :count])
        return self._mean

    # --- on the thread -----------------------------------------------------------------------------------------------

    def run(self) -> tuple[Mean, torch.cuda.Event | None, list[np.ndarray]]:
        """Make both halves. Return the mean, the event on CUDA after which it is on the device, and by phase the units that arrived."""
        try:
            return self._cross()
        finally:
            self.rounded.set()  # whatever happened, the next one need not wait
            self._pieces.forget()
            self._carrier.end()

    def _cross(self) -> tuple[Mean, torch.cuda.Event | None, list[np.ndarray]]:
        form, units, device = self._of.form, self._pieces.units, self._pieces.device
        sent, drawn = self._pieces.rows, self._arriving()
        received, arrived = self._carrier.scatter(sent)
        rows = form.decode(received, units)
        reduced = _complete(rows, units, drawn[0], arrived)
        here = None if reduced.all() else elements_of(reduced[None], units, rows.device)
        exact = mean_of(rows[:, None], here)[0]
        gathered, arrived = self._carrier.gather(self._message(exact, reduced.any(axis=0)))
        values = form.decode(gathered, units)
        complete = _complete(values, units, drawn[1], arrived)
        lossless = complete.all() and drawn[0] is None and drawn[1] is None
        with aside(device):
            # As units: the device makes elements of them.
            back = None if lossless else elements_of(complete[None], units, device)[0].reshape(-1)
            mine = Mean(to_device(values.reshape(-1), device), back)
        brought = stream_aside(device).record_event() if device.type == "cuda" else None
        return mine, brought, [reduced, complete]

    def _message(self, exact: torch.Tensor, averaged: np.ndarray) -> torch.Tensor:
        """Return the message [items] of the own means ``exact`` [shard]. ``averaged`` bool[units]."""
        form, units, place = self._of.form, self._pieces.units, self._carrier.place
        sent = torch.empty(form.items(units), dtype=form.dtype)

        def crosses(values: torch.Tensor) -> torch.Tensor:
            form.encode(values[None], units, sent[None])
            return form.decode(sent[None], units)[0]

        there = None if averaged.all() else elements_of(averaged[None, None], units, exact.device)[0, 0]
        if self._rest is not None and place is not None:
            self._before.wait()
            self._rest.crossing(0, place, self._places, self._pieces.count, exact, there, crosses)
            self.rounded.set()
        else:  # elements without a sender have no mean; NaN marks them for the others
            crosses(exact if there is None else exact.masked_fill(~there, torch.nan))
        return sent


class RankExchanges:
    """The exchanges of island ``island``, which this process belongs to.

    ``carrier``: returns the carrier of an exchange, given its number. As many exchanges as there are lanes run at once, on a thread each.
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
        self.stream, self.island, self.told = stream, island, told
        self.form = Form(config)
        self.rest = None if self.form.exact else Rest(self.form)
        self.networks = networks_between(config, stream, steps)
        self._interval, self._carrier = config.sync_interval, carrier
        self._threads = [ThreadPoolExecutor(1, "megatron-lossy-islands") for _ in range(config.lanes)]
        self.rounded = threading.Event()  # the mean of the latest exchange
        self.rounded.set()
        self._untold: RankExchange | None = None

    def begin(self, step: int, sent: torch.Tensor, places: Places | None = None) -> RankExchange:
        """Begin the exchange of ``sent`` float32[1, k]. See :meth:`.InMemory.begin`."""
        exchange = (step + 1) // self._interval - 1
        carrier = self._carrier(exchange)
        crossing = RankExchange(self, step, carrier, sent[0], places)
        self.rounded = crossing.rounded
        crossing.future = self._threads[exchange % len(self._threads)].submit(crossing.run)
        if not carrier.observes:
            self._untold = crossing
            if is_here(sent):
                self.tell()
        return crossing

    def forget(self, island: int) -> None:
        """Let ``island``, that of this process, begin again, without the rests of exchanges under way."""
        self.rest = None if self.rest is None else Rest(self.form)

    def tell(self) -> None:
        """Report the arrivals of the latest exchange, if only the device had them when it began. This waits for the device."""
        if self._untold is not None:
            self._untold.tell()
            self._untold = None

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
