"""The contestants: a plain TCP connection for each pair of ranks, gloo, and the lossy transports over TCP and UDP.

A :class:`Team` is the ranks of one of them, each a process on a node of the lab that waits for orders. Orders and
results go through pipes, so that nothing but the exchange crosses the link while it is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab import INTERFACE, Lab
from megatron_lossy.base.device import all_gather_single, reduce_scatter_single
from megatron_lossy.base.flags import add_flags, from_namespace
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_all_gather, lossy_reduce_scatter

PHASES = ("reduce-scatter", "all-gather")
#: The contestants. The second word is the congestion control of their TCP connections.
NAMES = ("tcp bbr", "tcp cubic", "gloo bbr", "gloo reno", "stream bbr", "ours")
_CONNECT_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
#: Seconds from an order to its start, so that all ranks can keep it.
_HEAD_START = 0.004


def our_config(flags: str, transport: str = "udp") -> LossyConfig:
    """Return the configuration of ours, or of streams, with more ``flags``."""
    parser = add_flags(argparse.ArgumentParser("--flags"), LossyConfig, "loss")
    always = ["--transport", transport, "--udp-interface", INTERFACE]
    return from_namespace(LossyConfig, parser.parse_args([*always, *shlex.split(flags)]))


@dataclass(frozen=True)
class SentCounts:
    """Counts of a rank of ours: ``datagrams`` sent, of these ``again`` and ``copies``; protected packets lost."""

    datagrams: int = 0
    again: int = 0
    copies: int = 0
    must: int = 0
    must_lost: int = 0


def _join_world(rank: int, addresses: Sequence[str], port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    where = f"tcp://{addresses[0]}:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=len(addresses))


class Gloo:
    """torch's own collectives. Gloo makes a reduce-scatter of an all-reduce, and sends more for it."""

    def __init__(self, rank: int, addresses: Sequence[str], port: int, *_: object) -> None:
        _join_world(rank, addresses, port)

    def reduce_scatter(self, shard: torch.Tensor, buffer: torch.Tensor) -> None:
        reduce_scatter_single(shard, buffer)

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor) -> None:
        all_gather_single(buffer, shard)

    def lost(self) -> float:
        return 0.0


class PlainTcp:
    """A TCP connection between each two ranks, and nothing else: each sends a shard to each of the others."""

    def __init__(self, rank: int, addresses: Sequence[str], port: int, *_: object) -> None:
        self._rank = rank
        self._peers: dict[int, socket.socket] = {}
        with socket.create_server((addresses[rank], port + rank), backlog=len(addresses)) as server:
            for peer in range(rank):
                self._peers[peer] = _connect(addresses[peer], port + peer)
                self._peers[peer].sendall(bytes([rank]))
            while len(self._peers) < len(addresses) - 1:
                connection, _ = server.accept()
                self._peers[connection.recv(1)[0]] = connection
        for connection in self._peers.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reduce_scatter(self, shard: torch.Tensor, buffer: torch.Tensor) -> None:
        parts = buffer.chunk(len(self._peers) + 1)
        arrived = {peer: torch.empty_like(shard) for peer in self._peers}
        self._swap(parts, arrived)
        shard.copy_(parts[self._rank])
        for peer in sorted(arrived):
            shard += arrived[peer]

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor) -> None:
        parts = buffer.chunk(len(self._peers) + 1)
        parts[self._rank].copy_(shard)
        self._swap([shard] * len(parts), {peer: parts[peer] for peer in self._peers})

    def _swap(self, send: Sequence[torch.Tensor], arrived: dict[int, torch.Tensor]) -> None:
        def send_to(peer: int) -> None:
            self._peers[peer].sendall(memoryview(send[peer].numpy()).cast("B"))

        def receive_from(peer: int) -> None:
            left = memoryview(arrived[peer].numpy()).cast("B")
            while left:
                left = left[self._peers[peer].recv_into(left) :]

        threads = [threading.Thread(target=work, args=(peer,)) for work in (send_to, receive_from) for peer in arrived]
        for thread in threads[1:]:
            thread.start()
        threads[0].run()
        for thread in threads[1:]:
            thread.join()

    def lost(self) -> float:
        return 0.0


def _connect(address: str, port: int) -> socket.socket:
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


class OurTransport:
    """The public collectives over UDP, or streams. Every size has a group of its own; the process group makes the session."""

    def __init__(
        self, rank: int, addresses: Sequence[str], port: int, shards: Sequence[int], config: LossyConfig
    ) -> None:
        _join_world(rank, addresses, port)
        self._groups = {shard: LossyGroup.create(config, [BucketSpec(shard)]) for shard in shards}
        self._rank = rank
        self._step = {(phase, shard): 0 for phase in ("grad", "param") for shard in shards}
        self._must = self._must_lost = 0

    def reduce_scatter(self, shard: torch.Tensor, buffer: torch.Tensor) -> None:
        self._last = (self._groups[len(shard)], "grad", self._step["grad", len(shard)])
        lossy_reduce_scatter(self._last[0], 0, shard, buffer, self._last[2])
        self._step["grad", len(shard)] += 1

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor) -> None:
        self._last = (self._groups[len(shard)], "param", self._step["param", len(shard)])
        lossy_all_gather(self._last[0], 0, buffer, shard, self._last[2])
        self._step["param", len(shard)] += 1

    def lost(self) -> float:
        group, phase, step = self._last
        if phase == "grad":  # outside the timed part: others report their losses
            rule = group.grads[0].protected
            group.finish_step(step, True)
            if (
                rule is not None and rule.must is not None and step not in rule.late
            ):  # on a busy machine they may not have said so yet
                self._must += int(rule.must.sum())
                self._must_lost += int((rule.must & rule.final.mask).sum())
        delivery = group.delivery(phase, step)
        arrived = delivery.arrived[0][[source for source in delivery.sources if source != self._rank]]
        return 1 - float(arrived.mean())

    def sent(self) -> SentCounts:
        """Return the counts since the beginning, to all ranks."""
        counters = [peer for group in self._groups.values() for peer in group.wire.counters().values()]
        datagrams, again, copies = (
            sum(counts.get(name, 0) for counts in counters) for name in ("sent", "resent", "copies")
        )
        return SentCounts(datagrams, again, copies, self._must, self._must_lost)


@dataclass(frozen=True)
class RankTimes:
    """A rank's part of one exchange, in seconds; ``lost``: share of the packets sent to it; ``busiest``: of ``cpu``,
    that of the thread with the most."""

    started: float
    ended: float
    cpu: float
    lost: float
    busiest: float


def thread_seconds() -> dict[str, float]:
    """Return CPU seconds of each thread of this process so far."""
    seconds = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            seconds[thread.name] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def span(ranks: Sequence[RankTimes]) -> tuple[float, float]:
    """Return the beginning and the end of an exchange: the last rank's start, and the last rank's end."""
    return max(rank.started for rank in ranks), max(rank.ended for rank in ranks)


class ExchangeTimeout(RuntimeError):
    """An exchange took longer than it may."""


def _work(
    orders: Connection, name: str, rank: int, addresses: Sequence[str], port: int, shards: Sequence[int], config: Any
) -> None:
    """Run a rank: connect, exchange on each order, and end with the process that gives the orders."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    kinds: dict[str, type[Any]] = {"gloo": Gloo, "tcp": PlainTcp, "stream": OurTransport, "ours": OurTransport}
    exchanger: Any = kinds[name.split()[0]](rank, addresses, port, shards, config)
    ranks = len(addresses)
    tensors = {shard: (torch.ones(shard), torch.ones(ranks * shard)) for shard in shards}
    orders.send(None)
    with contextlib.suppress(EOFError):
        while True:
            phase, size, start = orders.recv()
            if phase == "sent":
                orders.send(exchanger.sent())
                continue
            shard, buffer = tensors[size]
            shard.fill_(1.0)
            buffer.fill_(1.0)
            time.sleep(max(0.0, start - time.monotonic()))
            threads = thread_seconds()
            cpu, started = time.process_time(), time.monotonic()
            if phase == "reduce-scatter":
                exchanger.reduce_scatter(shard, buffer)
            else:
                exchanger.all_gather(buffer, shard)
            ended = time.monotonic()
            cpu = time.process_time() - cpu
            busiest = max((now - threads.get(name, 0.0) for name, now in thread_seconds().items()), default=0.0)
            done = RankTimes(started, ended, cpu, exchanger.lost(), busiest)
            if phase == "reduce-scatter":
                # With what was lost before, a sum may be more. A step of the coarsest code is a seventh.
                feeds_back = getattr(config, "grad_recovery", None) == "error-feedback"
                least, most = ranks, torch.inf if feeds_back else ranks
                if getattr(config, "wire_bits", None):
                    least, most = 0.8 * least, 1.2 * most
                assert done.lost or bool(((shard >= least) & (shard <= most)).all()), "the sum is wrong"
            orders.send(done)


class Team:
    """The ranks of one contestant, connected. ``config``: of ours."""

    _port = 20_000

    def __init__(self, lab: Lab, name: str, ranks: int, shards: Sequence[int], config: Any) -> None:
        self.name = name
        nodes = [lab.nodes[rank % len(lab.nodes)] for rank in range(ranks)]
        addresses = [node.address for node in nodes]
        # Other ports for each team, as those of closed connections stay in use for a while.
        Team._port = 20_000 + (Team._port + 100) % 10_000
        fork = multiprocessing.get_context("fork")
        self._orders: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for rank, node in enumerate(nodes):
                mine, its = fork.Pipe()
                arguments = (its, name, rank, addresses, Team._port, shards, config)
                process = fork.Process(target=_work, args=arguments, daemon=True)
                node.do(process.start)
                its.close()
                self._orders.append(mine)
                self._processes.append(process)
            self._gather(_CONNECT_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [process.pid for process in self._processes]

    def exchange(self, phase: str, shard: int, limit: float) -> list[RankTimes]:
        """Run one exchange; return it by rank. Raise :class:`ExchangeTimeout` after ``limit`` seconds, which ends the team."""
        order = (phase, shard, time.monotonic() + _HEAD_START)
        for orders in self._orders:
            orders.send(order)
        return self._gather(limit)

    def sent(self) -> list[SentCounts]:
        """Return the counts since the beginning, to all ranks."""
        for orders in self._orders:
            orders.send(("sent", 0, 0.0))
        return self._gather(_CONNECT_SECONDS)

    def _gather(self, limit: float) -> list[Any]:
        until = time.monotonic() + limit
        answers = []
        for orders in self._orders:
            if not orders.poll(max(0.0, until - time.monotonic())):
                raise ExchangeTimeout(f"{self.name}: more than {limit:g} s")
            try:
                answers.append(orders.recv())
            except EOFError:
                raise RuntimeError(f"{self.name}: a rank ended; its error is above") from None
        return answers

    def close(self) -> None:
        """End its processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for orders in self._orders:
            orders.close()
