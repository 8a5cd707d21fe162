"""Units that must arrive, and reports of those that did not: without sockets and without a clock."""

import random

import numpy as np
import pytest

from megatron_lossy.transport.udp.library import SECOND
from tests import udp_packet as packet
from tests.udp_packet import DATA, END, NACK, READY, encode
from tests.udp_world import CHANNEL, MS, Node, World, fields_of

pytestmark = pytest.mark.shows("what must arrive, its copies and reports, with lost words", device=False)

UNIT = 64
UNITS = 40
SHARD = UNITS * UNIT - 7
REPORTED = {"reported": ("grad",)}


def some(size, units, share, seed):
    """bool[size, units]."""
    return np.random.default_rng(seed).random((size, units)) < share


def bytes_of(rank, size, shard):
    return np.random.default_rng([rank, 1]).integers(0, 256, (size, shard), np.uint8)


def exchange(world, must, copies=(1, 0), step=0, shard=SHARD, deadline=0):
    """Every node sends to every other one; returns handles, and what each sent."""
    sent = [bytes_of(node.rank, node.size, shard) for node in world.nodes]
    for node in world.nodes:
        node.post(world.now, "grad", step, 0, deadline=deadline)
    handles = [
        node.send("grad", step, 0, sent[node.rank], None if must is None else must[node.rank], copies)
        for node in world.nodes
    ]
    return handles, sent


def run(world, handles, step=0):
    """Run until all ranks have everything."""

    def over():
        reports = [node.reports(handle, "grad", 0) for node, handle in zip(world.nodes, handles, strict=True)]
        return all(node.exchanges["grad", step, 0].over_at for node in world.nodes) and all(
            report is not None for report in reports
        )

    world.run(over)


def losing(p, seed, kinds=range(9)):
    """A link of 5 ms that loses a share of the datagrams of these kinds."""
    generator = random.Random(seed)

    def link(source, destination, datagram, now):
        lost = fields_of(datagram)[0] in kinds and generator.random() < p
        return [] if lost else [now + 5 * MS]

    return link


def check(world, handles, sent, must, step=0):
    """Check that arrived units are right, required ones are there, and reports name the missing ones."""
    for receiver in world.nodes:
        got = receiver.exchanges["grad", step, 0]
        for sender in world.nodes:
            if sender is receiver:
                continue
            arrived = got.arrived[sender.rank]
            if must is not None:
                assert arrived[must[sender.rank][receiver.rank]].all()
            lost = sender.reports(handles[sender.rank], "grad", 0)[receiver.rank]
            np.testing.assert_array_equal(lost, ~arrived)
            whole = np.repeat(arrived, UNIT)[: sent[sender.rank].shape[1]]
            piece = got.pieces[sender.rank, : len(whole)]
            np.testing.assert_array_equal(piece[whole], sent[sender.rank][receiver.rank][whole])
            assert (piece[~whole] == 0xEE).all()


def exchanged(world, must, copies=(1, 0), step=0, shard=SHARD):
    """Make a whole exchange, and check it."""
    handles, sent = exchange(world, must, copies, step, shard)
    run(world, handles, step)
    check(world, handles, sent, must, step)


@pytest.mark.parametrize("cipher", [False, True])
@pytest.mark.parametrize(
    ("p", "copies"), [(0.0, (1, 0)), (0.3, (1, 0)), (0.3, (10, 5)), (0.6, (10, 2)), (0.6, (5, 14))]
)
def test_what_must_arrive_does_and_the_rest_is_reported(p, copies, cipher):
    must = [some(3, UNITS, 0.3, rank) for rank in range(3)]
    with World(3, {"grad": [(SHARD, UNIT)]}, losing(p, 1), cipher=cipher, **REPORTED) as world:
        for step in range(4):
            exchanged(world, must, copies, step)
        counters = world.nodes[0].counters(1)
        assert (counters["resent"] > 0) == (p > 0)
        assert (counters["copies"] > 0) == (copies[1] > 0)
        assert (counters["lost"] > 0) == (p > 0)


@pytest.mark.parametrize("kinds", [(READY,), (END,), (NACK,), (READY, END, NACK)])
def test_lost_words_are_said_again(kinds):
    """Seven of ten of them are lost; of a message whose reports and lists come in several parts."""
    units = 3 * 8 * UNIT - 5  # bits of three packets
    shard = units * UNIT - 1
    must = [some(2, units, 0.2, rank) for rank in range(2)]
    generator = random.Random(3)

    def link(source, destination, datagram, now):
        kind = fields_of(datagram)[0]
        lost = generator.random() < (0.7 if kind in kinds else 0.1 if kind == DATA else 0.0)
        return [] if lost else [now + 5 * MS]

    with World(2, {"grad": [(shard, UNIT)]}, link, window=4000, eager=1 << 24, **REPORTED) as world:
        exchanged(world, must, (8, 1), shard=shard)


def test_reports_come_although_the_exchange_is_gone():
    """The receiver has released it, and answers what is asked again."""
    silenced = {"on": True}

    def link(source, destination, datagram, now):
        return [] if silenced["on"] and fields_of(datagram)[0] == READY and source == 1 else [now + 5 * MS]

    with World(2, {"grad": [(SHARD, UNIT)]}, link, **REPORTED) as world:
        handles, _ = exchange(world, None)
        world.run(lambda: world.nodes[1].exchanges["grad", 0, 0].over_at)
        arrived = world.nodes[1].exchanges["grad", 0, 0].arrived[0].copy()
        world.nodes[1].released(("grad", 0, 0))
        world.run_for(200 * MS)
        assert world.nodes[0].reports(handles[0], "grad", 0) is None
        silenced["on"] = False
        world.run(lambda: world.nodes[0].reports(handles[0], "grad", 0) is not None)
        np.testing.assert_array_equal(world.nodes[0].reports(handles[0], "grad", 0)[1], ~arrived)


def test_sources_may_change_when_all_was_sent():
    """Repetitions come from a copy."""
    must = [np.ones((2, UNITS), dtype=bool) for _ in range(2)]
    with World(2, {"grad": [(SHARD, UNIT)]}, losing(0.5, 5), **REPORTED) as world:
        handles, sent = exchange(world, must, (10, 3))
        kept = [one.copy() for one in sent]
        nodes = world.nodes
        world.run(lambda: all(node.lib.ml_wait(handle, 1, 0) == 0 for node, handle in zip(nodes, handles, strict=True)))
        for one in sent:
            one[:] = 0
        run(world, handles)
        check(world, handles, kept, must)


def test_a_lost_unit_that_must_arrive_takes_a_round_trip_and_with_a_copy_none():
    """10 ms of round trip, and a reorder window of 1 ms."""
    must = [np.zeros((2, UNITS), dtype=bool) for _ in range(2)]
    must[0][1, [3, 4]] = must[1][0, [3, 4]] = True
    took = {}
    for copies in ((1, 0), (2, 1)):

        def link(source, destination, datagram, now):
            kind, fields = fields_of(datagram)
            return [] if kind == DATA and fields["index"] == 3 and not fields["tag"] else [now + 5 * MS]

        with World(2, {"grad": [(SHARD, UNIT)]}, link, **REPORTED) as world:
            exchanged(world, must, copies)
            got = world.nodes[0].exchanges["grad", 0, 0]
            took[copies] = (got.over_at - got.posted_at) / MS
    assert 5 <= took[2, 1] < 8 and 15 < took[1, 0] < 19


def test_what_is_asked_for_comes_twice():
    """So that a unit of which one more is lost takes no second round trip; the two are apart, as losses come in bursts."""
    must = [np.zeros((2, UNITS), dtype=bool) for _ in range(2)]
    must[0][1, 3] = must[1][0, 3] = True
    again: dict[tuple[int, int], list[int]] = {}

    def link(source, destination, datagram, now):
        kind, fields = fields_of(datagram)
        if kind != DATA or fields["index"] != 3:
            return [now + 5 * MS]
        if fields["tag"]:
            again.setdefault((source, destination), []).append(now)
        return [now + 5 * MS] if len(again.get((source, destination), [])) > 1 else []

    with World(2, {"grad": [(SHARD, UNIT)]}, link, **REPORTED) as world:
        exchanged(world, must)
        got = world.nodes[0].exchanges["grad", 0, 0]
        assert 15 * MS < got.over_at - got.posted_at < 20 * MS
    assert [len(times) for times in again.values()] == [2, 2]
    assert all(later - sooner >= MS for sooner, later in again.values())


def waits(copies, exchanges, units=60, must=29, p=0.05):
    """Milliseconds that both sides of each exchange take over 10 ms one way, and datagrams sent again."""
    generator, drawn, took = random.Random(4), np.random.default_rng(4), []

    def link(source, destination, datagram, now):
        return [] if generator.random() < p else [now + 10 * MS]

    with World(2, {"grad": [(units * UNIT, UNIT)]}, link, reorder=-1, **REPORTED) as world:
        for step in range(exchanges):
            chosen = [np.zeros((2, units), dtype=bool) for _ in range(2)]
            for rank in range(2):
                chosen[rank][1 - rank, drawn.permutation(units)[:must]] = True
            started = world.now
            handles, _ = exchange(world, chosen if must else None, copies, step, units * UNIT)
            run(world, handles, step)
            took.append((max(node.exchanges["grad", step, 0].over_at for node in world.nodes) - started) / MS)
            for node, handle in zip(world.nodes, handles, strict=True):
                node.released(("grad", step, 0))
                node.lib.ml_release(handle)
            world.run_for(30 * MS)
        again = sum(node.counters(1 - node.rank)["resent"] for node in world.nodes)
    return np.array(took[20:]), again  # the first ones have no round trip yet


def test_packets_of_high_priority_cost_no_round_trip_in_99_of_100_exchanges():
    """29 of them, as the top 1 % of 4 MB; 5 % lost, 20 ms; 400 exchanges. With copies P99 is that of exchanges without."""
    plain, _ = waits((1, 0), 400, must=0)
    copied, again = waits((100, 250), 400)
    assert np.percentile(copied, 99) <= np.percentile(plain, 99) + 5
    assert np.median(copied) <= np.median(plain) + 1 and again < 20
    assert (copied > np.percentile(plain, 99) + 10).mean() < 0.01
    # With one copy each, one of eight exchanges has to ask: a round trip, and hardly ever a second one.
    once, _ = waits((100, 100), 400)
    asked = once > np.percentile(plain, 99) + 10
    assert 0.06 < asked.mean() < 0.2
    assert (once[asked] > np.percentile(plain, 99) + 30).mean() < 0.1


def fed(must=(), **how):
    """A node that has posted, and the reports that it got of source 1."""
    node = Node(0, 2, {"grad": [(4 * UNIT, UNIT)]}, reorder=MS, **REPORTED, **how)
    node.post(SECOND, "grad", 0, 0)
    node.produce_all(SECOND)
    return node


def said(kind, payload=b"", **fields):
    return encode(kind, payload, source=1, channel=CHANNEL, **fields)


def test_what_end_and_nack_and_ready_say_byte_by_byte():
    node = fed()
    node.handle(SECOND, 1, said(DATA, bytes(UNIT), index=1))
    assert node.handle(SECOND, 1, said(END, packet.end([0, 1, 3]), index=4)) == "taken"
    node.timers(SECOND + MS)
    said_now = [packet.decode(datagram) for _, datagram in node.produce_all(SECOND + MS)]
    [(fields, payload)] = [(fields, payload) for _, kind, fields, payload in said_now if kind == NACK]
    assert fields["index"] == 2 and np.frombuffer(payload, "<u4").tolist() == [0, 3]
    for unit in (0, 3):
        assert node.handle(SECOND + MS, 1, said(DATA, bytes(UNIT), index=unit, tag=2)) == "taken"
    node.timers(SECOND + MS)
    readies = [packet.decode(datagram) for _, datagram in node.produce_all(SECOND + MS)]
    [(fields, payload)] = [(fields, payload) for _, kind, fields, payload in readies if kind == READY]
    assert fields["index"] == 1 and payload == bytes([0b0100])
    node.close()
    sender = Node(0, 2, {"grad": [(4 * UNIT, UNIT)]}, **REPORTED)
    data = bytes_of(0, 2, 4 * UNIT)
    must = np.array([[0, 0, 0, 0], [1, 1, 0, 1]], dtype=bool)
    handle = sender.send("grad", 0, 0, data, must, (3, 2))
    wire = [packet.decode(datagram)[1:] for _, datagram in sender.produce_all(SECOND)]
    assert [kind for kind, *_ in wire] == [DATA] * 6 + [END]
    for unit, (_, fields, payload) in enumerate(wire[4:6]):
        assert (fields["index"], fields["tag"]) == (unit, 1) and payload == data[1].reshape(4, UNIT)[unit].tobytes()
    assert wire[6][1]["index"] == 4 and wire[6][2] == packet.end([0, 1, 3])
    assert sender.handle(SECOND, 1, said(NACK, np.array([3, 2, 0], "<u4").tobytes(), index=3)) == "taken"
    again = [packet.decode(datagram)[1:] for _, datagram in sender.produce_all(SECOND + MS)]
    assert [(kind, fields["index"], fields["tag"]) for kind, fields, _ in again] == [(DATA, 3, 2), (DATA, 0, 2)]
    assert again[0][2] == data[1][3 * UNIT :].tobytes()
    assert sender.reports(handle, "grad", 0) is None
    sender.handle(SECOND, 1, said(READY, bytes([0b0110]), index=1))
    np.testing.assert_array_equal(sender.reports(handle, "grad", 0)[1], [False, True, True, False])
    sender.close()


@pytest.mark.parametrize(
    ("kind", "index", "payload"),
    [
        (END, 4, b""),
        (END, 4, packet.end([0, 1]) + b"\0"),
        (END, 5, packet.end([0, 1])),
        (END, 3, packet.end([0, 1])),
        (END, 4, packet.end(range(5))),
        (NACK, 0, b""),
        (NACK, 2, np.array([1], "<u4").tobytes()),
        (NACK, 20, np.zeros(20, "<u4").tobytes()),
        (READY, 1, bytes(2)),
        (READY, 2, bytes(1)),
        (READY, 0, bytes(1)),
    ],
)
def test_what_does_not_fit_is_malformed(kind, index, payload):
    node = fed()
    assert node.handle(SECOND, 1, said(kind, payload, index=index)) == "malformed"
    assert node.counters(1)["malformed"] == 1
    node.close()


@pytest.mark.parametrize("units", [[1, 0], [0, 0], [0, 7]])
def test_a_list_that_is_none_asks_for_nothing(units):
    """Without a cipher anybody can write one."""
    node = fed()
    node.handle(SECOND, 1, said(END, packet.end(units), index=4))
    node.timers(SECOND + 2 * MS)
    assert node.exchanges["grad", 0, 0].over_at
    node.close()


#: bool[2, UNITS]: all units of a message from node 0 to node 1 must arrive.
ALL = np.array([[False], [True]]) & np.ones(UNITS, np.bool_)


def test_a_message_that_must_arrive_whole_has_a_short_end_and_all_is_asked_for_at_once():
    """A list of 40 units, of which 15 fit a datagram; a round trip for all of them."""
    said = []

    def link(source, destination, datagram, now):
        kind, fields = fields_of(datagram)
        said.append((now, kind, fields["index"], datagram))
        return [] if kind == DATA and not fields["tag"] else [now + 5 * MS]

    with World(2, {"grad": [(SHARD, UNIT)]}, link, **REPORTED) as world:
        sent, begun = bytes_of(0, 2, SHARD), world.now
        got = world.nodes[1].post(begun, "grad", 0, 0, [0])
        world.nodes[0].send("grad", 0, 0, sent, ALL)
        world.run(lambda: got.over_at)
        assert got.arrived.all() and got.over_at - begun < 17 * MS
    ends = {(index, packet.decode(datagram)[3]) for _, kind, index, datagram in said if kind == END}
    assert ends == {(UNITS, packet.end(None))}
    asked = [(now, index) for now, kind, index, _ in said if kind == NACK]
    assert [index for _, index in asked] == [15, 15, 10] and len({now for now, _ in asked}) == 1


def test_a_sender_far_ahead_loses_nothing():
    """It sends thirty messages before the first is asked for, and none is kept that is too far ahead."""
    with World(2, {"grad": [(SHARD, UNIT)]}, losing(0, 0), **REPORTED) as world:
        sent = bytes_of(0, 2, SHARD)
        for step in range(30):
            world.nodes[0].send("grad", step, 0, sent, ALL)
        world.run_for(SECOND)
        assert world.nodes[1].counters(0)["early"] == 9 * UNITS
        for step in range(30):
            got = world.nodes[1].post(world.now, "grad", step, 0, [0])
            world.run(lambda got=got: got.over_at)
            assert got.arrived.all()
            np.testing.assert_array_equal(got.pieces[0, :SHARD], sent[1])
            assert (got.pieces[0, SHARD:] == 0xEE).all()


def test_a_message_whose_number_is_far_above_those_of_other_buckets_arrives():
    """The sender has had no sign of where the receiver is, and the receiver takes no part in it yet."""
    with World(2, {"grad": [(SHARD, UNIT)] * 2}, losing(0, 0), **REPORTED) as world:
        sent = bytes_of(0, 2, SHARD)
        world.nodes[0].post(world.now, "grad", 3, 0, [1])
        world.nodes[1].send("grad", 3, 0, bytes_of(1, 2, SHARD), ALL[::-1])
        world.run_for(SECOND)
        world.nodes[0].send("grad", 100, 1, sent, ALL)
        world.run_for(SECOND)
        assert world.nodes[1].counters(0)["early_dropped"] >= UNITS
        got = world.nodes[1].post(world.now, "grad", 100, 1, [0])
        world.run(lambda: got.over_at)
        assert got.arrived[0].all()
        np.testing.assert_array_equal(got.pieces[0, :SHARD], sent[1])
