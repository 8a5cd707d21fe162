"""``--transport pieces``: every source's piece reaches the owner, who adds them up; nothing is removed before it is sent.

The arithmetic of a real network, over torch's reliable collectives. A reduce-scatter adds in an order of its own, gloo's
another than NCCL's; here the order is that of the ranks, and a recorded run of ``--transport udp`` can be replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..exchange import BucketUnits, Delivery, Exchange
from ..recovery import copies, rows_for
from .base import Collective, Transfer, Transport
from .collective import CollectiveTransport


@contextlib.contextmanager
def stale_kept(buffer: torch.Tensor, units: BucketUnits, delivery: Delivery) -> Iterator[None]:
    """Within this context the replica ``buffer`` may be overwritten; what was lost of it is afterwards as it was."""
    rows, lost = rows_for(buffer.device), delivery.lost_here(units)
    stale = rows.take(buffer, units, lost)
    yield
    rows.put_(buffer, units, lost, stale)


class PieceTransport(Transport):
    """Exchanges pieces over ``group``, a torch process group."""

    in_pieces = True
    group: dist.ProcessGroup | None = None

    def reliably(
        self,
        exchange: Exchange,
        bucket: int,
        buffer: torch.Tensor,
        sent: torch.Tensor | None,
        deliver: Callable[[], Delivery],
    ) -> Transfer:
        """Exchange all of a bucket over torch, of which ``deliver()`` says afterwards what arrived."""
        received = torch.empty_like(buffer)
        if exchange.phase == "grad":
            work = dist.all_to_all_single(received, buffer, group=self.group, async_op=True)
            return Transfer(work, deliver, pieces=received)
        # all_gather_into_tensor would wait for the end of Megatron's coalescing context, which cannot be told here.
        work = dist.all_gather(list(received.chunk(self.size)), sent, group=self.group, async_op=True)

        def write() -> Delivery:
            delivery = deliver()
            copies.used_here((received,))
            with torch.no_grad(), stale_kept(buffer, self.cut["param"][bucket], delivery):
                buffer.copy_(received)
            return delivery

        return Transfer(work, write)


class Pieces(PieceTransport, CollectiveTransport):
    """Loses what a channel draws."""

    draws_sent = False

    def __init__(self, *args: Any, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(*args)
        self.group = group

    def lossless(self, phase: str) -> bool:
        # Without loss the sum is another one too.
        return self.size == 1 and super().lossless(phase)

    def begin(
        self,
        exchange: Exchange,
        bucket: int,
        buffer: torch.Tensor,
        collective: Collective,
        sent: torch.Tensor | None = None,
    ) -> Transfer:
        return self.reliably(exchange, bucket, buffer, sent, lambda: self.foresee(exchange))
