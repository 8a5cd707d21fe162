"""``--transport udp``: the exchanges of one group as datagrams. Late units are lost, and reported.

The engine writes arrived units where they belong; this module turns tensors into addresses, and bitmaps into
deliveries. An exchange that is made again (evaluation, a save, a rerun) crosses torch's process group, with the
observed delivery.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...coding import AdaptiveCode, Layout
from ...exchange import BucketUnits, Delivery, Exchange, Lost, Stream, units_of
from ...recovery import Gradients, GradRecovery, Parameters, Stale
from ...recovery.rows import IndexedRows, Saved
from ..base import Crossing, Transfer
from ..drawn import Latest, Networks, draw
from ..pieces import PieceWire, combine
from .engine import Channel, PeerLost
from .engine import Transfer as Datagrams
from .staging import Stage, device_of, patience_of, staged

#: By phase, for each bucket: the dtype that crosses.
Dtypes = dict[str, Sequence[torch.dtype]]


class UdpWire(PieceWire):
    """One rank's exchanges with the other ranks of ``group``, over a channel of ``engine``.

    ``networks``: draws losses beside the real ones; with nodes, ranks of one node exchange over ``group``.
    ``open_channel(buckets, peers=ranks, reported=phases)``: opens the channel, a collective call. ``codes``: by phase,
    the code that protects the units that must arrive, for phases whose senders choose.
    """

    observed = True

    def __init__(
        self,
        networks: Networks,
        stream: Stream,
        members: Sequence[int],
        rank: int,
        cut: dict[str, Sequence[BucketUnits]],
        dtypes: Dtypes,
        group: dist.ProcessGroup | None,
        open_channel: Callable[..., Channel],
        codes: Mapping[str, Code] | None = None,
    ) -> None:
        super().__init__(stream, members, rank, cut)
        self.name = stream.name
        self.networks = networks
        self.group = group
        nodes = networks["grad"].nodes
        here = nodes[list(members)] if nodes is not None else np.arange(self.size)
        others = [other for other in range(self.size) if other != rank]
        #: Ranks of the group that are reached without datagrams, and those that are not.
        self.near = [other for other in others if here[other] == here[rank]]
        self.far = [other for other in others if other not in self.near]
        # If all ranks are on one node, no rank has others to send to.
        self._alone = len(set(here.tolist())) < 2
        sizes = {
            phase: [
                (units.shard * dtype.itemsize, units.elements * dtype.itemsize)
                for units, dtype in zip(cut[phase], dtypes[phase], strict=True)
            ]
            for phase in cut
        }
        self._codes = dict(codes or {})
        self._channel = None if self._alone else open_channel(sizes, peers=self.far, reported=tuple(self._codes))
        self._unreported: dict[tuple[Exchange, int], tuple[Datagrams, np.ndarray]] = {}
        self._known = Latest()  # an _Arriving for each exchange
        self._draws = Latest()
        self._numbers: dict[tuple[str, int], int] = {}
        self._agreements: dict[tuple[str, int], tuple[np.ndarray, dist.ProcessGroup]] = {}
        self._sender: ThreadPoolExecutor | None = None
        self._patience = patience_of(group)

    def lossless(self, phase: str) -> bool:
        return self._alone

    # --- exchanges -----------------------------------------------------------------------------------------------

    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        self.hear_late(rule, x.bucket, 0.0)
        with torch.no_grad():
            must = rule.choose(x)
        if self._arriving(x.exchange).was_begun(x.bucket):  # it crosses reliably, and its losses are known
            return self._scatter_reliably(x, rule, None, lambda: self.delivery(x.exchange))
        pieces = torch.empty_like(x.buffer)
        rows, own = pieces.chunk(self.size), x.buffer.chunk(self.size)
        rows[self.rank].copy_(own[self.rank])
        near = self._exchange_near([own[other] for other in self.near], [rows[other] for other in self.near])
        stage = Stage(x.buffer, pieces) if staged(x.buffer) else None
        here, there = (x.buffer, pieces) if stage is None else (stage.out, stage.back)
        udp = self._over_udp(x.exchange, x.bucket, there, here.chunk(self.size), stage, must)

        def arrived() -> Delivery:
            delivery = self._record(x.exchange, x.bucket, udp)
            if stage is not None:
                stage.bring([rows[other] for other in self.far], [there.chunk(self.size)[other] for other in self.far])
            combine(pieces, delivery, None, x, rule)
            return delivery

        return Crossing(_Waits([*near, udp]), arrived)

    def all_gather(self, x: Parameters, rule: Stale) -> Transfer:
        must = self._must_arrive(x, rule)
        if self._arriving(x.exchange).was_begun(x.bucket):
            return self._gather_reliably(x, rule, lambda: self.delivery(x.exchange))
        with torch.no_grad():
            own = rule.send(x)
        buffer, rows, units = x.buffer, x.buffer.chunk(self.size), self.cut["param"][x.bucket]
        # On a CPU units are written into the replica as they arrive; nobody reads it before the exchange is over.
        withdrawn = self._may_be_withdrawn(x.exchange, x.bucket) if not staged(buffer) else None
        old = IndexedRows.take(buffer, units, withdrawn) if withdrawn is not None else None
        near = self._exchange_near([x.sent] * len(self.near), [rows[other] for other in self.near])
        stage = Stage(x.sent, buffer) if staged(buffer) else None
        here, there = (x.sent, buffer) if stage is None else (stage.out, stage.back)
        for exchange, other in list(self._unreported):  # the code needs the reports, and only this call asks for them
            if exchange.phase == "param" and other == x.bucket:
                self.reports(exchange, x.bucket, 0.0)
        udp = self._over_udp(x.exchange, x.bucket, there, [here] * self.size, stage, must)

        def arrived() -> Delivery:
            delivery = self._record(x.exchange, x.bucket, udp)
            if rows[self.rank].data_ptr() != x.sent.data_ptr():
                rows[self.rank].copy_(x.sent)
            if stage is not None:
                stage.write(buffer, rule, delivery, self.far)
            elif withdrawn is not None:
                _restore(buffer, units, withdrawn, old, delivery)
            rule.sent(x, own, delivery)
            return delivery

        return Crossing(_Waits([*near, udp]), arrived)

    def _must_arrive(self, x: Parameters, rule: Stale) -> np.ndarray | None:
        """bool[N, count]: the parameters that all ranks must get."""
        chosen = rule.choose(x.sent, x.exchange.step)
        if chosen is None:
            return None
        must = np.repeat(chosen[None], self.size, axis=0)
        if ("param", x.bucket) in self._agreements:  # copies must lose the same: nothing
            must = must | self._agreements["param", x.bucket][0][self.rank]
        return must

    def _exchange_near(self, out: list[torch.Tensor], into: list[torch.Tensor]) -> list[Any]:
        """Exchange with the ranks of this node over torch."""
        if not self.near:
            return []
        ranks = [dist.get_global_rank(self.group or dist.group.WORLD, other) for other in self.near]
        pairs = zip(ranks, out, into, strict=True)
        # batch_isend_irecv cannot be used: its coalescing context may not be inside Megatron's, around all buckets.
        group, device = self.group or dist.group.WORLD, out[0].device
        coalesced = getattr(group._get_backend(device), "supports_coalescing", False)
        if coalesced:
            group._start_coalescing(device)
        works = []
        for peer, mine, theirs in pairs:
            works += [dist.irecv(theirs, peer, self.group), dist.isend(mine, peer, self.group)]
        return [group._end_coalescing(device)] if coalesced else works

    def _over_udp(
        self,
        exchange: Exchange,
        bucket: int,
        there: torch.Tensor,
        out: Sequence[torch.Tensor],
        stage: Stage | None,
        must: np.ndarray | None,
    ) -> _Exchange:
        phase = exchange.phase
        number = self._numbers[phase, bucket] = self._numbers.get((phase, bucket), -1) + 1
        places = [part.data_ptr() for part in there.chunk(self.size)]
        transfer = self._channel.post(phase, number, bucket, self._only_far(places))
        transfer.keep = there, out

        code = (1, 0) if must is None else self._codes[phase].of(must[self.far])
        transfer.expects_reports(must is not None)
        if must is not None:
            self._unreported[exchange, bucket] = transfer, must

        def send() -> None:
            sources = self._only_far([part.data_ptr() for part in out])
            self._channel.send(phase, number, bucket, sources, must, code)

        if stage is None:
            send()
            return _Exchange(transfer, None, self._patience)
        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="megatron-lossy-udp")
        return _Exchange(transfer, self._sender.submit(lambda: (stage.ready(), send())), self._patience)

    def _only_far(self, pointers: Sequence[int]) -> list[int | None]:
        return [pointer if other in self.far else None for other, pointer in enumerate(pointers)]

    # --- deliveries ----------------------------------------------------------------------------------------------

    def _arriving(self, exchange: Exchange) -> _Arriving:
        known = self._known.get(exchange)
        if known is None:
            known = _Arriving(exchange, self.members, self.rank, self.cut[exchange.phase])
            self._known.put(exchange, known)
        return known

    def delivery(self, exchange: Exchange) -> Delivery | None:
        known = self._known.get(exchange)
        return None if known is None else known.delivery()

    def _remember(self, delivery: Delivery) -> None:
        known = _Arriving(delivery.exchange, self.members, self.rank, delivery.cut)
        for bucket, units in enumerate(delivery.cut):
            known.was_begun(bucket)
            known.record(bucket, delivery.incoming(units))
        self._known.put(delivery.exchange, known)

    def restart(self) -> None:
        self._known = Latest()

    def _record(self, exchange: Exchange, bucket: int, udp: _Exchange) -> Delivery:
        """Note which units of ``bucket`` arrived. Returns a delivery of this bucket alone."""
        phase = exchange.phase
        arrived = udp.transfer.arrived.copy()
        arrived[[*self.near, self.rank]] = True
        if not self.networks[phase].lossless:
            arrived &= self._drawn(exchange)[:, self.cut[phase][bucket].numbers]
        if (phase, bucket) in self._agreements:
            arrived = self._agreed(phase, bucket, arrived)
        return self._arriving(exchange).record(bucket, arrived)

    def _may_be_withdrawn(self, exchange: Exchange, bucket: int) -> Lost | None:
        """Units of parameters that may arrive and still count as lost."""
        units = self.cut["param"][bucket]
        mask = np.zeros((self.size, units.count), dtype=bool)
        if not self.networks["param"].lossless:
            mask |= ~self._drawn(exchange)[:, units.numbers]
        if ("param", bucket) in self._agreements:
            mask |= self._agreements["param", bucket][0]
        return Lost(mask) if mask.any() else None

    def _drawn(self, exchange: Exchange) -> np.ndarray:
        """bool[N, units]: the units that the channel delivers, of all buckets."""
        drawn = self._draws.get(exchange)
        if drawn is None:
            me, units = self.members[self.rank], self.count[exchange.phase]
            drawn = draw(self.networks[exchange.phase], exchange, self.members, [me], units)[0]
            self._draws.put(exchange, drawn)
        return drawn

    def agree(self, phase: str, bucket: int, replicated: np.ndarray, group: dist.ProcessGroup) -> None:
        """Make the ranks of ``group`` (tensor parallel), which hold copies of the same parameters, lose the same units.

        ``replicated`` bool[N, units]: the units with copies, by shard. A unit that one of the ranks lost counts as lost
        by all. Therefore these units are sent three times.
        """
        if not replicated.any() or self._alone:
            return
        mine = replicated if phase == "param" else np.repeat(replicated[self.rank][None], self.size, axis=0)
        self._agreements[phase, bucket] = mine, group
        self._channel.copies(phase, bucket, replicated.any(axis=0))

    def _agreed(self, phase: str, bucket: int, arrived: np.ndarray) -> np.ndarray:
        mask, group = self._agreements[phase, bucket]
        common = torch.from_numpy(arrived[mask].astype(np.uint8)).to(device_of(group))
        dist.all_reduce(common, dist.ReduceOp.MIN, group=group)
        arrived[mask] = common.cpu().numpy().astype(bool)
        return arrived

    # --- units that must arrive ----------------------------------------------------------------------------------

    def hear(self, rule: GradRecovery, bucket: int, step: int, seconds: float) -> None:
        if rule.sent_in(step):
            rule.reported(step, self.reports(Exchange("grad", self.stream, step), bucket, seconds))

    def hear_late(self, rule: GradRecovery, bucket: int, seconds: float) -> None:
        for step in rule.late:
            rule.reported(step, self.reports(Exchange("grad", self.stream, step), bucket, seconds))

    def reports(self, exchange: Exchange, bucket: int, seconds: float) -> np.ndarray | None:
        """bool[N, count]: the units of this rank's ``bucket`` that others lost; ``None`` if a report is missing.

        Waits at most ``seconds`` for the reports. Call it for every exchange with units that had to arrive.
        """
        known = self._unreported.get((exchange, bucket))
        if known is None:
            raise ValueError(f"{exchange}, bucket {bucket}: nothing is left to be reported")
        transfer, must = known
        until, wait = time.monotonic() + min(seconds, self._patience), 1e-4
        while (lost := transfer.reports()) is None and time.monotonic() < until:
            time.sleep(wait)
            wait = min(2 * wait, 0.01)
        if lost is None:
            return None
        del self._unreported[exchange, bucket]
        lost[[*self.near, self.rank]] = False
        self._codes[exchange.phase].report(lost[self.far], must[self.far])
        return lost

    # --- output for the user -------------------------------------------------------------------------------------

    def counters(self) -> dict[int, dict[str, int]]:
        """Counters of each peer, by its rank in the group."""
        return {} if self._channel is None else self._channel.counters()

    def rates(self) -> dict[int, dict[str, float]]:
        """Rates towards each peer: bytes per second, least round trip in seconds, and more."""
        return {} if self._channel is None else self._channel.rates()

    def close(self) -> None:
        """Close the wire after the last exchange. Exchanges under way may stay incomplete."""
        if self._sender is not None:
            self._sender.shutdown()
        if self._channel is not None:
            self._channel.close()


class _Arriving:
    """The units of ``exchange`` that have arrived so far, bucket by bucket, and the buckets that were begun."""

    def __init__(self, exchange: Exchange, members: Sequence[int], rank: int, cut: Sequence[BucketUnits]) -> None:
        self._exchange, self._members, self._me, self._cut = exchange, members, members[rank], cut
        self._begun: set[int] = set()
        self._arrived: dict[int, np.ndarray] = {}
        self._whole: Delivery | None = None

    def was_begun(self, bucket: int) -> bool:
        """Whether ``bucket`` was begun before this call. The call marks it as begun."""
        before = bucket in self._begun
        self._begun.add(bucket)
        return before

    def record(self, bucket: int, arrived: np.ndarray) -> Delivery:
        """Record ``arrived`` bool[S, count] of ``bucket``. Returns a delivery of that bucket alone."""
        self._arrived[bucket], self._whole = arrived, None
        return self._of({bucket: arrived})

    def delivery(self) -> Delivery:
        """The delivery of all buckets so far."""
        if self._whole is None:
            self._whole = self._of(self._arrived)
        return self._whole

    def _of(self, buckets: Mapping[int, np.ndarray]) -> Delivery:
        arrived = np.zeros((1, len(self._members), units_of(self._cut)), dtype=bool)
        for bucket, part in buckets.items():
            arrived[0][:, self._cut[bucket].numbers] = part
        arrived.flags.writeable = False
        return Delivery(self._exchange, self._members, [self._me], arrived, self._cut)


class Code:
    """The parity of units that must arrive: ``fixed`` (B, C), or as much as the loss requires.

    ``budget``: the parity is at most this share of a message.
    """

    def __init__(self, fixed: tuple[int, int] | None, budget: float) -> None:
        self._fixed = fixed
        self._budget = budget
        self._adaptive = AdaptiveCode(budget=2.55)

    def of(self, must: np.ndarray) -> tuple[int, int]:
        """(B, C) for messages with ``must`` bool[D, count]."""
        high = int(must.sum(axis=1).max(initial=0))
        if self._fixed is not None or not high:
            return self._fixed or (1, 0)
        block = self._adaptive.block
        most = self._budget * must.shape[1]
        parity = min(self._adaptive.parity(high), int(most / high * block))
        while parity and Layout(high, block, parity).parities > most:
            parity -= 1
        return block, parity

    def report(self, lost: np.ndarray, must: np.ndarray) -> None:
        """Record the losses ``lost`` bool[D, count] of units outside ``must``: these are the losses of the network."""
        self._adaptive.report(int((lost & ~must).sum()), int((~must).sum()))


def _restore(buffer: torch.Tensor, units: BucketUnits, withdrawn: Lost, old: Saved, delivery: Delivery) -> None:
    """Put the old values back into units of ``buffer`` that were written and count as lost.

    ``old``: copies of all units that may be ``withdrawn``.
    """
    fresh = Lost(withdrawn.mask & delivery.incoming(units))
    new = IndexedRows.take(buffer, units, fresh)
    IndexedRows.put_(buffer, units, withdrawn, old)
    IndexedRows.put_(buffer, units, fresh, new)


class _Exchange:
    """An exchange as datagrams. Its wait ends when nothing more will arrive and all units were sent."""

    def __init__(self, transfer: Datagrams, sending: Future | None, seconds: float) -> None:
        self.transfer = transfer
        self._sending = sending
        self._seconds = seconds

    def wait(self) -> None:
        """Wait for the exchange. Raises :class:`PeerLost`, also if a live process has sent nothing for ``seconds``."""
        until = time.monotonic() + self._seconds
        try:
            if self._sending is not None:
                self._sending.result(self._seconds)
            self.transfer.wait(max(until - time.monotonic(), 0.0))
            self.transfer.sent(max(until - time.monotonic(), 0.0))
        except (TimeoutError, FutureTimeout) as error:
            raise PeerLost(f"{error or self.transfer}: nothing for {self._seconds:g} s") from None


class _Waits:
    """Several handles as one handle."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
