"""Paths whose MTU changes: units go on in as few pieces as get through, and whole again when they can."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.transport.udp import packet
from megatron_lossy.transport.udp.packet import DATA, MEASURE, PARITY
from tests.test_lab import needs_lab
from tests.udp_hosts import flood
from tests.udp_world import CHANNEL, MS, SECOND, World, fields_of

pytestmark = pytest.mark.shows("datagrams: an MTU that changes", device=False)

UNIT = 1408
SHARD = 59 * UNIT - 100


class Path:
    """A path that lets datagrams of at most ``most`` bytes pass; ``lost``: of those, a share, at random.

    ``data`` counts the DATA that rank 0 sent; ``kinds``: of all datagrams.
    """

    def __init__(self, most=None, lost=0.0):
        self.most, self.lost, self.data, self.kinds = most, lost, 0, set()
        self._random = np.random.default_rng(7)

    def __call__(self, source, destination, datagram, now):
        kind, _ = fields_of(datagram)
        self.kinds.add(kind)
        self.data += source == 0 and kind == DATA
        if (self.most is not None and len(datagram) > self.most) or self._random.random() < self.lost:
            return []
        return [now + 5 * MS]


def world(link, unit=UNIT, shard=SHARD, **more):
    return World(2, {"grad": [(shard, unit)]}, link, **{"cipher": True, "packet": unit} | more)


def exchange(network, step, deadline=0, must=None):
    """Let both ranks exchange; bool[2, units]: what arrived at each. It is what was sent, and the rest is untouched."""
    handles, data = [], []
    for node in network.nodes:
        shard, _ = node.buckets["grad"][0]
        data.append(np.random.default_rng([step, node.rank]).integers(0, 255, (2, shard), np.uint8))
        node.post(network.now, "grad", step, 0, deadline=deadline and network.now + deadline)
        handles.append(node.send("grad", step, 0, data[-1], must))
    network.run(lambda: all(node.exchanges["grad", step, 0].over_at is not None for node in network.nodes))
    network.run_for(30 * MS)  # it is said, too
    arrived = []
    for node, handle in zip(network.nodes, handles):
        (shard, unit), peer = node.buckets["grad"][0], 1 - node.rank
        held = node.exchanges["grad", step, 0]
        arrived.append(held.arrived[peer].copy())
        came = np.repeat(held.arrived[peer], unit)[:shard]
        assert (held.pieces[peer, :shard] == np.where(came, data[peer][node.rank], 0xEE)).all()
        assert (held.pieces[peer, shard:] == 0xEE).all()
        node.lib.ml_release(handle)
        node.released(("grad", step, 0))
    return np.array(arrived)


def counts(network, name):
    return [node.engine_counters()[name] for node in network.nodes]


@pytest.mark.parametrize("rule", ["fixed", "dedicated", "shared"])
@pytest.mark.parametrize("most", [1451, 1000, 600, 300])
def test_units_go_in_pieces_where_the_mtu_has_fallen_and_whole_when_it_has_risen(most, rule):
    path = Path()
    with world(path, rule=rule) as network:
        assert exchange(network, 0).all() and MEASURE not in path.kinds
        path.most = most
        began, step = network.now, 1
        while not exchange(network, step).all():
            step += 1
        assert step <= 4 and network.now - began < SECOND
        assert counts(network, "shortened") == [1, 1] and counts(network, "lengthened") == [0, 0]
        whole = most - 28 - packet.TAG_BYTES
        pieces = next(n for n in (1, 2, 3, 4, 6, 8, 12, 16) if -(-UNIT // n) <= whole)
        path.data = 0
        assert exchange(network, step + 1).all()
        assert 58 * pieces < path.data <= 59 * pieces  # the last unit is shorter
        path.most = None
        network.run_for(11 * SECOND)  # signs of life alone
        assert counts(network, "lengthened") == [1, 1]
        path.data = 0
        assert exchange(network, step + 2).all() and path.data == 59


def test_an_mtu_that_falls_twice():
    path = Path()
    with world(path) as network:
        for path.most in (None, 1000, 600, 300):
            arrived = [exchange(network, (path.most or 2000) * -10 + 30000 + k) for k in range(5)]
            assert arrived[-1].all()
        assert counts(network, "shortened") == [3, 3]


def test_one_way_alone_is_cut():
    path = Path()

    def link(source, destination, datagram, now):
        return [] if source == 0 and len(datagram) > 1000 else path(source, destination, datagram, now)

    with world(link) as network:
        for step in range(4):
            arrived = exchange(network, step)
            assert arrived[0].all()
        assert arrived[1].all() and counts(network, "shortened") == [1, 0]


def test_an_outage_or_great_loss_shortens_nothing():
    path = Path()
    with world(path) as network:
        exchange(network, 0)
        for step in range(1, 6):
            path.most = 0
            exchange_begun = network.now
            for node in network.nodes:
                node.timers(network.now)
            network.run_for(700 * MS)
            path.most = None
            exchange(network, step, deadline=300 * MS)
            assert network.now > exchange_begun
        path.lost = 0.5
        for step in range(6, 26):
            exchange(network, step, deadline=300 * MS)
        assert counts(network, "shortened") == [0, 0]


@given(
    unit=st.integers(17, 400),
    units=st.integers(33, 60),
    short=st.integers(0, 16),
    most=st.floats(0.1, 0.99),
    lost=st.sampled_from([0.0, 0.0, 0.1]),
)
@settings(max_examples=60, deadline=None)
def test_every_length_of_unit_and_path(unit, units, short, most, lost):
    path = Path(lost=lost)
    with world(path, unit, units * unit - short, cipher=False) as network:
        exchange(network, 0, deadline=500 * MS)
        # Room for control, and for a sixteenth of a unit.
        path.most = max(28 + int(most * unit), 28 + packet.REPORT_PAYLOAD.itemsize, 28 + -(-unit // 16))
        arrived = [exchange(network, step, deadline=500 * MS) for step in range(1, 8)]
        assert lost or arrived[-1].all()
        assert arrived[-1].mean() > 0.05  # of 16 pieces with 10 % of loss a fifth is whole


def test_what_must_arrive_does_in_pieces():
    """Its lists, its reports, its parity, and what is sent again."""
    path = Path(lost=0.05)
    must = np.ones((2, 59), np.bool_)
    with World(2, {"grad": [(SHARD, UNIT)]}, path, cipher=True, packet=UNIT, reported=("grad",)) as network:
        assert exchange(network, 0, must=must).all()
        path.most = 1000
        for step in range(1, 5):
            assert exchange(network, step, must=must).all()
        assert counts(network, "shortened") == [1, 1]


def test_pieces_that_fit_nothing_are_malformed():
    with world(None, cipher=False) as network:
        node = network.nodes[0]
        node.post(network.now, "grad", 0, 0)

        def take(kind, size, number, piece, index=0):
            datagram = packet.encode(
                kind, bytes(size), source=1, channel=CHANNEL, number=number, piece=piece, index=index
            )
            return node.handle(network.now, 1, datagram)

        assert take(DATA, 704, 0, 0x10) == "taken"
        assert take(DATA, 704, 1, 0x12) == "malformed"  # the third of two
        assert take(DATA, 703, 2, 0x11) == "malformed"
        assert take(DATA, UNIT, 3, 0x10) == "malformed"
        assert take(DATA, 704, 4, 0x11, index=58) == "malformed"  # the last unit is shorter
        assert take(DATA, 604, 5, 0x11, index=58) == "taken"
        assert take(PARITY, 704, 6, 0x10) == "malformed"  # of a bucket without reports
        assert take(MEASURE, 704, 7, 0x10, index=2) == "malformed"
        assert not node.exchanges["grad", 0, 0].arrived[1].any()


def test_half_a_unit_is_forgotten_when_many_others_have_begun():
    with world(None, cipher=False) as network:
        node = network.nodes[0]
        held = node.post(network.now, "grad", 0, 0)
        numbers = iter(range(1000))

        def take(unit, piece, value):
            payload = bytes([value]) * (704 if unit < 58 or not piece else 604)
            node.handle(
                network.now,
                1,
                packet.encode(
                    DATA, payload, source=1, channel=CHANNEL, number=next(numbers), piece=0x10 | piece, index=unit
                ),
            )

        for unit in range(33):
            take(unit, 0, unit)
        for unit in reversed(range(33)):
            take(unit, 1, unit)
        assert held.arrived[1].tolist() == [False] + [True] * 32 + [False] * 26
        assert (held.pieces[1, :UNIT] == 0xEE).all()
        assert all((held.pieces[1, unit * UNIT : (unit + 1) * UNIT] == unit).all() for unit in range(1, 33))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["shared", "dedicated"])
@needs_lab
def test_the_mtu_of_an_interface_falls_and_rises(rule, tmp_path):
    """To the host that has it, datagrams that are too long are an error; to the other one they vanish."""

    def change(nodes):
        nodes[0].ip("link set lab0 gso_max_segs 1")  # else batches pass whole, whatever the MTU
        for mtu in (1000, 600, 1500):
            nodes[1].ip(f"link set lab0 mtu {mtu}")
            time.sleep(2)
        time.sleep(11)

    there, here = flood(rule, 19, tmp_path, change)
    assert there["exchanges"] == here["exchanges"] > 200
    for one in (there, here):
        assert one["shortened"] == 2 and one["lengthened"] >= 1
    assert here["too_big"] > 0 and there["too_big"] == 0
