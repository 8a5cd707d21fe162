"""Wires: the base class, and those whose losses are drawn. A wire carries an exchange, and calls the verbs of its rule.

A wire has the cut of the buckets of one group, and the phases that can lose data. A wire with drawn losses computes
a delivery before the exchange; a wire over a real network reports it afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.exchange import BucketUnits, Delivery, Exchange, Lost, Stream, units_of
from ..config import LossyConfig
from ..recovery import Gradients, GradRecovery, Parameters, Stale
from ..recovery.base import nothing
from .coded import CodedBuckets
from .network import channel_of

#: Draws of at least this many units are made ahead of time, on another thread.
_AHEAD = 2**17


class Transfer:
    """An exchange under way. :meth:`wait` completes it, recovery included; it may be called again.

    ``work``: the handle of the collective that carries the exchange, or ``None`` if it needs no wait here.
    ``deliver``: completes the exchange once its data has arrived, and returns the result of :meth:`wait`. Until then
    all other attributes are those of ``work``. ``apart``: no coalescing context waits for the collective.
    """

    def __init__(self, work: Any, deliver: Callable[[], Any] = nothing, apart: bool = False) -> None:
        self.work, self.apart = work, apart
        self._deliver = deliver
        self._then: list[Callable[[Any], None]] = []
        self._done = False
        self._result: Any = None

    def then(self, act: Callable[[Any], None]) -> Transfer:
        """Call ``act`` with the delivery when the exchange is complete, after all earlier requests."""
        self._then.append(act)
        return self

    def wait(self) -> Any:
        """Wait until the exchange has arrived and recovery is done; returns its :class:`Delivery`."""
        # A complete exchange has no handle: each wait of gloo's reduce-scatter copies the unrecovered result again.
        if self.work is not None:
            self.work.wait()
        return self.complete()

    def complete(self) -> Any:
        """Complete the exchange as :meth:`wait` does, for callers that have waited already for the handle."""
        if not self._done:
            with torch.no_grad():
                self._result = self._deliver()
                for act in self._then:
                    act(self._result)
            self._done = True
            # These hold buffers, and a kept transfer should not keep them.
            self.work, self._deliver, self._then = None, nothing, []
        return self._result

    def __getattr__(self, name: str) -> Any:
        if "work" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.__dict__["work"], name)


class Network:
    """A channel with the rules that hold for all, between the ranks of a full data-parallel (or expert-data) group.

    The own shard never crosses; links inside a node may be reliable (docs/semantics.md, Links). ``nodes`` gives the
    node of every rank of the full group; needed for ``--lossy-links inter-node``.
    """

    def __init__(self, config: LossyConfig, phase: str, size: int, nodes: Sequence[int] | None = None) -> None:
        self.phase = phase
        self.size = size
        self.channel = channel_of(config, phase)
        self.lossless = config.phase(phase).lossless
        self.lossy_self = config.lossy_self and phase == "grad"
        self.nodes = np.array(nodes) if config.ranks_of_node is not None else None
        if self.nodes is not None and len(set(self.nodes.tolist())) == 1 and not self.lossy_self:
            self.lossless = True  # no link leaves the node

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        """Return bool[L, units]: the units that arrive on each of L links, integers [L] (full-group ranks)."""
        assert exchange.phase == self.phase
        if self.lossless:
            return np.ones((len(sources), units), dtype=bool)
        own = sources == destinations
        reliable = np.zeros_like(own) if self.lossy_self else own
        if self.nodes is not None:
            reliable = reliable | ~own & (self.nodes[sources] == self.nodes[destinations])
        if not reliable.any():
            return self.channel.delivered_links(exchange, sources, destinations, units)
        result = np.ones((len(sources), units), dtype=bool)
        lossy = np.flatnonzero(~reliable)
        if lossy.size:
            result[lossy] = self.channel.delivered_links(exchange, sources[lossy], destinations[lossy], units)
        return result

    def lag(self, exchange: Exchange, source: int, members: Sequence[int], units: int) -> tuple[float, float] | None:
        """Return the lost share of units from ``source`` to the other ``members``, and their mean age, in updates.

        Both hold in the steady state at the rate of this step; ``None`` if the flags do not determine them.
        """
        others = np.array([member for member in members if member != source])
        lossy = others if self.nodes is None else others[self.nodes[others] != self.nodes[source]]
        if self.lossless or not lossy.size:
            return 0.0, 0.0
        known = self.channel.lag(exchange.step, source, lossy, units)
        part = lossy.size / others.size
        return None if known is None else (part * known[0], part * known[1])


#: The networks of both phases: they decide the losses between the ranks of the full group.
Networks = dict[str, Network]


class LatestExchanges:
    """Keeps a value for the latest two exchanges of each phase: a draw, which could be repeated, or an observation."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[Exchange, Any]]] = {}

    def get(self, exchange: Exchange) -> Any:
        """Return the value that was :meth:`put` for ``exchange``; ``None`` if there is none."""
        return next((value for known, value in self._kept.get(exchange.phase, ()) if known == exchange), None)

    def put(self, exchange: Exchange, value: Any) -> None:
        """Keep ``value`` for ``exchange``. It replaces the value of the same exchange, or else the oldest value."""
        kept = [item for item in self._kept.get(exchange.phase, ()) if item[0] != exchange]
        self._kept[exchange.phase] = [*kept[-1:], (exchange, value)]


class Wire(ABC):
    """The exchanges of one stream, for one rank of a group.

    Args:
        networks: decide the losses between the ranks of the full group.
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
        networks: Networks,
        stream: Stream,
        members: Sequence[int],
        rank: int,
        cut: dict[str, Sequence[BucketUnits]],
        coded: Mapping[str, CodedBuckets] | None = None,
    ) -> None:
        self.networks = networks
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
        """Return whether nothing can be lost in ``phase``; its exchanges then need not use this wire."""

    @abstractmethod
    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        """Begin the exchange of the gradients ``x``; ``rule`` handles their lost units."""

    @abstractmethod
    def all_gather(self, x: Parameters, rule: Stale) -> Transfer:
        """Begin the exchange of the parameters ``x``; ``rule`` handles their lost units."""

    def note_all_reduce(self, x: Callable[[], Gradients], rule: GradRecovery) -> None:
        """Note that the gradients ``x()`` are about to be all-reduced: all of them arrive."""

    def foresee(self, exchange: Exchange) -> Delivery | None:
        """Return the delivery of ``exchange``, if the wire can compute it without making the exchange.

        Raise :class:`UsageError` if a replayed run is too short for it.
        """
        return None

    def delivery(self, exchange: Exchange) -> Delivery | None:
        """Return the delivery of ``exchange``, if it was one of the latest two of its phase or can be foreseen."""
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

    def take_reports(self, rule: GradRecovery, bucket: int, seconds: float, step: int | None = None) -> None:
        """Give ``rule`` the reports of its units of ``step`` that arrived; by default of all steps that are over.

        Waits ``seconds`` at most for reports. Rules that do not ask get none.
        """

    def agree(self, phase: str, bucket: int, replicated: np.ndarray, group: dist.ProcessGroup) -> None:
        """Make the ranks of ``group``, which hold copies of the same parameters, lose the same units of them.

        ``replicated`` bool[N, units]: the units with copies, by shard. Drawn losses are the same anyway.
        """

    def lag(self, exchange: Exchange) -> tuple[float, float] | None:
        """Return the share of other ranks that miss a unit of this rank, and their mean lag in updates.

        Both are of the steady state; ``None`` if they are not known beforehand.
        """
        return None

    def steps(self, phase: str) -> int | None:
        """Return the number of steps, from 0 on, that can be foreseen; ``None``: any."""
        return None

    def prepare(self, exchange: Exchange) -> None:
        """Prepare ``exchange``, which comes next."""

    def close(self) -> None:
        """Close the wire after the last exchange."""


class DrawnWire(Wire):
    """Runs the caller's collective. The rules have removed the units that will not arrive from the buffer."""

    def lossless(self, phase: str) -> bool:
        network = self.networks[phase]
        if self.size == 1:
            return network.lossless or not network.lossy_self
        return network.lossless and phase not in self.coded

    @abstractmethod
    def foresee(self, exchange: Exchange) -> Delivery:
        """Return the delivery at this rank. For gradients it includes the units of this rank that others get."""

    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        delivery = self.foresee(x.exchange)
        x = self._looking_ahead(x, rule.units)
        if "grad" in self.coded:
            x = replace(x, rounding=partial(self.coded["grad"].round_gradients, x.exchange, x.bucket))
        with torch.no_grad():
            if x.rounding is not None and not rule.rounds:
                x.rounding(x.buffer)
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
        """Return the delivery of an exchange after it was made. ``delivery``: the delivery that was foreseen."""
        return delivery

    def _looking_ahead(self, x: Gradients, units: BucketUnits) -> Gradients:
        """Return ``x`` with a function that returns the losses of the next step's exchange, if it comes next."""
        if not x.gapless:
            return x
        exchange, steps = replace(x.exchange, step=x.exchange.step + 1), self.steps(x.exchange.phase)

        def coming() -> Lost | None:
            # Beyond the end of a trace nothing is lost; such a step is refused when it comes.
            over = steps is not None and exchange.step >= steps
            return None if over else self._lost(self.foresee(exchange), units)

        return replace(x, coming=coming)

    def _lost(self, delivery: Delivery, units: BucketUnits) -> Lost:
        """Return the units that a rule removes here."""
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
    def _latest(self) -> LatestExchanges:
        return LatestExchanges()

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
        self._latest = LatestExchanges()

    def prepare(self, exchange: Exchange) -> None:
        """Start drawing on another thread if it takes long."""
        phase = exchange.phase
        if self.lossless(phase) or self.count[phase] * self.size < _AHEAD or self._latest.get(exchange):
            return
        if CollectiveWire._thread is None:
            CollectiveWire._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-lossy-draws")
        self._latest.put(exchange, CollectiveWire._thread.submit(self._draw_ahead, exchange))

    def _draw_ahead(self, exchange: Exchange) -> Delivery:
        """Draw, and compute the values that recovery will ask for. This may take longer than the draw."""
        delivery, grads = self._draw(exchange), exchange.phase == "grad"
        for units in delivery.cut:
            if grads:
                delivery.survivors(units)
            lost = self._lost(delivery, units) if grads else delivery.lost_here(units)
            for numbers, _ in units.parts:
                lost.places(numbers)
        return delivery

    def _draw(self, exchange: Exchange) -> Delivery:
        me, everyone = [self.members[self.rank]] * self.size, self.members
        if exchange.phase != "grad":
            return self._delivery(exchange, self._links(exchange, everyone, me))
        links = self._links(exchange, [*everyone, *me], [*me, *everyone])
        return self._delivery(exchange, links[: self.size], links[self.size :])

    def _links(self, exchange: Exchange, sources: Sequence[int], destinations: Sequence[int]) -> np.ndarray:
        """Return bool[L, units], read-only: the units that arrive on each of L links."""
        network, count = self.networks[exchange.phase], self.count[exchange.phase]
        links = network.delivered_links(exchange, np.array(sources), np.array(destinations), count)
        links.flags.writeable = False
        return links

    def _delivery(
        self, exchange: Exchange, arrived: np.ndarray, sent: np.ndarray | Callable[[], np.ndarray] | None = None
    ) -> Delivery:
        """Return the delivery at this rank. ``arrived`` bool[N, units], by source; ``sent``: see :class:`Delivery`."""
        me = self.members[self.rank : self.rank + 1]
        return Delivery(exchange, self.members, me, arrived[None], self.cut[exchange.phase], sent)


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
    """Return bool[R, S, units], read-only: units of ``members`` that arrive at ``receivers``, in full-group ranks."""
    sources, destinations = np.tile(members, len(receivers)), np.repeat(receivers, len(members))
    arrived = network.delivered_links(exchange, sources, destinations, units)
    arrived = arrived.reshape(len(receivers), len(members), -1)
    arrived.flags.writeable = False
    return arrived
