"""``--act-transport udp``: messages between two pipeline stages as datagrams (docs/boundaries.md#over-udp).

All packets of a message must arrive, and have parity. The receiver decides at the end of the message: if
parity leaves at most the tolerated number missing, it takes the message as it is; else it asks for all missing packets.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...config import LossyConfig
from ...transport.ends import end_for
from ...transport.leaving import Leaving, patiently
from ...transport.staging import Departure, arrival, device_of, patience_of, staged
from ...transport.udp.engine import Channel, Outcome
from ...transport.udp.engine import Transfer as Datagrams
from .flags import BOUNDARY_PHASES


class Received(NamedTuple):
    """The packets of a message that came, ``arrived`` bool[packets], and the message's outcome."""

    arrived: np.ndarray
    outcome: Outcome


class Link:
    """Messages between the stages of two ranks: ``first`` sends activations, ``second`` their gradients.

    ``packets``: the most packets of a message. ``packet``: bytes of a packet.
    """

    def __init__(self, ranks: tuple[int, int], rank: int, channel: Channel, packets: int, packet: int) -> None:
        self.name = f"stages on ranks {ranks[0]} and {ranks[1]}"
        self.rank = rank
        self._place = ranks.index(rank)
        self._peer = ranks[1 - self._place]
        self._channel = channel
        self._packets = packets
        self._packet = packet
        self._begun = dict.fromkeys(BOUNDARY_PHASES, 0)

    def next(self, phase: str) -> int:
        """Return the number of the message that begins. Both ranks count alike, because messages keep their order."""
        self._begun[phase] += 1
        return self._begun[phase] - 1

    def send(self, phase: str, number: int, memory: torch.Tensor, code: tuple[int, int]) -> Datagrams:
        """Send the bytes of ``memory``, which may change when this returns: the engine has copied them."""
        size = _size(memory)
        must = np.zeros((2, self._packets), dtype=bool)
        must[1 - self._place, : -(-size // self._packet)] = True
        return self._channel.send(phase, number, 0, self._only_other(memory), must, code, size)

    def post(
        self, phase: str, number: int, memory: torch.Tensor, tolerance: int, dropped: np.ndarray | None
    ) -> Callable[[float], Received]:
        """Return a function that waits so many seconds until the message is in ``memory``.

        The function raises :class:`~megatron_lossy.transport.udp.PeerLost` or TimeoutError.
        """
        size = _size(memory)
        posted = self._channel.post(phase, number, 0, self._only_other(memory), tolerance, dropped, size, math.inf)
        posted.keep = memory
        packets = -(-size // self._packet)

        def wait(seconds: float) -> Received:
            arrived = posted.wait(seconds)[1 - self._place, :packets]
            return Received(arrived, posted.outcome(1 - self._place))

        return wait

    def _only_other(self, memory: torch.Tensor) -> list[int | None]:
        return [None if rank == self._place else memory.data_ptr() for rank in range(2)]

    def counters(self) -> dict[int, dict[str, int]]:
        """Return counters of the other rank, by its number in the world."""
        return {self._peer: self._channel.counters()[1 - self._place]}

    def rates(self) -> dict[int, dict[str, float]]:
        """Return rates towards the other rank."""
        return {self._peer: self._channel.rates()[1 - self._place]}

    def close(self) -> None:
        self._channel.close()


class StageLinks:
    """The links of this process, made by all ranks of the world together. Links open with their first message."""

    def __init__(self, config: LossyConfig) -> None:
        self._config = config
        self._rank = dist.get_rank()
        self._patience = patience_of(None)
        # A drawn prefix keeps keys of dead ranks out: torchrun may use one store for all its attempts.
        drawn = [os.urandom(8).hex()]
        dist.broadcast_object_list(drawn, 0)
        self._prefix = f"megatron_lossy/udp/stages/{drawn[0]}"
        self._links: dict[tuple[tuple[int, int], int, int], Link] = {}
        self._leaving = Leaving(config.udp_memory, self._patience)
        self._sender: ThreadPoolExecutor | None = None

    @property
    def all(self) -> list[Link]:
        """The links that were opened."""
        return list(self._links.values())

    def send(
        self, phase: str, tensor: torch.Tensor, peer: int, packet: int, code: tuple[int, int], varies: bool = False
    ) -> Sending:
        """Begin to send the contiguous ``tensor`` to the global rank ``peer``, in packets of ``packet`` bytes.

        Each ``code[0]`` packets get ``code[1]`` packets of parity. ``varies``: whether messages have different lengths;
        then messages of similar lengths share a link.
        """
        link = self._link(phase, tensor, peer, packet, sends=True, varies=varies)
        number, memory = link.next(phase), tensor.detach()
        if not staged(memory):
            return Sending(self, link.send(phase, number, memory, code), _size(tensor))
        departure = Departure(memory)
        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="megatron-lossy-stages")

        def leave() -> None:
            departure.ready()
            # This stays on this thread: the next message makes the channel forget this one, and no thread may ask then.
            self.left(link.send(phase, number, departure.memory, code), _size(tensor))

        return Sending(self, self._sender.submit(leave), _size(tensor))

    def receive(
        self,
        phase: str,
        tensor: torch.Tensor,
        peer: int,
        packet: int,
        tolerance: int = 0,
        dropped: np.ndarray | None = None,
        varies: bool = False,
    ) -> Callable[[], Received]:
        """Begin to receive the contiguous ``tensor`` from the global rank ``peer``, in packets of ``packet`` bytes.

        Return a function that waits until the message is there; call it once. ``tolerance``: packets that may be missing for good. ``dropped`` bool[packets + parities]: packets that count as
        lost. ``varies``: see :meth:`send`.
        """
        link = self._link(phase, tensor, peer, packet, sends=False, varies=varies)
        memory = tensor.detach()
        there = arrival(memory) if staged(memory) else memory
        wait = link.post(phase, link.next(phase), there, tolerance, dropped)

        def arrived() -> Received:
            received = patiently(wait, self._patience)
            if there is not memory:
                memory.copy_(there, non_blocking=True)
            return received

        return arrived

    def _link(self, phase: str, tensor: torch.Tensor, peer: int, packet: int, sends: bool, varies: bool) -> Link:
        """Return the link with ``peer`` for ``tensor``. A missing link is opened, together with ``peer``."""
        assert tensor.is_contiguous()
        earlier = sends == (phase == "act")  # this rank has the earlier one of the two stages
        ranks, size = (self._rank, peer) if earlier else (peer, self._rank), _size(tensor)
        if varies:
            size = packet << (-(-size // packet) - 1).bit_length()
        key = (ranks, size, packet)
        if key not in self._links:
            channel = self._open(ranks, size, packet)
            self._links[key] = Link(ranks, self._rank, channel, -(-size // packet), packet)
        return self._links[key]

    def _open(self, ranks: tuple[int, int], size: int, packet: int) -> Channel:
        name = f"{ranks[0]}-{ranks[1]}-{size}-{packet}"
        return end_for(self._config).open(
            f"stages on ranks {ranks[0]} and {ranks[1]}",
            ranks.index(self._rank),
            2,
            dist.distributed_c10d._get_default_store(),
            f"{self._prefix}/{name}",
            {phase: [(size, packet)] for phase in BOUNDARY_PHASES},
            alike=name,
            reported=BOUNDARY_PHASES,
            phases=BOUNDARY_PHASES,
            called=ranks,
        )

    def left(self, sending: Datagrams, size: int) -> None:
        """Keep a message until it has left. Waits only if more than ``--udp-memory`` bytes wait to leave."""
        self._leaving.add(sending, size)
        while self._leaving.full:
            self._leaving.wait()

    def close(self) -> None:
        """Close the links after the last message; sent messages still arrive."""
        if self._sender is not None:
            self._sender.shutdown()
        for link in self.all:
            link.close()


class Sending:
    """A message on its way. Waiting for it does not wait for its receiver, which may wait for this rank."""

    def __init__(self, links: StageLinks, begun: Datagrams | Future[None], size: int) -> None:
        self._links: StageLinks | None = links
        self._begun = begun
        self._size = size

    def wait(self) -> None:
        links, self._links = self._links, None
        if isinstance(self._begun, Future):
            self._begun.result()
        elif links is not None:
            links.left(self._begun, self._size)


def lost_by_any(lost: np.ndarray, group: dist.ProcessGroup) -> np.ndarray:
    """Return bool[packets]: the packets of a common message that any rank of ``group`` lost. A collective call."""
    common = torch.from_numpy(lost.astype(np.uint8)).to(device_of(group))
    dist.all_reduce(common, dist.ReduceOp.MAX, group=group)
    return common.cpu().numpy().astype(bool)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
