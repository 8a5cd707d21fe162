"""Somebody's reliable collective, minus what a channel drew. Nothing extra is communicated."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from ..exchange import Delivery, Exchange, units_of
from .drawn import DrawnWire, Latest, draw, draw_sent

#: Draws of at least this many units are made ahead of time, on another thread.
_AHEAD = 2**17


class CollectiveWire(DrawnWire):
    """One rank's view of the losses between the ranks of its group."""

    _thread: ThreadPoolExecutor | None = None

    @cached_property
    def _latest(self) -> Latest:
        return Latest()

    def foresee(self, exchange: Exchange) -> Delivery:
        known = self._latest.get(exchange)
        if isinstance(known, Delivery):
            return known
        delivery = known.result() if isinstance(known, Future) else self._draw(exchange)
        self._latest.put(exchange, delivery)
        return delivery

    def restore(self, delivery: Delivery) -> None:
        self._latest.put(delivery.exchange, delivery)

    def restart(self) -> None:
        self._latest = Latest()

    def prepare(self, exchange: Exchange) -> None:
        """Start drawing on another thread if it is much work."""
        phase = exchange.phase
        if self.lossless(phase) or units_of(self.cut[phase]) * self.size < _AHEAD or self._latest.get(exchange):
            return
        if CollectiveWire._thread is None:
            CollectiveWire._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-lossy-draws")
        self._latest.put(exchange, CollectiveWire._thread.submit(self._draw_ahead, exchange))

    def _draw_ahead(self, exchange: Exchange) -> Delivery:
        delivery = self._draw(exchange)
        self._work_out(delivery)
        return delivery

    def _work_out(self, delivery: Delivery) -> None:
        """Find what recovery will ask for, which may take longer than the draw."""
        for units in delivery.cut:
            grads = delivery.exchange.phase == "grad"
            if grads:
                delivery.survivors(units)
            lost = self._lost(delivery, units) if grads else delivery.lost_here(units)
            for numbers, _ in units.parts:
                lost.places(numbers)

    def _draw(self, exchange: Exchange) -> Delivery:
        me, network, cut = self.members[self.rank], self.networks[exchange.phase], self.cut[exchange.phase]
        arrived = draw(network, exchange, self.members, [me], cut)
        return Delivery(
            exchange, self.members, [me], arrived, cut, lambda: draw_sent(network, exchange, me, self.members, cut)
        )
