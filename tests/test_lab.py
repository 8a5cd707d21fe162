"""The lab of network namespaces and emulated links: every law that it states, by value."""

import contextlib
import math
import multiprocessing
import os
import socket
import struct
import subprocess
import threading
import time

import numpy as np
import pytest

from benchmarks import lab as lab_module
from benchmarks.lab import Lab, Link, Missing, check_lab, nodes
from benchmarks.lab.__main__ import main
from megatron_lossy.errors import UsageError

try:
    check_lab()
    MISSING = None
except Missing as missing:
    MISSING = str(missing)
needs_lab = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

#: Standard deviations that a measured share may lie off. The draws are those of fixed seeds: what passed passes again.
SIGMAS = 4
PORT = 5000
#: Python has no names for these.
SO_RCVBUFFORCE, SOL_UDP, UDP_SEGMENT = 33, 17, 103
#: Of IPv4 and UDP.
HEADERS = 28


@pytest.fixture(scope="module")
def lab():
    """Two nodes. Each test sets the link that it needs."""
    with Lab(Link()) as lab:
        yield lab


@contextlib.contextmanager
def sockets(lab, source=0, destination=1, version=4):
    """A UDP socket of each node, the first of them connected to the second, which has room for all that comes."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    out, into = (lab.nodes[node].do(socket.socket, family, socket.SOCK_DGRAM) for node in (source, destination))
    with out, into:
        into.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
        into.bind((lab.address(destination, version), PORT))
        into.settimeout(2)
        out.connect((lab.address(destination, version), PORT))
        yield out, into


def send(out, numbers, size=100):
    for number in numbers:
        out.send(struct.pack("q", number).ljust(size, b"."))


def receive(into, quiet=0.15):
    """Numbers and times of all that comes, until nothing has come for ``quiet`` seconds."""
    into.settimeout(quiet + 0.05)
    numbers, times = [], []
    with contextlib.suppress(TimeoutError):
        while True:
            data = into.recv(2048)
            times.append(time.perf_counter())
            numbers.append(struct.unpack_from("q", data)[0])
    return np.array(numbers, int), np.array(times)


def lost_packets(lab, count):
    """Which of ``count`` packets from node 0 to node 1 get lost; no others may go missing."""
    before = lab.counters(0, 1)
    arrived = np.zeros(count, bool)
    with sockets(lab) as (out, into):
        for first in range(0, count, 5000):
            send(out, range(first, min(first + 5000, count)))
            arrived[receive(into, 0.02)[0]] = True
        arrived[receive(into)[0]] = True
    happened = lab.counters(0, 1).since(before)
    assert happened.packets == count and happened.lost == count - arrived.sum() and lab.dropped() == 0
    return ~arrived


def runs(lost):
    """Lengths of the runs of losses."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], lost.astype(int), [0]])))
    return edges[1::2] - edges[::2]


@needs_lab
def test_delay(lab):
    """No packet is early, and what this busy machine does not hold up is on time."""
    lab.set(Link(delay=0.010))
    over = []
    with sockets(lab) as (out, into):
        for number in range(60):
            sent = time.perf_counter()
            send(out, [number])
            into.recv(2048)
            over.append(time.perf_counter() - sent - 0.010)
    assert 0 <= min(over) < 0.0005


@needs_lab
def test_rate(lab):
    """8 Mbit/s are a packet of 1,000 bytes each millisecond; packets behind each other are so far apart."""
    lab.set(Link(rate=8e6))
    with sockets(lab) as (out, into):
        took = []
        for _ in range(3):
            send(out, range(101), 1000 - HEADERS)
            numbers, times = receive(into)
            assert list(numbers) == list(range(101))
            took.append(times[-1] - times[0])
    assert min(took) < 0.105 and max(took) > 0.095


@needs_lab
def test_queue_overflows(lab):
    """Of a burst the queue keeps what fits, and the link takes a packet each millisecond meanwhile."""
    lab.set(Link(rate=8e6, queue=10_000))
    before = lab.counters(0, 1)
    with sockets(lab) as (out, into):
        started = time.perf_counter()
        send(out, range(50), 1000 - HEADERS)
        taken = 1000 * (time.perf_counter() - started) + 12  # and what the emulator had not read yet
        numbers, _ = receive(into)
    happened = lab.counters(0, 1).since(before)
    assert list(numbers[:10]) == list(range(10))
    assert 10 <= len(numbers) <= 10 + taken
    assert happened.overflowed == 50 - len(numbers) and happened.lost == 0


@needs_lab
@pytest.mark.parametrize("p", [0.01, 0.2])
def test_independent_losses(lab, p):
    """Rate and mean run within 4 standard deviations; loss tells nothing about the next packet."""
    n = 20_000
    lab.set(Link(loss=p))
    lost = lost_packets(lab, n)
    assert abs(lost.mean() - p) < SIGMAS * math.sqrt(p * (1 - p) / n)
    lengths = runs(lost)
    deviation = math.sqrt(p / (1 - p) ** 2 / len(lengths))  # of the mean of a geometric law
    assert abs(lengths.mean() - 1 / (1 - p)) < SIGMAS * deviation
    assert abs(np.corrcoef(lost[1:], lost[:-1])[0, 1]) < SIGMAS / math.sqrt(n)


@needs_lab
def test_losses_in_bursts(lab):
    """Mean run and rate of Gilbert and Elliott's chain within 4 standard deviations."""
    n, p, burst = 20_000, 0.1, 8.0
    lab.set(Link(loss=p, burst=burst))
    lost = lost_packets(lab, n)
    lengths = runs(lost)
    assert abs(lengths.mean() - burst) < SIGMAS * math.sqrt(burst * (burst - 1) / len(lengths))
    memory = 1 - 1 / burst - p / (burst * (1 - p))
    assert abs(lost.mean() - p) < SIGMAS * math.sqrt(p * (1 - p) / n * (1 + memory) / (1 - memory))


@needs_lab
def test_a_seed_says_which_packets_are_lost(lab):
    """Whatever else happens to them; the other direction loses others."""
    link = Link(loss=0.2)
    lab.set(link, seed=3)
    lost = lost_packets(lab, 500)
    lab.set(Link(delay=0.001, loss=0.2, reorder=0.1, duplicate=0.1), seed=3)
    assert (lost_packets(lab, 500) == lost).all()
    lab.set(link, seed=4)
    assert (lost_packets(lab, 500) != lost).any()
    lab.set(link, seed=3)
    before = lab.counters(1, 0)
    with sockets(lab, 1, 0) as (out, into):
        send(out, range(500))
        arrived = np.isin(np.arange(500), receive(into)[0])
    assert (arrived == lost).any() and lab.counters(1, 0).since(before).packets == 500


@needs_lab
def test_order(lab):
    """Packets stay in order, come once and are late only where the link says otherwise."""
    n = 4_000
    with sockets(lab) as (out, into):
        lab.set(Link(delay=0.002, rate=1e8))
        send(out, range(n))
        assert (receive(into)[0] == np.arange(n)).all()
        lab.set(Link(delay=0.002, rate=1e8, reorder=0.01, late=0.005, duplicate=0.02))
        before = lab.counters(0, 1)
        send(out, range(n))
        numbers, _ = receive(into)
    happened = lab.counters(0, 1).since(before)
    assert happened.delivered == len(numbers) == n + happened.duplicated
    assert (np.unique(numbers) == np.arange(n)).all()
    for count, p in ((happened.reordered, 0.01), (happened.duplicated, 0.02)):
        assert abs(count / n - p) < SIGMAS * math.sqrt(p * (1 - p) / n)
    # Not every late one: a copy of it may be on time, and a pause of this machine lets nothing overtake it.
    assert 0 < (np.diff(numbers) < 0).sum() <= happened.reordered


@needs_lab
def test_super_packets_are_cut_before_they_are_counted(lab):
    """What UDP_SEGMENT and TCP hand to the kernel as one is lost piece by piece, and the rest arrives whole."""
    lab.set(Link(loss=0.1))
    before = lab.counters(0, 1)
    with sockets(lab) as (out, into):
        out.setsockopt(SOL_UDP, UDP_SEGMENT, 1000)
        out.send(b"".join(struct.pack("q", number).ljust(1000, b".") for number in range(60)))
        numbers, _ = receive(into)
    happened = lab.counters(0, 1).since(before)
    assert happened.packets == 60 and happened.lost == 60 - len(numbers) > 0

    data = os.urandom(1 << 20)
    listener, client = (node.do(socket.socket) for node in reversed(lab.nodes))
    with listener, client:
        listener.bind((lab.address(1), PORT))
        listener.listen()
        client.connect((lab.address(1), PORT))
        server, _ = listener.accept()
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        got = bytearray()
        with server:
            while len(got) < len(data):
                got += server.recv(1 << 16)
        sender.join()
    happened = lab.counters(0, 1).since(before)
    assert got == data and happened.bytes / happened.packets <= 1500 and lab.dropped() == 0


@needs_lab
def test_sites_share_a_link_and_ipv6_crosses_it():
    """Four nodes in two sites: at once inside of a site, through the one link between them. And two labs at once."""
    with Lab(Link(delay=0.03), sites=(2, 2)) as lab, Lab(Link(), sites=(1, 1)):
        for source, destination, delay in ((0, 1, 0.0), (0, 2, 0.03), (1, 3, 0.03)):
            for version in (4, 6) if os.path.exists("/proc/sys/net/ipv6") else (4,):
                took = []
                with sockets(lab, source, destination, version) as (out, into):
                    for number in range(5):
                        sent = time.perf_counter()
                        send(out, [number])
                        into.recv(2048)
                        took.append(time.perf_counter() - sent)
                assert delay <= min(took) < delay + 0.01
        assert lab.counters(0, 1).packets in (10, 20) and lab.counters(1, 0).packets == 0


@needs_lab
def test_without_an_emulator():
    """Two nodes and a wire; a sysctl is a node's own."""
    with Lab(None) as lab:
        with sockets(lab) as (out, into):
            send(out, range(100))
            assert len(receive(into)[0]) == 100
        lab.sysctl("net.ipv4.tcp_congestion_control", "reno")
        assert lab.nodes[0].sysctl("net.ipv4.tcp_congestion_control") == "reno"


@needs_lab
@pytest.mark.parametrize(("offload", "packets"), [(True, 1), (False, 10)])
def test_a_wire_without_offload_carries_packets_of_the_mtu(offload, packets):
    with Lab(None, offload=offload) as lab, sockets(lab) as (out, into):
        send(out, range(1))  # by now both know each other's hardware address
        assert receive(into)
        before = lab.nodes[0].counter(9)
        out.setsockopt(SOL_UDP, UDP_SEGMENT, 1000)
        out.send(bytes(10_000))
        assert lab.nodes[0].counter(9) - before == packets


def state():
    """What a lab could leave behind in this process and on this machine."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    return sorted(os.listdir("/proc/self/fd")), threading.active_count(), len(links.splitlines())


@needs_lab
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_nothing_is_left(error, monkeypatch):
    """No processes, also those of processes or deaf to SIGTERM, no interfaces, threads or files."""
    monkeypatch.setattr(nodes, "_GRACE", 0.3)
    lab_module._emulator()
    before = state()
    deaf = "trap '' TERM; sleep 1000 & setsid sleep 1001 & wait; wait"
    with contextlib.suppress(error or ()), Lab(Link()) as lab:
        lab.start(0, ["sh", "-c", deaf])
        lab.start(1, ["sleep", "1000"])
        while len(lab.nodes[0].processes()) < 3:
            time.sleep(0.01)
        emulator, running = lab._emulator.pid, [pid for node in lab.nodes for pid in node.processes()]
        if error:
            raise error
    assert state() == before
    assert all(not os.path.exists(f"/proc/{pid}") or nodes._is_ended(pid) for pid in [emulator, *running])


def _hold_a_lab(told):
    with Lab(Link()) as lab:
        told.send(lab._emulator.pid)
        time.sleep(100)


@needs_lab
def test_nothing_is_left_of_a_killed_one():
    """The emulator ends with the process whose lab it is, and the namespaces with the emulator."""
    lab_module._emulator()
    told, tell = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold_a_lab, args=(tell,))
    process.start()
    emulator = told.recv()
    assert not nodes._is_ended(emulator)
    process.kill()
    process.join()
    until = time.monotonic() + 5
    while not nodes._is_ended(emulator) and time.monotonic() < until:
        time.sleep(0.01)
    assert nodes._is_ended(emulator)


@needs_lab
def test_program(capfd):
    """A command runs on every machine, which it is told; its status is handed on."""
    assert main(["--rtt", "2", "--", "echo", "{node} of {nodes}: {address} {first}"]) == 0
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["0 of 2: 10.77.0.1 10.77.0.1", "1 of 2: 10.77.0.2 10.77.0.1"]
    assert "link from site 1 to site 0: 0 packets" in said.err
    assert main(["--", "sh", "-c", "exit $((3 * {node}))"]) == 3


def test_what_is_missing_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(lab_module.os, "geteuid", lambda: 1000)
    assert main(["--", "true"]) == 0
    assert capsys.readouterr().out == "skipped: a lab needs root, for network namespaces\n"
    monkeypatch.setattr(lab_module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab_module.shutil, "which", lambda name: name if name == "ip" else None)
    with pytest.raises(Missing, match="a C compiler"):
        check_lab()


@pytest.mark.parametrize(
    ("link", "refused"),
    [
        ({"loss": 1.0}, r"loss 1.0: must be in \[0, 1\)"),
        ({"delay": -1.0}, "delay -1.0: must be at least 0"),
        ({"rate": 0.0}, "rate 0.0: must be above 0"),
        ({"loss": 0.6, "burst": 1.0}, "burst 1.0: must be at least 1, and at least 1.5"),
    ],
)
def test_links_that_cannot_be(link, refused):
    with pytest.raises(UsageError, match=refused):
        Link(**link)
