"""Wires whose losses are drawn: the delivery of an exchange is known before it is made."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from ..base.exchange import BucketUnits, Delivery, Exchange, Lost, Stream, units_of
from ..recovery import Gradients, GradRecovery, Parameters, Stale
from .base import Transfer, Wire
from .coded import Coded
from .network import Network

#: Draws of at least this many units are made ahead of time, on another thread.
_AHEAD = 2**17
#: The networks of both phases: they decide the losses between the ranks of the full group.
Networks = dict[str, Network]


class Latest:
    """Keeps a value for the latest two exchanges of each phase: a draw, which could be repeated, or an observation."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[Exchange, Any]]] = {}

    def get(self, exchange: Exchange) -> Any:
        """The value that was :meth:`put` for ``exchange``; ``None`` if there is none."""
        return next((value for known, value in self._kept.get(exchange.phase, ()) if known == exchange), None)

    def put(self, exchange: Exchange, value: Any) -> None:
        """Keep ``value`` for ``exchange``. It replaces the value of the same exchange, or else the oldest value."""
        kept = [item for item in self._kept.get(exchange.phase, ()) if item[0] != exchange]
        self._kept[exchange.phase] = [*kept[-1:], (exchange, value)]


class DrawnWire(Wire):
    """Runs the caller's collective. The rules have removed the units that will not arrive from the buffer."""

    def __init__(
        self,
        networks: Networks,
        stream: Stream,
        members: Sequence[int],
        rank: int,
        cut: dict[str, Sequence[BucketUnits]],
        coded: Mapping[str, Coded] | None = None,
    ) -> None:
        super().__init__(stream, members, rank, cut, coded)
        self.networks = networks

    def lossless(self, phase: str) -> bool:
        network = self.networks[phase]
        if self.size == 1:
            return network.lossless or not network.lossy_self
        return network.lossless and phase not in self.coded

    @abstractmethod
    def foresee(self, exchange: Exchange) -> Delivery:
        """The delivery at this rank. For gradients it includes the units of this rank that others get."""

    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        delivery = self.foresee(x.exchange)
        x = self._looking_ahead(x, rule.units)
        if "grad" in self.coded:
            x = replace(x, rounding=partial(self.coded["grad"].round_gradients, x.exchange, x.bucket))
        with torch.no_grad():
            kept = rule.before(x.buffer, delivery.lost_there(rule.units), delivery, x)

        def arrived() -> Delivery:
            made = self._made(delivery)
            rule.after(x.output, made, kept, x)
            return made

        return Transfer(x.collective(), arrived)

    def all_gather(self, x: Parameters, rule: Stale) -> Transfer:
        delivery = self.foresee(x.exchange)
        with torch.no_grad():
            stale, own = rule.put_aside(x.buffer, delivery), rule.send(x)

        def arrived() -> Delivery:
            rule.put_back(x.buffer, delivery, stale)
            rule.sent(x, own, delivery)
            return delivery

        return Transfer(x.collective(), arrived)

    def note_all_reduce(self, x: Callable[[], Gradients], rule: GradRecovery) -> None:
        sent, me = self._looking_ahead(x(), rule.units), self.members[self.rank : self.rank + 1]
        everything = np.ones((1, self.size, self.count["grad"]), dtype=bool)
        delivery = Delivery(sent.exchange, self.members, me, everything, self.cut["grad"], everything[0])
        rule.before(sent.buffer, delivery.lost_there(rule.units), delivery, sent)

    def _made(self, delivery: Delivery) -> Delivery:
        """The delivery of an exchange after it was made. ``delivery``: the delivery that was foreseen."""
        return delivery

    def _looking_ahead(self, x: Gradients, units: BucketUnits) -> Gradients:
        """``x`` with a function that returns the losses of the next step's exchange, if it comes next."""
        if not x.gapless:
            return x
        exchange, steps = replace(x.exchange, step=x.exchange.step + 1), self.steps(x.exchange.phase)

        def coming() -> Lost | None:
            # Beyond the end of a trace nothing is lost; such a step is refused when it comes.
            over = steps is not None and exchange.step >= steps
            return None if over else self._lost(self.foresee(exchange), units)

        return replace(x, coming=coming)

    def _lost(self, delivery: Delivery, units: BucketUnits) -> Lost:
        """The units that a rule removes here."""
        return delivery.lost_there(units)

    def lag(self, exchange: Exchange) -> tuple[float, float] | None:
        network, me = self.networks[exchange.phase], self.members[self.rank]
        return network.lag(exchange, me, self.members, self.count[exchange.phase])

    def steps(self, phase: str) -> int | None:
        return self.networks[phase].channel.steps(phase, self.stream)


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

    def _remember(self, delivery: Delivery) -> None:
        self._latest.put(delivery.exchange, delivery)

    def restart(self) -> None:
        self._latest = Latest()

    def prepare(self, exchange: Exchange) -> None:
        """Start drawing on another thread if it takes long."""
        phase = exchange.phase
        if self.lossless(phase) or self.count[phase] * self.size < _AHEAD or self._latest.get(exchange):
            return
        if CollectiveWire._thread is None:
            CollectiveWire._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-lossy-draws")
        self._latest.put(exchange, CollectiveWire._thread.submit(self._draw_ahead, exchange))

    def _draw_ahead(self, exchange: Exchange) -> Delivery:
        delivery = self._draw(exchange)
        self._work_out(delivery)
        return delivery

    def _work_out(self, delivery: Delivery) -> None:
        """Compute the values that recovery will ask for. This may take longer than the draw."""
        for units in delivery.cut:
            grads = delivery.exchange.phase == "grad"
            if grads:
                delivery.survivors(units)
            lost = self._lost(delivery, units) if grads else delivery.lost_here(units)
            for numbers, _ in units.parts:
                lost.places(numbers)

    def _draw(self, exchange: Exchange) -> Delivery:
        network, count = self.networks[exchange.phase], self.count[exchange.phase]
        if exchange.phase == "grad":
            arrived, sent = draw_both_ways(network, exchange, self.members, self.rank, count)
        else:
            arrived, sent = draw(network, exchange, self.members, [self.members[self.rank]], count), None
        return self._delivery(exchange, arrived, sent)

    def _delivery(
        self, exchange: Exchange, arrived: np.ndarray, sent: np.ndarray | Callable[[], np.ndarray] | None
    ) -> Delivery:
        """The delivery at this rank, from the arguments of :class:`Delivery`."""
        me = self.members[self.rank : self.rank + 1]
        return Delivery(exchange, self.members, me, arrived, self.cut[exchange.phase], sent)


def check_links(
    networks: Networks, stream: Stream, cut: dict[str, Sequence[BucketUnits]], size: int, steps: int | None
) -> None:
    """Raise :class:`UsageError` if a channel cannot serve a group of ``size`` ranks for ``steps`` steps."""
    for phase, network in networks.items():
        if not network.lossless and (size > 1 or network.lossy_self):
            network.channel.check(phase, stream, network.size, units_of(cut[phase]), steps)


def draw(
    network: Network,
    exchange: Exchange,
    members: Sequence[int],
    receivers: Sequence[int],
    units: int,
) -> np.ndarray:
    """bool[R, S, units], read-only: units of ``members`` that arrive at ``receivers``, ranks of the full group."""
    sources, destinations = np.tile(members, len(receivers)), np.repeat(receivers, len(members))
    arrived = network.delivered_links(exchange, sources, destinations, units)
    arrived = arrived.reshape(len(receivers), len(members), -1)
    arrived.flags.writeable = False
    return arrived


def draw_sent(network: Network, exchange: Exchange, members: Sequence[int], rank: int, units: int) -> np.ndarray:
    """bool[N, units], read-only: the units of ``members[rank]`` that arrive at each of ``members``."""
    others = np.array(members)
    sent = network.delivered_links(exchange, np.full_like(others, members[rank]), others, units)
    sent.flags.writeable = False
    return sent


def draw_both_ways(
    network: Network, exchange: Exchange, members: Sequence[int], rank: int, units: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns :func:`draw` for the receiver ``members[rank]``, and :func:`draw_sent`, from one draw."""
    others = np.array(members)
    me = np.full_like(others, members[rank])
    links = network.delivered_links(exchange, np.concatenate([others, me]), np.concatenate([me, others]), units)
    links.flags.writeable = False
    return links[None, : len(others)], links[len(others) :]
