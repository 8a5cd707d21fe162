"""Somebody's reliable collective, minus what a channel drew. Nothing extra is communicated."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from ..exchange import Delivery, Exchange, units_of
from .drawn import Drawn, Latest, draw, draw_sent

#: Draws of at least this many units are made ahead of time, on another thread.
_AHEAD = 2**17


class CollectiveTransport(Drawn):
    """One rank's view of the losses between the ranks of its group."""

    #: Whether deliveries of gradients say what of this rank's own data arrived, for the rules that remove the rest.
    draws_sent = True
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

    def prepare(self, exchange: Exchange) -> None:
        """Start drawing on another thread if it is much work."""
        phase = exchange.phase
        if self.lossless(phase) or units_of(self.cut[phase]) * self.size < _AHEAD or self._latest.get(exchange):
            return
        if CollectiveTransport._thread is None:
            CollectiveTransport._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-lossy-draws")
        self._latest.put(exchange, CollectiveTransport._thread.submit(self._draw_ahead, exchange))

    def _draw_ahead(self, exchange: Exchange) -> Delivery:
        delivery = self._draw(exchange)
        delivery.prepare()
        return delivery

    def _sends(self, phase: str) -> bool:
        return self.draws_sent and phase == "grad"

    def _draw(self, exchange: Exchange) -> Delivery:
        phase, me = exchange.phase, self.members[self.rank]
        network, cut = self.networks[phase], self.cut[phase]
        sent = draw_sent(network, exchange, me, self.members, cut) if self._sends(phase) else None
        return Delivery(exchange, self.members, [me], draw(network, exchange, self.members, [me], cut), cut, sent)
