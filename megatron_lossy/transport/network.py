"""A channel with the rules that hold for all of them, as one rank sees it.

The own shard never crosses the network; links inside a node may be reliable; receivers of one sender may lose
together (docs/semantics.md, Links).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..channel import Channel, make_channel
from ..config import PHASES, LossyConfig
from ..delivery_log.replay import Recorded
from ..exchange import Exchange, Stream

#: Draws of at least this many units are made ahead of time, on another thread.
_AHEAD = 2**17


def channel_of(config: LossyConfig, phase: str) -> Channel:
    """The channel of ``phase``, be it a recorded run. Raises :class:`UsageError` for unreadable files."""
    loss = config.phase(phase)
    if loss.trace is not None and loss.trace.is_dir():
        return Recorded(config, loss.trace, make_channel)
    return make_channel(config, phase)


def check_channels(config: LossyConfig, size: int, steps: int | None) -> None:
    """Raise :class:`UsageError` if the files of ``config`` do not fit ``size`` ranks or ``steps`` iterations."""
    for phase in PHASES:
        if not config.phase(phase).lossless:
            channel_of(config, phase).check(phase, Stream(), size, None, steps)


class Network:
    """What arrives in one phase between the ranks of a full data-parallel (or expert-data) group.

    ``nodes`` gives the node of every rank of the full group; needed for ``--lossy-links inter-node``.
    """

    def __init__(self, config: LossyConfig, phase: str, size: int, nodes: Sequence[int] | None = None) -> None:
        self.phase = phase
        self.size = size
        self.channel = channel_of(config, phase)
        self.lossless = config.phase(phase).lossless
        self.lossy_self = config.lossy_self and phase == "grad"
        self.nodes = np.array(nodes) if config.lossy_links == "inter-node" else None

    def delivered(self, exchange: Exchange, source: int, destination: int, units: int) -> np.ndarray:
        """bool[units]: what arrives at ``destination`` from ``source`` (ranks in the full group)."""
        return self.delivered_links(exchange, np.array([source]), np.array([destination]), units)[0]

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        """bool[L, units]: what arrives on each of L links, given as integers [L] (ranks in the full group)."""
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


class Deliveries:
    """What the ranks of a collective's group lose, as rank ``rank`` of it sees it, step by step.

    ``members`` are the ranks of the collective's group within the full group (all of it with one optimizer
    instance). Outcomes of a step are computed once and kept for the latest steps.
    """

    _thread: ThreadPoolExecutor | None = None

    def __init__(self, network: Network, stream: Stream, members: Sequence[int], rank: int, units: int) -> None:
        self.network = network
        self.stream = stream
        self.members = list(members)
        self.rank = rank
        self.units = units
        self._kept: OrderedDict[tuple[int, bool], Future | np.ndarray] = OrderedDict()
        alone = len(self.members) == 1 and not network.lossy_self
        self.lossless = network.lossless or alone

    def outgoing(self, step: int) -> np.ndarray:
        """bool[N, units]: what of this rank's data arrives at each destination."""
        return self._get(step, True)

    def upcoming(self, step: int) -> np.ndarray:
        """As :meth:`outgoing`, of a step that may lie beyond the end of a trace: then nothing is lost.

        If such a step comes, :meth:`outgoing` refuses it.
        """
        steps = self.network.channel.steps(self.network.phase, self.stream)
        if steps is not None and step >= steps:
            return np.ones((len(self.members), self.units), dtype=bool)
        return self.outgoing(step)

    def incoming(self, step: int) -> np.ndarray:
        """bool[N, units]: what arrives here from each source."""
        return self._get(step, False)

    def prepare(self, step: int, outgoing: bool) -> None:
        """Start drawing ``step`` on another thread if it is much work."""
        if not self.lossless and self.units * len(self.members) >= _AHEAD and (step, outgoing) not in self._kept:
            if Deliveries._thread is None:
                Deliveries._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-lossy-draws")
            self._keep(step, outgoing, Deliveries._thread.submit(self._draw, step, outgoing))

    def _get(self, step: int, outgoing: bool) -> np.ndarray:
        known = self._kept.get((step, outgoing))
        if known is None:
            known = self._draw(step, outgoing)
        elif isinstance(known, Future):
            known = known.result()
        self._keep(step, outgoing, known)
        return known

    def _keep(self, step: int, outgoing: bool, value: Future | np.ndarray) -> None:
        self._kept[step, outgoing] = value
        while len(self._kept) > 6:  # both directions of the previous, this and the next step
            self._kept.popitem(last=False)

    def _draw(self, step: int, outgoing: bool) -> np.ndarray:
        exchange = Exchange(self.network.phase, self.stream, step)
        others = np.array(self.members)
        me = np.full_like(others, self.members[self.rank])
        sources, destinations = (me, others) if outgoing else (others, me)
        result = self.network.delivered_links(exchange, sources, destinations, self.units)
        result.flags.writeable = False
        return result
