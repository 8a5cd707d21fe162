"""The lab of network namespaces and emulated links: every law that it states, by value."""

import contextlib
import math
import os
import socket
import struct
import subprocess
import threading
import time

import numpy as np
import pytest

from benchmarks import lab as lab_module
from benchmarks.lab import Lab, Link, MissingRequirement, check_lab, nodes
from benchmarks.lab.__main__ import main

pytestmark = pytest.mark.shows(
    "emulated links: delay, rate, queue, losses, bursts, IPv6; nothing is left", device=False
)
refused_links = pytest.mark.shows("emulated links that cannot be are refused", device=False)

try:
    check_lab()
    MISSING = None
except MissingRequirement as missing:
    MISSING = str(missing)


def needs_lab(test):
    """Mark a test that emulates links: where that cannot be it is skipped, and elsewhere it takes the whole machine."""
    return pytest.mark.alone(pytest.mark.skipif(MISSING is not None, reason=str(MISSING))(test))


#: Standard deviations that a measured share may lie off. The draws are those of fixed seeds: what passed passes again.
SIGMAS = 4
PORT = 5000
#: Python has no names for these.
SO_RCVBUFFORCE, SOL_UDP, UDP_SEGMENT = 33, 17, 103
#: Of IPv4 and UDP.
HEADERS = 28
#: The protocol of Ethernet frames.
IPV4 = 0x0800


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


def receive(into, wanted=0, quiet=0.15):
    """Numbers and times of all that comes: ``wanted`` packets, however busy this machine is, and what comes soon after them."""
    numbers, times = [], []
    with contextlib.suppress(TimeoutError):
        while True:
            into.settimeout(20 if len(numbers) < wanted else quiet + 0.05)
            data = into.recv(2048)
            times.append(time.perf_counter())
            numbers.append(struct.unpack_from("q", data)[0])
    return np.array(numbers, int), np.array(times)


def test_packets_that_are_longer_than_the_mtu_vanish(lab):
    lab.set(Link(mtu=500))
    with sockets(lab) as (out, into):
        send(out, [1], 400)
        send(out, [2], 600)
        send(out, [3], 472)  # and 28 bytes of headers
        assert receive(into, 2)[0].tolist() == [1, 3]
    lab.set(Link())


def delivered(lab, before, count):
    """Return the number of ``count`` packets from node 0 that arrive at node 1, after the link has read all."""
    until = time.monotonic() + 20
    while (happened := lab.counters(0, 1).since(before)).packets < count and time.monotonic() < until:
        time.sleep(0.001)
    assert happened.packets == count
    return count - happened.lost - happened.overflowed + happened.duplicated


def lost_packets(lab, count):
    """Return the lost ones of ``count`` packets from node 0 to node 1; no others may go missing."""
    before = lab.counters(0, 1)
    arrived, came = np.zeros(count, bool), 0
    with sockets(lab) as (out, into):
        for first in range(0, count, 5000):
            send(out, range(first, min(first + 5000, count)))
            sofar = min(first + 5000, count)
            wanted = delivered(lab, before, sofar) - came
            numbers, _ = receive(into, wanted, 0.02)
            arrived[numbers] = True
            came += len(numbers)
    happened = lab.counters(0, 1).since(before)
    assert happened.packets == count and happened.lost == count - arrived.sum() and lab.dropped() == 0
    return ~arrived


def runs(lost):
    """Lengths of the runs of losses."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], lost.astype(int), [0]])))
    return edges[1::2] - edges[::2]


def quickest(lab, count, *where):
    """Seconds that the quickest of ``count`` packets takes: the others may have waited for a busy machine."""
    took = []
    with sockets(lab, *where) as (out, into):
        into.settimeout(20)
        for number in range(count):
            sent = time.perf_counter()
            send(out, [number])
            into.recv(2048)
            took.append(time.perf_counter() - sent)
    return min(took)


@needs_lab
def test_delay(lab):
    """No packet is early, and that of the shorter link is there first."""
    least = []
    for delay in (0.010, 0.030):
        lab.set(Link(delay=delay))
        least.append(quickest(lab, 60))
        assert least[-1] >= delay
    assert least[0] < least[1]


@needs_lab
def test_rate(lab):
    """8 Mbit/s are a packet of 1,000 bytes each millisecond: 100 of them take that long at least, and at half the rate longer."""
    least = []
    for rate in (8e6, 4e6):
        lab.set(Link(rate=rate))
        took = []
        with sockets(lab) as (out, into):
            for _ in range(3):
                began = time.perf_counter()
                send(out, range(101), 1000 - HEADERS)
                numbers, times = receive(into, 101)
                assert list(numbers) == list(range(101))
                took.append(times[-1] - began)
        least.append(min(took))
        assert least[-1] >= 101 * 8000 / rate
    assert least[0] < least[1]


@needs_lab
def test_queue_overflows(lab):
    """The queue keeps what fits of a burst, and the link takes a packet each millisecond meanwhile, and no more."""
    lab.set(Link(rate=8e6, queue=10_000))
    before = lab.counters(0, 1)
    with sockets(lab) as (out, into):
        started = time.perf_counter()
        send(out, range(500), 1000 - HEADERS)
        numbers, times = receive(into, delivered(lab, before, 500))
    happened = lab.counters(0, 1).since(before)
    assert list(numbers[:10]) == list(range(10))
    assert happened.overflowed == 500 - len(numbers) > 0 == happened.lost
    assert (times >= started + 0.001 * np.arange(1, len(times) + 1)).all()


@needs_lab
@pytest.mark.parametrize(("p", "burst"), [(0.01, None), (0.2, None), (0.1, 8.0)])
def test_losses(lab, p, burst):
    """Rate and mean run of Gilbert and Elliott's chain within 4 standard deviations; without it independent packets."""
    n = 20_000
    lab.set(Link(loss=p) if burst is None else Link(loss=p, burst=burst))
    lost = lost_packets(lab, n)
    lengths, mean = runs(lost), burst or 1 / (1 - p)
    assert abs(lengths.mean() - mean) < SIGMAS * math.sqrt(mean * (mean - 1) / len(lengths))
    memory = 1 - 1 / mean - p / (mean * (1 - p))
    assert abs(lost.mean() - p) < SIGMAS * math.sqrt(p * (1 - p) / n * (1 + memory) / (1 - memory))
    assert burst or abs(np.corrcoef(lost[1:], lost[:-1])[0, 1]) < SIGMAS / math.sqrt(n)


@needs_lab
def test_a_seed_says_which_packets_are_lost(lab):
    """Delay and order have no effect on losses; the other direction loses others."""
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
        arrived = np.isin(np.arange(500), receive(into, 250)[0])
    assert (arrived == lost).any() and lab.counters(1, 0).since(before).packets == 500


@needs_lab
def test_order(lab):
    """Packets stay in order, come once and are late only where the link says otherwise."""
    n = 4_000
    with sockets(lab) as (out, into):
        lab.set(Link(delay=0.002, rate=1e8))
        send(out, range(n))
        assert (receive(into, n)[0] == np.arange(n)).all()
        lab.set(Link(delay=0.002, rate=1e8, reorder=0.01, late=0.005, duplicate=0.02))
        before = lab.counters(0, 1)
        send(out, range(n))
        numbers, _ = receive(into, delivered(lab, before, n))
    happened = lab.counters(0, 1).since(before)
    assert happened.delivered == len(numbers) == n + happened.duplicated
    assert (np.unique(numbers) == np.arange(n)).all()
    for count, p in ((happened.reordered, 0.01), (happened.duplicated, 0.02)):
        assert abs(count / n - p) < SIGMAS * math.sqrt(p * (1 - p) / n)
    # Not every late one: a copy of it may be on time, and a pause of this machine lets nothing overtake it.
    assert 0 < (np.diff(numbers) < 0).sum() <= happened.reordered


@needs_lab
def test_super_packets_are_cut_before_they_are_counted(lab):
    """Segments that UDP_SEGMENT and TCP hand to the kernel as one are lost one by one, and the rest arrives whole."""
    lab.set(Link(loss=0.1))
    before = lab.counters(0, 1)
    with sockets(lab) as (out, into):
        out.setsockopt(SOL_UDP, UDP_SEGMENT, 1000)
        out.send(b"".join(struct.pack("q", number).ljust(1000, b".") for number in range(60)))
        numbers, _ = receive(into, delivered(lab, before, 60))
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
    """Four nodes in two sites: without delay inside of a site, through the one link between them. And two labs at once."""
    with Lab(Link(delay=0.03), sites=(2, 2)) as lab, Lab(Link(), sites=(1, 1)):
        for version in (4, 6) if os.path.exists("/proc/sys/net/ipv6") else (4,):
            least = []
            for source, destination, delay in ((0, 1, 0.0), (0, 2, 0.03), (1, 3, 0.03)):
                least.append(quickest(lab, 20, source, destination, version))
                assert least[-1] >= delay
            assert least[0] < min(least[1:])
        assert lab.counters(0, 1).packets in (40, 80) and lab.counters(1, 0).packets == 0


@needs_lab
def test_without_an_emulator():
    """Two nodes and a wire; a sysctl is a node's own."""
    with Lab(None) as lab:
        with sockets(lab) as (out, into):
            send(out, range(100))
            assert len(receive(into, 100)[0]) == 100
        lab.sysctl("net.ipv4.tcp_congestion_control", "reno")
        assert lab.nodes[0].sysctl("net.ipv4.tcp_congestion_control") == "reno"


@needs_lab
@pytest.mark.parametrize(("offload", "packets"), [(True, 1), (False, 10)])
def test_a_wire_without_offload_carries_packets_of_the_mtu(offload, packets):
    """As the other end of the wire sees them; the kernel sends packets of its own as well, which do not count."""
    with Lab(None, offload=offload) as lab, sockets(lab) as (out, into):
        frames = lab.nodes[1].do(socket.socket, socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(IPV4))
        with frames:
            out.setsockopt(SOL_UDP, UDP_SEGMENT, 1000)
            out.send(bytes(10_000))
            into.settimeout(20)
            got = sum(len(into.recv(2048)) for _ in range(10))
            frames.settimeout(0.2)
            seen = []
            with contextlib.suppress(TimeoutError):
                while True:
                    seen.append(frames.recv(65535))
        assert got == 10_000
        ours = [one for one in seen if one[9] == socket.IPPROTO_UDP and struct.unpack_from("!H", one, 22)[0] == PORT]
        assert len(ours) == packets


def state():
    """Return the traces that a lab could leave in this process and on this machine."""
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


@needs_lab
def test_program(capfd):
    """A command runs on every machine, whose number it gets; its status is handed on."""
    assert main(["--rtt", "2", "--", "echo", "{node} of {nodes}: {address} {first}"]) == 0
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["0 of 2: 10.77.0.1 10.77.0.1", "1 of 2: 10.77.0.2 10.77.0.1"]
    assert "link from site 1 to site 0: 0 packets" in said.err
    assert main(["--", "sh", "-c", "exit $((3 * {node}))"]) == 3


@refused_links
def test_what_is_missing_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(lab_module.os, "geteuid", lambda: 1000)
    assert main(["--", "true"]) == 0
    assert capsys.readouterr().out == "skipped: a lab needs root, for network namespaces\n"
    monkeypatch.setattr(lab_module.os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab_module.shutil, "which", lambda name: name if name == "ip" else None)
    with pytest.raises(MissingRequirement, match="a C compiler"):
        check_lab()
