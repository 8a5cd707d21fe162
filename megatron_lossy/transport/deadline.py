"""The exchanges of one group over a network that may lose units: datagrams, or streams with a deadline.

A channel writes arrived units where they belong; this module turns tensors into addresses, and bitmaps into deliveries.
An exchange that is made again (evaluation, a save, a rerun) crosses torch's process group, with the observed delivery.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.exchange import BucketUnits, Delivery, Exchange, Stream, units_of
from ..base.fetch import at_hand
from ..config import LossyConfig
from ..recovery import Gradients, GradRecovery, Parameters, Stale
from ..recovery.rows import used_here
from .base import LatestExchanges, Networks, Transfer, draw
from .coded import CodedBuckets
from .ends import end_for
from .pieces import PieceWire, room_for
from .staging import Crossing, Message, Parcel, courier_of, device_of, patience_of, staged
from .udp.repeats import Repeats
from .windows import Bring, Window, into_pieces, into_replica, runs, windows

#: Returns bool[N, count]: the units that must arrive. An accelerator may still be choosing them.
Must = Callable[[], np.ndarray]
#: By phase, for each bucket: the dtype that crosses.
Dtypes = dict[str, Sequence[torch.dtype]]
#: Seconds for the data of an exchange without a wait to leave, when the wire is closed.
_LEAVING = 5.0


class DeadlineWire(PieceWire):
    """One rank's exchanges with the other ranks of ``group``, over a channel of a network. Units that come too late are lost.

    ``networks``: draws losses in addition to the real ones; with nodes, ranks of one node exchange over ``group``. A collective
    call. Raises :class:`UsageError` if ranks differ or miss each other.
    """

    observed = True

    def __init__(
        self,
        config: LossyConfig,
        networks: Networks,
        stream: Stream,
        members: Sequence[int],
        rank: int,
        cut: dict[str, Sequence[BucketUnits]],
        dtypes: Dtypes,
        group: dist.ProcessGroup | None,
        coded: Mapping[str, CodedBuckets],
    ) -> None:
        super().__init__(networks, stream, members, rank, cut, coded)
        self.name = stream.name
        self.group = group
        open_channel = self._opening(config, dtypes)
        nodes = networks["grad"].nodes
        here = nodes[list(members)] if nodes is not None else np.arange(self.size)
        others = [other for other in range(self.size) if other != rank]
        #: Ranks of the group that are reached over torch, and those that are not.
        self.near = [other for other in others if here[other] == here[rank]]
        self.far = [other for other in others if other not in self.near]
        # If all ranks are on one node, no rank has others to send to.
        self._alone = len(set(here.tolist())) < 2
        self._memory = config.udp_memory
        # Codes cross as bytes, of which a unit has as many as its payload.
        dtypes = dict(dtypes) | {phase: [torch.uint8] * len(cut[phase]) for phase in self.coded}
        self._crossing = dict(cut) | {phase: coded.payloads for phase, coded in self.coded.items()}
        #: By phase, the windows of each bucket. The channel numbers them through.
        self._windows = {
            phase: list(windows(self._crossing[phase], dtypes[phase], self.size, self._memory)) for phase in cut
        }
        sizes: dict[str, list[tuple[int, int]]] = {phase: [] for phase in cut}
        for phase, of_phase in sizes.items():
            buckets = zip(self._windows[phase], self._crossing[phase], dtypes[phase], strict=True)
            for parts, units, dtype in buckets:
                of_phase += [(part.elements * dtype.itemsize, units.elements * dtype.itemsize) for part in parts]
        #: By phase whose senders choose, the copies of units that must arrive; and how often all units of a message are sent.
        self._repeats = dict.fromkeys(config.chosen(), Repeats(config.udp_fec_code, config.udp_fec_budget / 100))
        self._passes = {phase: config.copies(phase) for phase in cut}
        self._channel = None if self._alone else open_channel(sizes, peers=self.far, reported=tuple(self._repeats))
        for phase, times in self._passes.items():
            if times > 1 and not self._alone:
                for bucket, units in enumerate(cut[phase]):
                    self._copy(phase, bucket, np.zeros(units.count, dtype=bool))
        self._unreported: dict[tuple[Exchange, int], tuple[Crossing, Must]] = {}
        self._known = LatestExchanges()  # arrivals of each exchange
        self._draws = LatestExchanges()
        self._numbers: dict[tuple[str, int], int] = {}
        self._agreements: dict[tuple[str, int], tuple[np.ndarray, dist.ProcessGroup]] = {}
        self._begun: Crossing | None = None  # the latest exchange
        self._patience = patience_of(group)

    def _opening(self, config: LossyConfig, dtypes: Dtypes) -> Callable[..., Any]:
        """Return a function that opens the channel, given the buckets. A collective call."""
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        # Every rank is in one group of a stream, and all make the same channels in the same order.
        name = f"{self.name}-{ranks[0]}"
        # A drawn prefix keeps keys of dead ranks out: torchrun may use one store for all its attempts.
        drawn = [os.urandom(8).hex()]
        dist.broadcast_object_list(drawn, ranks[0], self.group)
        prefix, store = f"megatron_lossy/wire/{name}/{drawn[0]}", dist.distributed_c10d._get_default_store()
        codes = {phase: str(codes.code) for phase, codes in self.coded.items()}
        alike = repr((dtypes, ranks, [codes.code for codes in self.coded.values()]))
        return partial(end_for(config).open, name, self.rank, self.size, store, prefix, alike=alike, codes=codes)

    def lossless(self, phase: str) -> bool:
        return self._alone

    # --- exchanges -----------------------------------------------------------------------------------------------

    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        self.take_reports(rule, x.bucket, 0.0)
        if "grad" in self.coded:
            x = self._wide(x)
        with torch.no_grad():
            chosen = None if rule.protected is None else rule.protected.choose(x)
        must = None if chosen is None else functools.cache(partial(at_hand, chosen))
        known = self._arriving(x.exchange)
        if known.was_begun(x.bucket):  # it crosses reliably, and its losses are known
            return self._scatter_reliably(x, rule, None, lambda: self.delivery(x.exchange))
        coded = self.coded.get("grad")
        sent = x.buffer if coded is None else coded.gradients(x.exchange, x.bucket, x.buffer)
        # The memory of sent data is free, and pieces can take its place: on a device, where copies of it are sent.
        on_device = staged(sent)
        in_place = on_device and (must is None or coded is not None)
        pieces = sent if in_place else room_for(sent)
        rows, own = pieces.chunk(self.size), sent.chunk(self.size)
        landing = sent.new_empty(len(self.near) if in_place else 0, len(own[0]))
        if not in_place:
            rows[self.rank].copy_(own[self.rank])
        into = list(landing) if in_place else [rows[other] for other in self.near]
        near = self._exchange_near([own[other] for other in self.near], into)
        bring = into_pieces(pieces, self.size, self.far) if on_device else None
        crossing = self._over_network(x, near, sent, pieces, must, bring)

        def arrived() -> Delivery:
            delivery = self._record(known, x.bucket, crossing)
            if in_place:
                used_here((landing,))
                for group, places in runs(self.near):
                    pieces.view(self.size, -1)[group].copy_(landing[places])
            self._combine(pieces, delivery, None, x, rule)
            return delivery

        return Transfer(crossing, arrived, apart=True)

    def all_gather(self, x: Parameters, rule: Stale) -> Transfer:
        known = self._arriving(x.exchange)
        if known.was_begun(x.bucket):
            return self._gather_reliably(x, rule, lambda: self.delivery(x.exchange))
        with torch.no_grad():
            own = rule.send(x)
        coded, buffer, units = self.coded.get("param"), x.buffer, self.cut["param"][x.bucket]
        # Units are written into the replica as they arrive, and it is not read before the end of the exchange. Aside
        # are those that are codes, or may count as lost although they came.
        aside = coded is not None or not self.networks["param"].lossless or ("param", x.bucket) in self._agreements
        sent = x.sent if coded is None else coded.parameters(x.bucket, x.sent)
        received = sent.new_empty(self.size * len(sent)) if aside else buffer
        rows = received.chunk(self.size)
        near = self._exchange_near([sent] * len(self.near), [rows[other] for other in self.near])
        bring = None
        if staged(sent) and aside:
            bring = into_pieces(received, self.size, self.far)
        elif staged(sent):
            bring = into_replica(buffer, self.size, self.far, units, rule.rows)
        crossing = self._over_network(x, near, sent, received, None, bring)

        def arrived() -> Delivery:
            delivery = self._record(known, x.bucket, crossing)
            if coded is None and rows[self.rank].data_ptr() != x.sent.data_ptr():
                rows[self.rank].copy_(x.sent)
            if aside:
                self._renew(received, x, rule, own, delivery)
            else:
                rule.sent(x, own, delivery)
            return delivery

        return Transfer(crossing, arrived, apart=True)

    def _exchange_near(self, out: list[torch.Tensor], into: list[torch.Tensor]) -> list[Any]:
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

    def _over_network(
        self,
        x: Gradients | Parameters,
        near: list[Any],
        sent: torch.Tensor,
        received: torch.Tensor,
        must: Must | None,
        bring: Bring | None,
    ) -> Crossing:
        """Begin to exchange ``sent`` [N * shard], or [shard] for all, and to write into ``received`` [N * shard].

        ``near``: handles of the exchange with ranks of this node. ``bring(window, arrived, data)``: copies data of ``window`` from page-locked memory to the device.
        """
        phase, bucket, itemsize = x.exchange.phase, x.bucket, sent.element_size()
        number = self._numbers[phase, bucket] = self._numbers.get((phase, bucket), -1) + 1
        shard = self._crossing[phase][bucket].shard
        own_pieces = phase == "grad"  # each destination gets another piece
        parts: list[Message | Parcel] = []
        for window in self._windows[phase][bucket]:
            key = phase, number, window, must
            if bring is None:
                start, each = window.start * itemsize, shard * itemsize
                transfer = self._post(*key, received.data_ptr() + start, each, self.far)
                transfer.keep = received, sent
                self._send(*key, sent.data_ptr() + start, each * own_pieces, self.far)
                parts.append(transfer)
                continue
            pieces, each = sent.view(-1, shard)[:, window.part], window.elements * itemsize
            places = range(len(self.far))
            parcel = Parcel(
                rows=[pieces[group] for group, _ in runs(self.far)] if own_pieces else [pieces],
                arriving=torch.Size([len(self.far), window.elements]),
                post=partial(self._post, *key, each=each, places=places),
                send=partial(self._send, *key, each=each * own_pieces, places=places),
                bring=lambda arrived, data, window=window: bring(window, arrived[self.far], data),
                patience=self._patience,
            )
            courier_of(sent.device, self._memory).carry(parcel)
            parts.append(parcel)
        self._begun = Crossing(near, parts, self._patience)
        if must is not None:
            self._unreported[x.exchange, bucket] = self._begun, must
        return self._begun

    def _post(
        self, phase: str, number: int, window: Window, must: Must | None, data: int, each: int, places: Sequence[int]
    ) -> Message:
        """Post ``window``: its data of the far ranks arrive at ``data`` plus ``each`` bytes times their ``places``."""
        transfer: Any = self._channel.post(phase, number, window.number, self._to_far(data, each, places))
        if must is not None:
            transfer.expects_reports()
        return transfer

    def _send(
        self, phase: str, number: int, window: Window, must: Must | None, data: int, each: int, places: Sequence[int]
    ) -> None:
        required = None if must is None else must()[:, window.units]
        more = () if required is None else (required, self._repeats[phase].of(required[self.far]))
        self._channel.send(phase, number, window.number, self._to_far(data, each, places), *more)

    def _to_far(self, data: int, each: int, places: Sequence[int]) -> list[int | None]:
        known = {other: data + place * each for other, place in zip(self.far, places, strict=True)}
        return [known.get(other) for other in range(self.size)]

    # --- deliveries ----------------------------------------------------------------------------------------------

    def _arriving(self, exchange: Exchange) -> _Arrivals:
        known = self._known.get(exchange)
        if known is None:
            known = _Arrivals(exchange, self.members, self.rank, self.cut[exchange.phase])
            self._known.put(exchange, known)
        return known

    def delivery(self, exchange: Exchange) -> Delivery | None:
        known = self._known.get(exchange)
        return None if known is None else known.delivery()

    def _remember(self, delivery: Delivery) -> None:
        known = _Arrivals(delivery.exchange, self.members, self.rank, delivery.cut)
        for bucket, units in enumerate(delivery.cut):
            known.was_begun(bucket)
            known.record(bucket, delivery.incoming(units))
        self._known.put(delivery.exchange, known)

    def restart(self) -> None:
        self._known = LatestExchanges()

    def _record(self, known: _Arrivals, bucket: int, crossing: Crossing) -> Delivery:
        """Note which units of ``bucket`` arrived. Return a delivery of this bucket alone."""
        phase = known.exchange.phase
        arrived = crossing.arrived()
        arrived[[*self.near, self.rank]] = True
        if not self.networks[phase].lossless:
            arrived &= self._drawn(known.exchange)[:, self.cut[phase][bucket].numbers]
        if (phase, bucket) in self._agreements:
            arrived = self._agreed(phase, bucket, arrived)
        return known.record(bucket, arrived)

    def _drawn(self, exchange: Exchange) -> np.ndarray:
        """Return bool[N, units]: the units that the channel delivers, of all buckets."""
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
        self._copy(phase, bucket, replicated.any(axis=0))

    def _copy(self, phase: str, bucket: int, units: np.ndarray) -> None:
        """Send the ``units`` bool[count] of ``bucket`` three times, and all of them as often as the flags say."""
        for window in self._windows[phase][bucket]:
            self._channel.copies(phase, window.number, units[window.units], self._passes[phase])

    def _agreed(self, phase: str, bucket: int, arrived: np.ndarray) -> np.ndarray:
        mask, group = self._agreements[phase, bucket]
        common = torch.from_numpy(arrived[mask].astype(np.uint8)).to(device_of(group))
        dist.all_reduce(common, dist.ReduceOp.MIN, group=group)
        arrived[mask] = common.cpu().numpy().astype(bool)
        return arrived

    # --- units that must arrive ----------------------------------------------------------------------------------

    def take_reports(self, rule: GradRecovery, bucket: int, seconds: float, step: int | None = None) -> None:
        if rule.protected is None:
            return
        asked = rule.protected.late if step is None else [step] * rule.protected.sent_in(step)
        for number in asked:
            rule.protected.reported(number, self.reports(Exchange("grad", self.stream, number), bucket, seconds))

    def reports(self, exchange: Exchange, bucket: int, seconds: float) -> np.ndarray | None:
        """Return bool[N, count]: the units of this rank's ``bucket`` that others lost; ``None`` if a report is missing.

        Waits at most ``seconds`` for the reports. Call it for every exchange with units that had to arrive.
        """
        known = self._unreported.get((exchange, bucket))
        if known is None:
            raise ValueError(f"{exchange}, bucket {bucket}: nothing is left to be reported")
        transfer, chosen = known
        until, wait = time.monotonic() + min(seconds, self._patience), 1e-4
        while (lost := transfer.reports()) is None and time.monotonic() < until:
            time.sleep(wait)
            wait = min(2 * wait, 0.01)
        if lost is None:
            return None
        del self._unreported[exchange, bucket]
        must = chosen()
        lost[[*self.near, self.rank]] = False
        self._repeats[exchange.phase].report(lost[self.far], must[self.far])
        return lost

    # --- output for the user -------------------------------------------------------------------------------------

    def counters(self) -> dict[int, dict[str, int]]:
        return {} if self._channel is None else self._channel.counters()

    def rates(self) -> dict[int, dict[str, float]]:
        """Return rates towards each peer: bytes per second, least round trip in seconds, and more."""
        return {} if self._channel is None else self._channel.rates()

    def close(self) -> None:
        """Close the wire after the last exchange. Exchanges under way may stay incomplete. Nothing is reported afterwards."""
        try:
            if self._begun is not None:
                self._begun.leave(_LEAVING)
            if self._channel is not None:
                self._channel.close()
        finally:
            # Exchanges refer to the wire, and it would keep the process group and its threads until garbage is collected.
            self._begun = None
            self._unreported.clear()


class _Arrivals:
    """The units of ``exchange`` that have arrived so far, bucket by bucket, and the buckets that were begun."""

    def __init__(self, exchange: Exchange, members: Sequence[int], rank: int, cut: Sequence[BucketUnits]) -> None:
        self.exchange, self._members, self._me, self._cut = exchange, members, members[rank], cut
        self._begun: set[int] = set()
        self._arrived: dict[int, np.ndarray] = {}
        self._whole: Delivery | None = None

    def was_begun(self, bucket: int) -> bool:
        """Return whether ``bucket`` was begun before this call. The call marks it as begun."""
        before = bucket in self._begun
        self._begun.add(bucket)
        return before

    def record(self, bucket: int, arrived: np.ndarray) -> Delivery:
        """Record ``arrived`` bool[S, count] of ``bucket``. Return a delivery of that bucket alone."""
        self._arrived[bucket], self._whole = arrived, None
        return self._of({bucket: arrived})

    def delivery(self) -> Delivery:
        """Return the delivery of all buckets so far."""
        if self._whole is None:
            self._whole = self._of(self._arrived)
        return self._whole

    def _of(self, buckets: Mapping[int, np.ndarray]) -> Delivery:
        arrived = np.zeros((1, len(self._members), units_of(self._cut)), dtype=bool)
        for bucket, part in buckets.items():
            arrived[0][:, self._cut[bucket].numbers] = part
        arrived.flags.writeable = False
        return Delivery(self.exchange, self._members, [self._me], arrived, self._cut)
