"""``--transport stream``: what becomes of deadlines, stopped ranks, broken connections, strangers and mutated frames."""

import ctypes
import math
import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import AbstractContextManager, suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_reduce_scatter
from megatron_lossy.transport.address import resolve
from megatron_lossy.transport.settings import Settings
from megatron_lossy.transport.stream import link
from megatron_lossy.transport.stream.cipher import Cipher, NoCipher
from megatron_lossy.transport.stream.frames import DATA, END, Header, MalformedFrame, Reader, Writer
from megatron_lossy.transport.stream.host import Host
from tests.programs import until
from tests.ranks import RankFailed, run_ranks
from tests.test_udp_engine import in_threads

pytestmark = pytest.mark.shows(
    "streams: deadlines, stopped ranks, broken connections, strangers, mutated frames", device=False
)

UNIT = 1000
UNITS = 4000  # more than the kernel keeps of it
LONG = 60.0  # seconds


class Ranks(AbstractContextManager):
    """Streams of ranks in this process, a host each, or on the nodes of a ``lab``. ``pause``: of relays between them.

    ``through(port)``: the port that a rank gets.
    """

    def __init__(self, size=2, units=UNITS, through=None, pause=None, lab=None, **flags):
        self.relays = {}
        if pause is not None:
            through = lambda port: self.relays.setdefault(port, Relay(port, pause)).port
        self.size, self.units, self.store = size, units, dist.HashStore()
        made = Settings(**{"deadline": LONG} | flags)
        if lab is None:
            self.hosts = [Host(made, "127.0.0.1") for _ in range(size)]
        else:
            self.hosts = [node.do(Host, made, node.address) for node in lab.nodes]
        self.channels = []
        if through is not None:
            link.resolve = lambda address, port: (socket.AF_INET, (address, through(port)))
        self.channels = in_threads(size, self._open)
        for opened in self.channels:
            if isinstance(opened, Exception):
                self.close()
                raise opened

    def _open(self, rank):
        cut = {"grad": [(self.units * UNIT, UNIT)] * 2}
        return self.hosts[rank].open("dense", rank, self.size, self.store, "x", cut)

    def exchange(self, number, ranks=None, bucket=0):
        """bool[N, N, units]: for each of ``ranks`` the units that arrived in the exchange ``number``. Others do not take part."""
        taking_part = range(self.size) if ranks is None else ranks

        def run(rank):
            sent = np.full((self.size, self.units * UNIT), 16 * (number % 15) + rank, np.uint8)
            got = np.full((self.size, self.units * UNIT), 255, np.uint8)
            at = lambda rows: [None if other == rank else rows[other].ctypes.data for other in range(self.size)]
            transfer = self.channels[rank].post("grad", number, bucket, at(got))
            self.channels[rank].send("grad", number, bucket, at(sent))
            transfer.finish(LONG)
            for other in range(self.size):
                if other != rank:
                    expected = np.where(np.repeat(transfer.arrived[other], UNIT), 16 * (number % 15) + other, 255)
                    np.testing.assert_array_equal(got[other], expected)
            return transfer.arrived

        results = in_threads(self.size, lambda rank: run(rank) if rank in taking_part else None)
        for one in results:
            if isinstance(one, Exception):
                raise one
        return results

    def close(self):
        link.resolve = resolve
        for one in (*self.relays.values(), *self.hosts):
            one.close()

    def __exit__(self, *_):
        self.close()


class Relay:
    """Carries the bytes of connections to ``port``, at a limited rate, until they are cut."""

    def __init__(self, port, pause=0.0):
        self._to, self._pause = port, pause  # seconds for 16 KiB
        self.passes = threading.Event()
        self.passes.set()
        self.most, self.goes = math.inf, threading.Event()  # after so many bytes one direction waits
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.pairs, self.calls = [], []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            for one in (near, far):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
            self.pairs.append((near, far))
            self.calls.append(bytearray())
            for source, into, said in ((near, far, self.calls[-1]), (far, near, bytearray())):
                threading.Thread(target=self._carry, args=(source, into, said), daemon=True).start()

    def _carry(self, source, into, said):
        try:
            while data := source.recv(2**14):
                said += data
                self.passes.wait()
                if len(said) > self.most:
                    self.goes.wait()
                time.sleep(self._pause)
                into.sendall(data)
        except OSError:
            pass
        for one in (source, into):
            one.close()

    def cut(self):
        for one in (one for pair in self.pairs for one in pair):
            with suppress(OSError):  # a stranger's is closed
                one.shutdown(socket.SHUT_RDWR)
        self.pairs.clear()

    def close(self):
        self._listener.close()
        self.passes.set()
        self.goes.set()


@pytest.mark.parametrize("flags", [{}, {"cipher": "none"}, {"key": b"0123456789abcdef"}])
def test_everything_arrives(flags):
    with Ranks(3, **flags) as ranks:
        for number in range(3):
            assert all(arrived.all() for arrived in ranks.exchange(number))


def test_what_comes_early_waits_for_its_exchange():
    with Ranks(2, memory=2**20, deadline=LONG) as ranks:
        early = threading.Thread(target=ranks.exchange, args=(0, [1]))
        early.start()  # four times what the memory holds
        channel = ranks.channels[0]
        until(lambda: channel._early_bytes > 2**19)
        [arrived, _] = ranks.exchange(0, [0])
        early.join()
        assert arrived.all() and channel._early_bytes == 0


def test_what_comes_early_and_has_no_room_does_not_block_what_is_waited_for():
    with Ranks(2, memory=2**20, deadline="auto") as ranks:
        later, first = (threading.Thread(target=ranks.exchange, args=(0, [1], bucket)) for bucket in (1, 0))
        later.start()
        channel = ranks.channels[0]
        until(lambda: channel._early_bytes > 2**19)
        first.start()
        assert ranks.exchange(0, [0], bucket=0)[0].all()
        [arrived, _] = ranks.exchange(0, [0], bucket=1)
        later.join()
        first.join()
        assert not arrived.all() and int((~arrived).sum()) == channel.counters()[1]["early_dropped"]


def test_a_deadline_ends_an_exchange_and_the_next_is_whole():
    """The link carries nothing for a while: what is not in the kernel is dropped, and does not delay the next exchange."""
    with Ranks(2, deadline=1.0, pause=0.0) as ranks:
        [relay] = ranks.relays.values()
        relay.passes.clear()
        arrived = ranks.exchange(0)
        lost = [UNITS - int(one[1 - rank].sum()) for rank, one in enumerate(arrived)]
        assert all(lost), lost
        for channel in ranks.channels:
            assert not channel._transfers[0, 0]._into  # nothing is written any more
        relay.passes.set()
        for channel in ranks.channels:
            channel.deadline = LONG
        assert all(one.all() for one in ranks.exchange(1))


def test_a_broken_connection_is_loss_until_it_is_back():
    with Ranks(2, deadline="auto", pause=0.0) as ranks:
        [relay] = ranks.relays.values()
        assert all(one.all() for one in ranks.exchange(0))
        relay.passes.clear()
        exchange = threading.Thread(target=ranks.exchange, args=(1,))
        exchange.start()
        for channel in ranks.channels:  # it has begun, and cannot end
            until(lambda me=channel: me._transfers[0, 0].number == 1 and me.links[1 - me.rank].counters["sent"] > UNITS)
        relay.cut()
        relay.passes.set()
        exchange.join(LONG)
        assert not exchange.is_alive()
        for one in ranks.channels:
            until(lambda one=one: all(link.connection for link in one.links.values()))
            assert one.counters()[1 - one.rank]["broken"] == 1
        assert all(one.all() for one in ranks.exchange(2))


def one_way(ranks, number):
    """Begin to send a message from rank 1 to rank 0. Returns the transfers of both."""
    got, sent = (np.full(UNITS * UNIT, value, np.uint8) for value in (0, 1))
    taking, giving = (
        channel.post("grad", number, 0, [None, at]) for channel, at in zip(ranks.channels, (got.ctypes.data, None))
    )
    taking.keep, giving.keep = got, sent
    ranks.channels[1].send("grad", number, 0, [sent.ctypes.data, None])
    return taking, giving


def finish(*transfers):
    for one in transfers:
        one.finish(LONG)


def test_a_rank_that_only_takes_is_no_silent_one():
    with Ranks(2, peer_timeout=2.0, pause=0.01) as ranks:
        taking, giving = one_way(ranks, 0)
        got = taking.keep
        finish(giving, taking)
        assert taking.arrived[1].all() and got.all()


def test_nothing_crosses_while_nothing_is_waited_for(monkeypatch):
    """Else BBR takes a frame now and then for the rate of the path, and begins each exchange slowly."""
    asked = []
    monkeypatch.setattr(link.Link, "ask", lambda one: asked.append(one))
    with Ranks(2, units=10) as ranks:
        [channel, _] = ranks.channels
        ranks.exchange(0)
        asked.clear()
        looked = threading.Event()
        channel.host.ask(channel._look)
        channel.host.ask(looked.set)
        assert looked.wait(LONG) and not asked
        exchange = threading.Thread(target=ranks.exchange, args=(1, [0]))
        exchange.start()
        until(lambda: asked)
        ranks.exchange(1, [1])
        exchange.join()


def test_strangers_and_replays_change_nothing():
    with Ranks(2, pause=0.0) as ranks:
        [relay] = ranks.relays.values()
        [listening, _] = ranks.hosts
        name, before = ranks.channels[0].id, listening.refused
        refused = (b"GET / HTTP/1.1\r\n\r\n", b"mlstream" + bytes(68), b"mlstream" + name + bytes([1]) + bytes(51))
        for text in (*refused, bytes(relay.calls[0])):
            with socket.create_connection(("127.0.0.1", listening.port)) as stranger:
                stranger.sendall(text)
                with suppress(ConnectionResetError):
                    while stranger.recv(1000):  # to a replay it says something, and closes then
                        pass
        assert listening.refused == before + len(refused)
        until(lambda: ranks.channels[0].counters()[1] == {"connected": 1, "malformed": 1})
        assert all(one.all() for one in ranks.exchange(0))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_after_faults_in_any_order_all_ranks_are_connected(seed):
    draw, number = random.Random(seed), 0
    with Ranks(3, units=40, deadline=0.2, pause=0.0) as ranks:
        for _ in range(40):
            relay = draw.choice(list(ranks.relays.values()))
            fault = draw.choice(["cut", "stall", "go", "stranger", "", ""])
            if fault == "cut":
                relay.cut()
            elif fault == "stranger":
                with socket.create_connection(("127.0.0.1", relay.port)) as stranger:
                    stranger.sendall(draw.randbytes(draw.choice([1, 80, 1000])))
            elif fault:
                (relay.passes.clear if fault == "stall" else relay.passes.set)()
            else:
                ranks.exchange(number := number + 1)
        for relay in ranks.relays.values():
            relay.passes.set()
        for channel in ranks.channels:
            channel.deadline = 5.0

        def whole():
            nonlocal number
            number += 1
            return all(one.all() for one in ranks.exchange(number))

        until(whole)
        until(lambda: sum(host.refused for host in ranks.hosts))


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_that_is_not_reached_is_named_on_all_ranks(silent):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        if silent:
            closed.listen(0)
            fillers = [socket.create_connection(closed.getsockname()) for _ in range(1)]
        with pytest.raises(
            UsageError, match=r"--transport stream: rank 1 of dense \(.*\) does not reach rank 0"
        ) as error:
            Ranks(2, peer_timeout=1.5, through=lambda port: closed.getsockname()[1])
        assert "--udp-port" in str(error.value)
        assert silent or "Connection refused" in str(error.value)
        if silent:
            fillers[0].close()


def test_a_port_that_is_taken_and_an_unknown_algorithm_are_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"--udp-port {port}: Address already in use on 127.0.0.1"):
            Host(Settings(port=port), "127.0.0.1")
    with pytest.raises(UsageError, match="--udp-rate none-such: No such file or directory"):
        Host(Settings(congestion="none-such"), "127.0.0.1")


# --- frames --------------------------------------------------------------------------------------------------------------


def ends(plain):
    key = bytes(range(16))
    seal, open_ = (NoCipher(), NoCipher()) if plain else (Cipher(key, True), Cipher(key, False))
    return Writer(seal, 64), Reader(open_, 64)


def read(reader, stream, sizes):
    """The frames of ``stream``, which comes in parts of ``sizes``, and whether the rest was refused."""
    found, sizes = [], list(sizes)
    while stream:
        room = reader.room()
        size = min(sizes.pop() if sizes else len(stream), len(room), len(stream))
        room[:size], stream = stream[:size], stream[size:]
        reader.came(size)
        try:
            while (frame := reader.next()) is not None:
                found.append((frame[0], bytes(frame[1])))
        except MalformedFrame:
            return found, True
    return found, False


@settings(deadline=None)
@given(
    payloads=st.lists(st.binary(max_size=64), max_size=8),
    sizes=st.lists(st.integers(1, 100), max_size=30),
    flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), max_size=3),
    dropped=st.tuples(st.integers(0, 2**16), st.integers(0, 50)),
    plain=st.booleans(),
)
def test_mutated_frames_are_refused_and_none_is_taken_for_another(payloads, sizes, flips, dropped, plain):
    writer, reader = ends(plain)
    sent, stream = [], b""
    for number, payload in enumerate(payloads):
        header = Header(DATA if payload else END, 0, 0, number, 1, 2, 3, len(payload))
        source = ctypes.create_string_buffer(payload, max(len(payload), 1))
        stream += writer.frame(header, ctypes.addressof(source))
        sent.append((header, payload))
    assert read(ends(plain)[1], stream, sizes) == (sent, False)
    mutated = bytearray(stream)
    for place, change in flips if stream else ():
        mutated[place % len(stream)] ^= change
    if stream:
        start = dropped[0] % len(stream)
        del mutated[start : start + dropped[1]]
    found, _ = read(reader, bytes(mutated), sizes)
    if not plain:  # without a cipher nothing is authentic; it does not crash
        assert found == sent[: len(found)]
        assert len(found) < len(sent) or bytes(mutated).startswith(stream)


# --- real ranks ----------------------------------------------------------------------------------------------------------


def stopped(rank, size, config):
    """By step, the sources of which everything arrived. Rank 2 is stopped in the second of four steps, until that is over."""
    group = LossyGroup.create(config, [BucketSpec(20_000)])
    store, found = dist.distributed_c10d._get_default_store(), []
    for step in range(4):
        if step == 1:
            dist.barrier()
            if rank == 2:
                store.set("stopped", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                pid = int(store.get("stopped"))
                while open(f"/proc/{pid}/stat").read().split()[2] != "T":
                    time.sleep(0.01)
        grads = torch.full((size * 20_000,), float(rank + 1))
        output = torch.empty(20_000)
        lossy_reduce_scatter(group, 0, output, grads, step)
        whole = group.delivery("grad", step).arrived[0].all(axis=1).tolist()
        expected = size * sum(source + 1 for source in range(size) if whole[source]) / sum(whole)
        np.testing.assert_allclose(output.numpy(), expected, rtol=1e-6)
        found.append(whole)
        if step == 1:
            if rank != 2:
                store.add("over", 1)
            if rank == 0:
                while int(store.add("over", 0)) < 2:
                    time.sleep(0.01)
                os.kill(pid, signal.SIGCONT)
            dist.barrier()
    group.close()
    return found


def test_a_stopped_rank_loses_its_messages_and_nothing_else():
    config = LossyConfig(transport="stream", packet_bytes=1000)
    results = run_ranks(stopped, 3, 3, config)
    for rank in range(2):
        assert results[rank] == [[True] * 3, [True, True, False], [True] * 3, [True] * 3]
    assert results[2][2:] == [[True] * 3] * 2


def other_key(rank, folder):
    (folder / f"{rank}").write_bytes(bytes([rank]) * 16)
    LossyGroup.create(LossyConfig(transport="stream", udp_key_file=str(folder / f"{rank}")), [BucketSpec(100)])


def test_another_key_is_named_on_both_ranks(tmp_path):
    with pytest.raises(RankFailed) as error:
        run_ranks(other_key, 2, tmp_path)
    for rank in range(2):
        assert re.search(
            rf"--udp-key-file: rank {rank} of dense\S* \(.*\) has another key than this rank", str(error.value)
        )
