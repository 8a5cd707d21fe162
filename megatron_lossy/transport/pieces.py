"""``--transport pieces``: each source's piece reaches the owner, which adds them up. Nothing is removed before.

It does the arithmetic of a real network over torch's reliable collectives. A reduce-scatter adds in an order of its
own, which differs between gloo and NCCL. Here the order is that of the ranks, so that a recorded run of ``--transport
udp`` can be replayed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..base.exchange import BucketUnits, Delivery, Exchange, Lost
from ..recovery import Gradients, GradRecovery, Parameters, Stale
from ..recovery.rows import used_here
from .base import CollectiveWire, Transfer, Wire

#: Bytes from which on large pages are worth a call.
_LARGE = 2**22


class PieceWire(Wire):
    """Exchanges pieces over ``group``, a torch process group."""

    group: dist.ProcessGroup | None = None

    def _scatter_reliably(
        self, x: Gradients, rule: GradRecovery, kept: Any, deliver: Callable[[], Delivery]
    ) -> Transfer:
        """Exchange the pieces of all gradients over torch. ``deliver()`` returns afterwards the delivery to apply."""
        coded = self.coded.get("grad")
        sent = x.buffer if coded is None else coded.gradients(x.exchange, x.bucket, x.buffer)
        pieces = room_for(sent)
        work = dist.all_to_all_single(pieces, sent, group=self.group, async_op=True)

        def arrived() -> Delivery:
            delivery = deliver()
            if coded is not None:
                used_here((sent,))
            self._combine(pieces, delivery, kept, x, rule)
            return delivery

        return Transfer(work, arrived, apart=True)

    def _wide(self, x: Gradients) -> Gradients:
        """Return ``x`` with gradients in float32, for codes: owners add up more than half precision can hold."""
        return replace(x, buffer=x.buffer.float())

    def _combine(self, arrived: torch.Tensor, delivery: Delivery, kept: Any, x: Gradients, rule: GradRecovery) -> None:
        """Let ``rule`` put the recovered sum of ``arrived``, pieces [N * shard] or codes of them, into the output."""
        used_here((arrived,))
        pieces = arrived
        if "grad" in self.coded:
            # Values take the place of the gradients, which are free unless the rule keeps some when reports come.
            pieces = x.buffer if rule.protected is None or rule.protected.must is None else room_for(x.buffer)
            used_here((pieces,))
            if pieces is not x.buffer:
                pieces.chunk(self.size)[self.rank].copy_(x.buffer.chunk(self.size)[self.rank])
            self.coded["grad"].values(x.bucket, arrived, pieces)
        rule.combine(pieces, delivery, kept, x)

    def _renew(self, received: torch.Tensor, x: Parameters, rule: Stale, own: Any, delivery: Delivery) -> None:
        """Put the values of ``received`` [N * shard], or codes of them, that arrived into the replica.

        ``own``: of ``rule.send``.
        """
        used_here((received,))
        stale = rule.put_aside(x.buffer, delivery)
        if "param" not in self.coded:
            x.buffer.copy_(received)
        else:
            self.coded["param"].values(x.bucket, received, x.buffer)
            mine = x.buffer.chunk(self.size)[self.rank]
            if mine.data_ptr() != x.sent.data_ptr():
                mine.copy_(x.sent)
        rule.put_back(x.buffer, delivery, stale)
        rule.sent(x, own, delivery)

    def _gather_reliably(self, x: Parameters, rule: Stale, deliver: Callable[[], Delivery]) -> Transfer:
        """Exchange all parameters over torch. ``deliver()`` returns afterwards the delivery to apply."""
        with torch.no_grad():
            own = rule.send(x)
        coded = self.coded.get("param")
        sent = x.sent if coded is None else coded.parameters(x.bucket, x.sent)
        received = sent.new_empty(self.size * len(sent))
        # all_gather_into_tensor would wait for the end of Megatron's coalescing context, which is unknown here.
        work = dist.all_gather(list(received.chunk(self.size)), sent, group=self.group, async_op=True)

        def arrived() -> Delivery:
            delivery = deliver()
            if coded is not None:
                used_here((sent,))
            self._renew(received, x, rule, own, delivery)
            return delivery

        return Transfer(work, arrived, apart=True)


def room_for(buffer: torch.Tensor) -> torch.Tensor:
    """Return memory for pieces like ``buffer``: on a CPU in large pages, where small ones cost more than the sum."""
    pieces = torch.empty_like(buffer)
    start = -(-pieces.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (pieces.data_ptr() + pieces.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if pieces.device.type == "cpu" and size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # Advice: a kernel that cannot follow it says so, and nothing changes.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return pieces


class Pieces(PieceWire, CollectiveWire):
    """Loses the units that a channel draws."""

    def __init__(self, *args: Any, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(*args)
        self.group = group

    def lossless(self, phase: str) -> bool:
        # Without loss the sum differs too: its order is another.
        return self.size == 1 and super().lossless(phase)

    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        delivery = self.foresee(x.exchange)
        x = self._looking_ahead(x, rule.units)
        if "grad" in self.coded:
            x = self._wide(x)
        with torch.no_grad():
            kept = None if rule.protected is None else rule.protected.leave_out(delivery, x)
        return self._scatter_reliably(x, rule, kept, lambda: delivery)

    def all_gather(self, x: Parameters, rule: Stale) -> Transfer:
        delivery = self.foresee(x.exchange)
        return self._gather_reliably(x, rule, lambda: delivery)

    def note_all_reduce(self, x: Callable[[], Gradients], rule: GradRecovery) -> None:
        """Do nothing: an all-reduced sum does not show its pieces."""

    def _draw(self, exchange: Exchange) -> Delivery:
        # Only a sender that chooses asks what of its own data arrives.
        me, everyone = [self.members[self.rank]] * self.size, self.members
        sent = partial(self._links, exchange, me, everyone)
        return self._delivery(exchange, self._links(exchange, everyone, me), sent)

    def _lost(self, delivery: Delivery, units: BucketUnits) -> Lost:
        return delivery.lost_here(units)
