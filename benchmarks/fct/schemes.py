"""Schemes that deliver a message between two data centers in spite of packet loss (SMART, sections 3.2 and 4.1).

A sender has one link, and sends a packet in every slot of it as long as there is one to send: first packets that are
sent again, then new ones. A receiver answers by packets that are never lost and take no time on the link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_lossy.base.coding import AdaptiveCode, Layout
from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.flags import check_code

_NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Path:
    """Nine hops between servers of two fat-trees, each site's border joined to its cores. Times in microseconds.

    ``inside``, ``between``: Gbit/s of a link in a data center, and of the link between them, which ``pairs`` of servers
    share evenly. ``delay``, ``hop_delay``: propagation of the link between, and of each other link. ``payload``,
    ``headers``: bytes of a packet.
    """

    inside: float = 100.0
    between: float = 400.0
    delay: float = 400.0
    hop_delay: float = 1.0
    payload: int = 4096
    headers: int = 62
    pairs: int = 1

    @property
    def slot(self) -> float:
        """The time from one packet to the next, at the sender's rate."""
        return _time(self.payload + self.headers, min(self.inside, self.between / self.pairs))

    @property
    def latency(self) -> float:
        """The time from a packet's departure at its sender to its arrival."""
        return self._way(self.payload + self.headers)

    @property
    def control(self) -> float:
        """The latency of a packet without payload; such packets are never lost."""
        return self._way(self.headers)

    @property
    def rtt(self) -> float:
        """The time of a packet to its receiver, and of the answer back."""
        return self.latency + self.control

    def _way(self, size: int) -> float:
        # There are eight hops inside, the first being the sender's own, and one between.
        return self.delay + 8 * self.hop_delay + 7 * _time(size, self.inside) + _time(size, self.between)

    def packets(self, size: float) -> int:
        """Return packets of a message of ``size`` bytes."""
        return max(1, -(-round(size) // self.payload))


def _time(size: int, gigabits: float) -> float:
    return size * 8 / (gigabits * 1000)


class Losses:
    """The draws of one message. All schemes have the same losses, as far as they send the same packets.

    ``p``: loss rate. ``burst``: mean number of packets lost in a row (Gilbert-Elliott; everything is lost in the bad
    state), or ``None`` for independent losses. Packets that are sent again are lost independently.
    """

    def __init__(self, p: float, seed: int, flow: int, burst: float | None = None) -> None:
        self.p = p
        self.burst = burst
        self._key = (seed, flow)

    def _generator(self, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key[0], counter=[0, 0, self._key[1], purpose]))

    def first(self, data: int, parities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return bool[data] and bool[parities]: the packets that are lost when first sent.

        ``parities`` int[P]: the number of data packets before each parity.
        """
        if self.burst is None:
            lost = self._generator(0).random(data) < self.p
            return lost, self._generator(1).random(len(parities)) < self.p
        chain = self._chain(data + len(parities))
        places = parities + np.arange(len(parities))
        is_parity = np.zeros(len(chain), dtype=bool)
        is_parity[places] = True
        return chain[~is_parity], chain[is_parity]

    def _chain(self, length: int) -> np.ndarray:
        """Return bool[length]: a stationary two-state chain, in runs of geometric length."""
        assert self.burst is not None
        if not self.p:
            return np.zeros(length, dtype=bool)
        random = self._generator(0)
        good, bad = self.p / ((1 - self.p) * self.burst), 1 / self.burst  # probabilities of leaving that state
        state = bool(random.random() < self.p)
        runs: list[int] = []
        while sum(runs) < length:
            runs.append(int(random.geometric(bad if state ^ (len(runs) % 2 == 1) else good)))
        states = np.arange(len(runs)) % 2 == (0 if state else 1)
        return np.repeat(states, runs)[:length]

    def again(self, data: int) -> np.ndarray:
        """Return int[data]: the number of repetitions that each packet needs to arrive, if it is sent again."""
        return self._generator(2).geometric(1 - self.p, data)

    def important(self, data: int, count: int) -> np.ndarray:
        """Return int[count], rising: the packets of data that have high priority."""
        return np.sort(self._generator(3).permutation(data)[:count])


@dataclass(frozen=True)
class Flow:
    """The result of a message: microseconds from the first byte until it was delivered, and numbers of packets."""

    time: float
    data: int
    parities: int = 0
    again: int = 0
    #: Packets of data that were delivered as zeros.
    zeros: int = 0


class Link:
    """The sender's link over the time of one message: the time at which each packet was sent.

    ``packets``: sent in this order, one after another. ``again(left)``: a function of the times at which these packets
    left. It returns int[R] and float[R]: the packets to send again, and the times at which that is known. ``attempts``
    int[R]: the number of tries of each. A try is lost except for the last, and the packet is sent once more ``timeout``
    later.
    """

    def __init__(
        self,
        path: Path,
        packets: int,
        again: Callable[[np.ndarray], np.ndarray],
        attempts: np.ndarray,
        timeout: float,
    ) -> None:
        slot, order = path.slot, np.arange(packets)
        places, taken = order, np.zeros((0,), dtype=np.int64)
        tries = np.repeat(np.arange(len(attempts)), attempts)  # the packet of each try
        first = np.cumsum(attempts) - attempts
        number = np.arange(len(tries)) - first[tries]
        # Knowledge at a time depends on earlier slots only: every round is right for one round trip more.
        while True:
            left = (places + 1) * slot
            if not len(attempts):
                break
            known = again(left)
            wanted = np.ceil(known[tries] / slot - 1e-9).astype(np.int64)
            if len(taken) == len(tries):
                later = number > 0
                before = np.flatnonzero(later) - 1
                wanted[later] = np.ceil(((taken[before] + 1) * slot + timeout) / slot - 1e-9).astype(np.int64)
            else:
                wanted += np.ceil(number * timeout / slot).astype(np.int64)
            ranked = np.argsort(wanted, kind="stable")
            queue = np.maximum.accumulate(wanted[ranked] - np.arange(len(ranked))) + np.arange(len(ranked))
            now = np.empty_like(queue)
            now[ranked] = queue
            new = order + np.searchsorted(queue - np.arange(len(queue)), order, side="right")
            if len(taken) == len(now) and np.array_equal(now, taken) and np.array_equal(new, places):
                break
            places, taken = new, now
        #: The time at which each packet had left.
        self.left = left
        #: The time at which each repeated packet arrives.
        last = first + attempts - 1
        self.arrives_again = (taken[last] + 1) * slot + path.latency if len(attempts) else np.zeros(0)
        self.sent_again = len(tries)


class Scheme(ABC):
    """A scheme of recovery. ``timeout``: for repeated packets, and for the end of a message, in round trips."""

    def __init__(self, timeout: float = 2.0) -> None:
        self.timeout = timeout

    @abstractmethod
    def flow(self, path: Path, packets: int, losses: Losses) -> Flow:
        """Send a message of ``packets`` packets of data."""

    def _rto(self, path: Path) -> float:
        return self.timeout * path.rtt


class SelectiveRepeat(Scheme):
    """A receiver that gets a packet asks for missing ones before it; later losses time out."""

    def flow(self, path: Path, packets: int, losses: Losses) -> Flow:
        lost, _ = losses.first(packets, _NOTHING)
        missing = np.flatnonzero(lost)
        known_by = _next_there(~lost, missing)

        def asked(left: np.ndarray) -> np.ndarray:
            told = left[np.minimum(known_by, packets - 1)] + path.latency + path.control
            return np.where(known_by < packets, told, left[missing] + self._rto(path))

        link = Link(path, packets, asked, losses.again(packets)[missing], self._rto(path))
        end = link.left[-1] + path.latency if not lost[-1] else 0.0
        there = np.flatnonzero(~lost)
        end = max(end, link.left[there[-1]] + path.latency if len(there) else 0.0, link.arrives_again.max(initial=0.0))
        return Flow(float(end), packets, 0, link.sent_again)


class Uniform(Scheme):
    """LoWAR: every block has parity. Packets that it cannot replace are asked for when the block is over."""

    def __init__(self, block: int, parity: int, timeout: float = 2.0) -> None:
        super().__init__(timeout)
        check_code("code", block, parity)
        self.block = block
        self.parity = parity

    def flow(self, path: Path, packets: int, losses: Losses) -> Flow:
        code = _CodedMessage(packets, self.block, self.parity, losses)
        missing = np.flatnonzero(code.residual)
        # The last of the block's parities, or the next packet that arrives.
        last = code.last_of_block[missing // self.block]
        known_by = _next_there(~code.lost_sent, last - 1)

        def asked(left: np.ndarray) -> np.ndarray:
            told = left[np.minimum(known_by, code.sent - 1)] + path.latency + path.control
            return np.where(known_by < code.sent, told, left[last] + self._rto(path))

        link = Link(path, code.sent, asked, losses.again(packets)[missing], self._rto(path))
        end = max(code.complete(link.left) + path.latency, link.arrives_again.max(initial=0.0))
        return Flow(float(end), packets, code.layout.parities, link.sent_again)


class Smart(Scheme):
    """SMART's gradients: packets of high priority have parity, behind the data, and are asked for; others may be zero.

    ``fraction``: share of packets of high priority. The sender's end of the message always arrives.
    """

    def __init__(self, block: int = 100, parity: int = 50, fraction: float = 0.01, timeout: float = 2.0) -> None:
        super().__init__(timeout)
        check_code("code", block, parity)
        if not 0 <= fraction <= 1:
            raise UsageError(f"fraction {fraction}: must be in [0, 1]")
        self.block = block
        self.parity = parity
        self.fraction = fraction

    def flow(self, path: Path, packets: int, losses: Losses) -> Flow:
        high = losses.important(packets, int(self.fraction * packets + 0.5))
        layout = Layout(len(high), self.block, self.parity)
        lost, lost_parity = losses.first(packets, np.full(layout.parities, packets))
        residual = layout.residual(lost[high], lost_parity)
        missing = high[residual]
        sent = packets + layout.parities

        def asked(left: np.ndarray) -> np.ndarray:
            return np.full(len(missing), left[-1] + path.latency + path.control)

        link = Link(path, sent, asked, losses.again(packets)[missing], self._rto(path))
        end = link.left[packets - 1]  # its end comes behind the last packet
        replaced = lost[high] & ~residual
        if replaced.any():
            end = max(end, link.left[packets + layout.group[replaced].max()])
        end = max(end + path.latency, link.arrives_again.max(initial=0.0))
        zeros = int(lost.sum() - lost[high].sum())
        return Flow(float(end), packets, layout.parities, link.sent_again, zeros)


class Tolerant(Scheme):
    """SMART's activations: everything has parity, and a share ``bound`` of a message may stay lost.

    Beyond the bound all lost packets are asked for.
    """

    def __init__(self, block: int = 100, parity: int = 10, bound: float = 0.01, timeout: float = 2.0) -> None:
        super().__init__(timeout)
        if parity:
            check_code("code", block, parity)
        if not 0 <= bound < 1:
            raise UsageError(f"bound {bound}: must be in [0, 1)")
        self.block = block
        self.parity = parity
        self.bound = bound

    def flow(self, path: Path, packets: int, losses: Losses) -> Flow:
        code = _CodedMessage(packets, self.block, self._parity(packets), losses)
        missing = np.flatnonzero(code.residual)
        tolerated = len(missing) <= int(self.bound * packets)
        zeros = len(missing) if tolerated else 0
        if tolerated:
            missing = _NOTHING

        def asked(left: np.ndarray) -> np.ndarray:
            return np.full(len(missing), left[-1] + path.latency + path.control)

        link = Link(path, code.sent, asked, losses.again(packets)[missing], self._rto(path))
        # At the end of the message it is known whether packets are still to come.
        end = link.left[-1] if code.residual.any() else code.complete(link.left)
        end = max(end + path.latency, link.arrives_again.max(initial=0.0))
        self._report(code)
        return Flow(float(end), packets, code.layout.parities, link.sent_again, zeros)

    def _parity(self, packets: int) -> int:
        return self.parity

    def _report(self, code: _CodedMessage) -> None:
        """Do nothing. Messages follow each other: a receiver's report on one is known before the next."""


class Adaptive(Tolerant):
    """The same with a code that follows the loss of the messages before (:class:`AdaptiveCode`)."""

    def __init__(self, block: int = 100, budget: float = 0.5, bound: float = 0.01, timeout: float = 2.0) -> None:
        super().__init__(block, 0, bound, timeout)
        self.code = AdaptiveCode(block, bound, budget)

    def _parity(self, packets: int) -> int:
        return self.code.parity(packets)

    def _report(self, code: _CodedMessage) -> None:
        self.code.report(int(code.lost_sent.sum()), code.sent)


class _CodedMessage:
    """A message with parities behind each block; without parity, its data."""

    def __init__(self, packets: int, block: int, parity: int, losses: Losses) -> None:
        self.packets = packets
        self.layout = Layout(packets, block, parity) if parity else Layout(0, 1, 1)
        group = self.layout.group if parity else np.zeros(packets, dtype=np.int64)
        parities = self.layout.parities
        #: By parity: the number of data packets that are sent before it.
        behind = np.zeros(parities, dtype=np.int64)
        if parity:
            behind = np.minimum((np.arange(parities) // parity + 1) * block, packets)
        lost, lost_parity = losses.first(packets, behind)
        self.sent = packets + parities
        #: The places of data and parity in the order of sending.
        self.parity_places = behind + np.arange(parities)
        data = np.ones(self.sent, dtype=bool)
        data[self.parity_places] = False
        self.data_places = np.flatnonzero(data)
        self.lost_sent = np.empty(self.sent, dtype=bool)
        self.lost_sent[self.data_places], self.lost_sent[self.parity_places] = lost, lost_parity
        self.residual = self.layout.residual(lost, lost_parity) if parity else lost
        self._replaced = np.unique(group[lost & ~self.residual]) if parity else _NOTHING
        blocks = -(-packets // block)
        if parity:
            ends = np.searchsorted(np.arange(parities) // parity, np.arange(blocks), side="right") - 1
            self.last_of_block = self.parity_places[ends]
        self._there = self.data_places[~lost]

    def complete(self, left: np.ndarray) -> float:
        """Return the time at which all needed packets have left, except for repeated ones."""
        data = left[self._there[-1]] if len(self._there) else 0.0
        return float(max(data, left[self.parity_places[self._replaced[-1]]] if len(self._replaced) else 0.0))


def _next_there(there: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return int: for each place ``after``, the next place that is ``there``; their number if there is none."""
    following = np.append(np.where(there, np.arange(len(there)), len(there)), len(there))
    following = np.minimum.accumulate(following[::-1])[::-1]
    return following[after + 1]
