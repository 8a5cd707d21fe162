"""Engines with real sockets, in one process and in several, over the loopback."""

import dataclasses
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_lossy.base import native
from megatron_lossy.base.errors import UsageError
from megatron_lossy.transport.address import find_address
from megatron_lossy.transport.udp import Engine, PeerLost, Settings, session
from megatron_lossy.transport.udp.engine import charge, windows
from megatron_lossy.transport.udp.library import load
from tests.programs import until
from tests.udp_packet import DATA, encode

pytestmark = pytest.mark.shows(
    "2 to 5 engines on the loopback: IPv4, IPv6, cipher",
    "late, stopped, closed, killed ranks; forged datagrams",
    device=False,
)

UNIT = 1408
BUCKETS = {"grad": [(200 * UNIT + 100, UNIT), (30 * UNIT, UNIT)], "param": [(50 * UNIT, UNIT)]}
has_ipv6 = (
    Path("/proc/net/if_inet6").exists() and "00000000000000000000000000000001" in Path("/proc/net/if_inet6").read_text()
)


def in_threads(size, function):
    """Call ``function(rank)`` for all ranks at once; what each returned or raised."""
    results = [None] * size

    def run(rank):
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


class Ranks(AbstractContextManager):
    """Engines and channels of several ranks in this process."""

    def __init__(self, size=2, names=("dense",), address="127.0.0.1", buckets=BUCKETS, sockets=None, **settings):
        self.size, self.buckets, self.lines = size, buckets, []
        each = sockets or [{}] * size
        self.engines = [Engine(Settings(**settings, **extra), address, self.lines.append) for extra in each]
        self.store = dist.HashStore()
        self.channels = {}
        for name in names:
            opened = in_threads(size, lambda rank: self.engines[rank].open(name, rank, size, self.store, name, buckets))  # noqa: B023
            for error in opened:
                if isinstance(error, Exception):
                    self.close()
                    raise error
            self.channels[name] = opened
        self.dense = self.channels[names[0]]
        self.kept = []

    def __exit__(self, kind, *_):
        self.close()

    def close(self):
        in_threads(self.size, lambda rank: self.engines[rank].close())

    def data(self, rank, phase, step, bucket):
        generator = np.random.default_rng([rank, step, bucket, phase == "grad"])
        return generator.integers(0, 256, (self.size, self.buckets[phase][bucket][0]), np.uint8)

    def post(self, rank, phase, step, bucket, name="dense"):
        pieces = np.full((self.size, self.buckets[phase][bucket][0]), 0xEE, np.uint8)
        self.kept.append(pieces)
        pointers = [None if r == rank else pieces[r].ctypes.data for r in range(self.size)]
        return self.channels[name][rank].post(phase, step, bucket, pointers), pieces

    def send(self, rank, phase, step, bucket, name="dense"):
        data = self.data(rank, phase, step, bucket)
        self.kept.append(data)
        pointers = [None if r == rank else data[r].ctypes.data for r in range(self.size)]
        return self.channels[name][rank].send(phase, step, bucket, pointers)

    def check(self, rank, phase, step, bucket, transfer, pieces, timeout=20):
        """Wait; what arrived is what was sent. Return ``arrived``."""
        shard, unit = self.buckets[phase][bucket]
        arrived = transfer.wait(timeout)
        assert arrived[rank].all()
        for source in range(self.size):
            if source != rank:
                whole = np.repeat(arrived[source], unit)[:shard]
                expected = np.where(whole, self.data(source, phase, step, bucket)[rank], 0xEE)
                assert (pieces[source] == expected).all()
        return arrived

    def exchange(self, phase, step, bucket, name="dense"):
        """On all ranks; their ``arrived``."""
        posted = [self.post(rank, phase, step, bucket, name) for rank in range(self.size)]
        for rank in range(self.size):
            self.send(rank, phase, step, bucket, name)
        arrived = [self.check(rank, phase, step, bucket, *posted[rank]) for rank in range(self.size)]
        for transfer, _ in posted:
            transfer.sent(20)
        return arrived

    def lost(self):
        """Return the losses that are our own."""
        counters = [engine.counters() for engine in self.engines]
        members = [peer for channels in self.channels.values() for c in channels for peer in c.counters().values()]
        return sum(c["socket_overflow"] for c in counters) + sum(m["early_dropped"] + m["lost"] for m in members)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {}),
        (2, {"cipher": "none"}),
        (2, {"rate_control": "fixed", "rate": 50e6}),
        (2, {"socket_buffer": 65536}),
        (5, {"socket_buffer": 65536}),
        (2, {"eager_bytes": 0}),
        (2, {"key": b"of a file that all have"}),
        (3, {"packet_bytes": 8192}),
        (5, {}),
        pytest.param(3, {"address": "::1"}, marks=pytest.mark.skipif(not has_ipv6, reason="no IPv6")),
    ],
    ids=str,
)
def test_everything_arrives(size, settings):
    with Ranks(size, **settings) as ranks:
        for step in range(3):
            for phase, bucket in (("grad", 0), ("grad", 1), ("param", 0)):
                assert all(arrived.all() for arrived in ranks.exchange(phase, step, bucket))
        assert ranks.lost() == 0


def test_two_channels_and_several_buckets_at_once():
    """Posted and sent in different orders, from different threads."""
    with Ranks(3, names=("dense", "expert")) as ranks:
        keys = [(phase, step, bucket, name) for name in ranks.channels for step in range(2)
                for phase, bucket in (("grad", 0), ("grad", 1), ("param", 0))]  # fmt: skip

        def run(rank):
            senders = [threading.Thread(target=ranks.send, args=(rank, *key)) for key in keys[1::2]]
            for sender in senders:
                sender.start()
            posted = [ranks.post(rank, *key) for key in keys]
            for key in keys[::2]:
                ranks.send(rank, *key)
            for (phase, step, bucket, _), (transfer, pieces) in zip(keys, posted):
                assert ranks.check(rank, phase, step, bucket, transfer, pieces).all()
                transfer.sent(20)
            return len(ranks.channels["dense"][rank]._transfers)

        # The steps of one bucket must rise: a sender of step 1 may not come before that of step 0.
        keys = [key for key in keys if key[1] == 0]
        assert in_threads(3, run) == [0, 0, 0]
        assert ranks.lost() == 0


def test_what_comes_early_over_all_channels_is_within_the_memory():
    """Each channel alone would have room."""
    names = tuple("abcdef")
    with Ranks(2, names=names, memory=1 << 20) as ranks:
        for name in names:
            ranks.send(0, "grad", 0, 0, name)
        until(lambda: sum(ranks.channels[name][1].counters()[0]["early_dropped"] for name in names))
        time.sleep(0.2)
        assert (1 << 19) < ranks.engines[1].counters()["early_most"] <= 1 << 20


def test_each_receiver_says_what_it_keeps_early():
    """As much of each sender as its memory has room for."""
    sockets = [{"eager_bytes": 1 << 20}, {"eager_bytes": 1 << 30, "memory": 4 * 2 * 5 * UNIT}, {}]
    with Ranks(3, sockets=sockets) as ranks:
        for source in (0, 2):
            ranks.send(source, "grad", 0, 0)
        time.sleep(0.2)
        early = [ranks.dense[1].counters()[source]["early"] for source in (0, 2)]
        assert early == [5, 5] and ranks.lost() == 0
        assert ranks.dense[0].counters()[2]["early"] == 201
        in_threads(3, lambda rank: ranks.engines[rank].close(linger=0))


def test_the_automatic_deadline_begins_with_enough_exchanges():
    with Ranks(2, deadline="auto", buckets={"grad": [(UNIT, UNIT)]}) as ranks:
        channel = ranks.dense[0]
        assert channel._deadline((0, 0)) == 0
        for step in range(20):
            ranks.exchange("grad", step, 0)
        took = channel._took[0, 0]
        assert channel._deadline((0, 0)) == pytest.approx(1.2 * np.quantile(took, 0.95))
        transfer, _ = ranks.post(0, "grad", 20, 0)
        assert not transfer.wait(20)[1].any()


# ---- What must not get in ----


def test_foreign_and_forged_datagrams_change_nothing():
    """From another socket, of another run, from a peer's own address without its key, and noise."""
    with Ranks(2) as ranks, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        victim = ("127.0.0.1", ranks.engines[1].port)
        drawn = session.channel_id(bytes.fromhex(ranks.dense[0].hellos[0].random), "dense")
        before = ranks.engines[1].counters()  # a peer that was ready first may have sent before this one was
        noise = b"\0" + os.urandom(1451)  # of no version
        for datagram in (b"", b"x", noise, encode(DATA, bytes(UNIT + 16), channel=drawn, step=1)):
            stranger.sendto(datagram, victim)
        assert all(arrived.all() for arrived in ranks.exchange("grad", 0, 0))
        after = ranks.engines[1].counters()
        assert {name: after[name] - before[name] for name in ("malformed", "foreign")} == {"malformed": 3, "foreign": 1}
        assert ranks.dense[0].counters()[1]["bad_tag"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cipher": "none"}, "--udp-key-file: cipher of dense is aes-128-gcm on rank 0 and none on rank 1"),
        ({"packet_bytes": 1472}, "--packet-bytes: bytes of a unit of dense is 1408 on rank 0 and 1472 on rank 1"),
        ({"key": b"k" * 16}, "--udp-key-file"),
    ],
    ids=str,
)
def test_ranks_that_differ_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        Ranks(2, sockets=[{}, change])


@pytest.mark.parametrize(("shard", "dtypes"), [((1000, 1001), ("bf16", "bf16")), ((1000, 1000), ("bf16", "fp16"))])
def test_buckets_that_differ_are_refused_on_both_ranks(shard, dtypes):
    store = dist.HashStore()

    def run(rank):
        with Engine(Settings(), "127.0.0.1") as engine:
            engine.open("dense", rank, 2, store, "p", {"grad": [(shard[rank], UNIT)]}, alike=dtypes[rank])

    for error in in_threads(2, run):
        assert isinstance(error, UsageError) and "digest of buckets, dtypes and ranks of dense is" in str(error)


def test_a_rank_that_is_not_reached_is_named_on_all_ranks(monkeypatch):
    monkeypatch.setattr("megatron_lossy.transport.udp.channel.PROBE_TIME", 0.3)
    store, silent = dist.HashStore(), [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]

    def run(rank):
        with silent[rank], Engine(Settings(), "127.0.0.1") as engine:
            silent[rank].bind(("127.0.0.1", 0))
            engine.port = silent[rank].getsockname()[1]  # where the other one sends to
            engine.open("dense", rank, 2, store, "p", BUCKETS)

    errors = in_threads(2, run)
    for error in errors:
        assert isinstance(error, UsageError), error
        assert "rank 0 of dense (127.0.0.1:" in str(error) and "does not get UDP datagrams of 1,452 bytes" in str(error)


def test_a_port_that_is_taken_and_an_address_of_others_are_refused():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--udp-port {port}: Address already in use"):
            Engine(Settings(port=port), "127.0.0.1")
    with pytest.raises(UsageError, match="--udp-interface 192.0.2.1: Cannot assign"):
        Engine(Settings(), "192.0.2.1")
    with pytest.raises(UsageError, match="--udp-interface nowhere0: this host has .*lo"):
        find_address("nowhere0", "127.0.0.1")
    assert find_address("lo", "192.0.2.1") == find_address(None, "localhost").replace("::1", "127.0.0.1") == "127.0.0.1"


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """Return an empty cache of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron_lossy"


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch, no_library):
    with monkeypatch.context() as without:
        without.setattr(native, "compiler", lambda: None)
        with pytest.raises(UsageError, match="needs a C compiler .*install gcc"):
            native.ENGINE.path()
    built = native.ENGINE.path()
    monkeypatch.setattr(native, "compiler", lambda: None)
    assert native.ENGINE.path() == built  # what was built once needs no compiler


@pytest.mark.programs
def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'fatal error: sys/eventfd.h: no such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(UsageError, match="cannot build its engine: fatal error: sys/eventfd.h"):
        native.ENGINE.compile(str(broken), tmp_path / "x.so")
    assert not (tmp_path / "x.so").exists()


def test_each_part_of_the_source_counts(tmp_path):
    """A library that was built of other parts is not taken."""
    source = native.ENGINE.source
    shutil.copytree(source.parent, tmp_path / "c")
    parts = list((tmp_path / "c").glob("*.[ch]"))
    assert sorted([*re.findall(r'#include "(.*)"', source.read_text()), source.name]) == sorted(
        part.name for part in parts
    )
    copied = dataclasses.replace(native.ENGINE, source=tmp_path / "c" / source.name)
    names = {copied.shipped().name}
    assert names == {native.ENGINE.shipped().name}
    for part in parts:
        part.write_text(part.read_text() + "\n")
        names.add(copied.shipped().name)
    assert len(names) == 1 + len(parts)


def test_a_library_of_a_wheel_is_taken_before_all_others(monkeypatch, no_library, tmp_path):
    shutil.copytree(native.ENGINE.source.parent, tmp_path / "c")
    wheel = dataclasses.replace(native.ENGINE, source=tmp_path / "c" / native.ENGINE.source.name)
    wheel.shipped().touch()
    monkeypatch.setattr(native, "compiler", lambda: None)
    assert wheel.path() == wheel.shipped() and not no_library.exists()


@pytest.mark.slow
def test_ranks_that_build_at_once_all_get_a_whole_library(no_library):
    paths = in_threads(2, lambda rank: native.ENGINE.path())
    assert len({str(path) for path in paths}) == 1
    assert [path.name for path in paths[0].parent.iterdir()] == [paths[0].name]


def test_small_buffers_are_said():
    with Ranks(2, socket_buffer=4096) as ranks:
        assert any("net.core.rmem_max" in line for line in ranks.lines)
    assert windows(8 << 20, 1452, 1) == (1213, 3276)
    assert windows(425984, 1452, 63) == (8, 8)
    assert charge(8876) > 8876


# ---- The interface ----


def test_misuse_is_refused():
    with Ranks(2) as ranks:
        channel = ranks.dense[0]
        with pytest.raises(ValueError, match="3 pointers for 2 ranks"):
            channel.post("grad", 0, 0, [None] * 3)
        with pytest.raises(ValueError, match="no bucket 2|not a bucket 2"):
            channel.post("grad", 0, 2, [None] * 2)
        ranks.exchange("grad", 5, 0)
        with pytest.raises(ValueError, match="not later than its last step"):
            ranks.post(0, "grad", 5, 0)
        transfer, _ = ranks.post(0, "grad", 6, 0)
        with pytest.raises(TimeoutError, match=r"grad 6, bucket 0 of dense: waits for rank 1 \(127.0.0.1:"):
            transfer.wait(0.05)
    with pytest.raises(RuntimeError, match="closed"):
        transfer.wait(1)
    with pytest.raises(RuntimeError, match="closed"):
        channel.post("grad", 7, 0, [None] * 2)


def test_closing_waits_until_the_others_have_everything():
    """A rank that ends first still answers those who wait."""
    with Ranks(2, buckets={"grad": [(3000 * UNIT, UNIT)]}, eager_bytes=0) as ranks:
        ranks.send(0, "grad", 0, 0)
        closing = threading.Thread(target=ranks.engines[0].close)
        closing.start()
        time.sleep(0.2)
        transfer, pieces = ranks.post(1, "grad", 0, 0)
        assert ranks.check(1, "grad", 0, 0, transfer, pieces).all()
        closing.join(10)
        assert not closing.is_alive()


# ---- Several processes ----


def _process(rank, size, folder, steps, pause, results):
    store, shard = dist.FileStore(folder, -1), BUCKETS["grad"][0][0]
    try:
        with Engine(Settings(peer_timeout=20), "127.0.0.1") as engine:
            channel = engine.open("dense", rank, size, store, "p", BUCKETS)
            lost = 0
            for step in range(steps):
                data, pieces = np.full((size, shard), rank + 1, np.uint8), np.zeros((size, shard), np.uint8)
                into, out = ([None if r == rank else one[r].ctypes.data for r in range(size)] for one in (pieces, data))
                transfer = channel.post("grad", step, 0, into)
                channel.send("grad", step, 0, out)
                arrived = transfer.wait(60)
                transfer.sent(60)
                lost += int((~arrived).sum())
                assert all((pieces[r] == (0 if r == rank else r + 1)).all() for r in range(size))
                if step == 0:
                    store.set(f"begun/{rank}", b"1")
                time.sleep(pause)
            results.put((rank, lost))
    except PeerLost as error:
        results.put((rank, str(error)))
    except BaseException as error:
        results.put((rank, repr(error)))
        raise


@pytest.fixture
def processes(tmp_path):
    context = multiprocessing.get_context("fork")
    results, folder = context.Queue(), str(tmp_path / "store")
    started = []

    def start(size, steps, pause):
        for rank in range(size):
            process = context.Process(target=_process, args=(rank, size, folder, steps, pause, results))
            process.start()
            started.append(process)
        for rank in range(size):
            dist.FileStore(folder, -1).get(f"begun/{rank}")
        return started

    yield start, lambda: results.get(timeout=60)
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()


@pytest.mark.ranks
def test_a_stopped_process_loses_nothing(processes):
    start, result = processes
    ranks = start(2, 60, 0.01)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(ranks[1].pid, signal.SIGCONT)
    assert sorted([result(), result()]) == [(0, 0), (1, 0)]


@pytest.mark.ranks
def test_a_killed_process_is_named_by_all_others_at_once(processes):
    """Its host refuses datagrams; nobody waits for the timeout."""
    start, result = processes
    ranks = start(3, 100_000, 0.001)
    ranks[1].kill()
    for _ in range(2):
        rank, message = result()
        assert rank in (0, 2) and "no datagram for" not in message
        assert message.startswith("rank 1 of dense (127.0.0.1:") or "it has closed the channel" in message


def test_a_program_that_closes_nothing_ends():
    """In the middle of sending."""
    program = f"""
import numpy as np
from megatron_lossy.transport.udp import Engine, Settings
from torch.distributed import HashStore
from tests.test_udp_engine import in_threads
store, engines, data = HashStore(), [Engine(Settings(rate=5e6), "127.0.0.1") for _ in range(2)], np.zeros(10**7, np.uint8)
channels = in_threads(2, lambda rank: engines[rank].open("x", rank, 2, store, "p", {{"grad": [(10**7, {UNIT})]}}))
channels[0].send("grad", 0, 0, [None, data.ctypes.data])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_ranks_that_hear_each_other_know_it():
    """Each answers as long as it is asked; else the other would wait three seconds for the end of the probes."""
    for _ in range(8):
        with Ranks(3) as ranks:
            for channel in ranks.dense:
                assert [load().ml_probed(channel._channel, peer) for peer in channel.peers] == [3, 3]
