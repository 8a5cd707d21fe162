"""The protocol while the way is cut, or datagrams are replayed: it goes on, or reports the fault. No sockets, no clock."""

import random

import numpy as np
import pytest

from megatron_lossy.transport.udp.library import SECOND
from tests import udp_packet as packet
from tests.test_udp_protocol import UNIT, check, pieces
from tests.udp_packet import ASK, CONTROL_BYTES, DATA, END, NACK, READY, encode
from tests.udp_world import CHANNEL, MS, Node, World, fields_of

pytestmark = pytest.mark.shows(
    "one-way cuts, replays, skipped steps, deadlines", "datagrams: a rank is lost and the others go on", device=False
)

DEAF = 4


def exchange(world, step, deadline=0, phase="grad"):
    """One exchange of all ranks in which a late one loses; what they posted, sent, and the handles of what they sent."""
    shard, _ = world.nodes[0].buckets[phase][0]
    sent = [pieces(node.rank, node.size, shard, step) for node in world.nodes]
    posted = [node.post(world.now, phase, step, 0, deadline=deadline) for node in world.nodes]
    return posted, sent, [node.send(phase, step, 0, sent[node.rank]) for node in world.nodes]


def all_sent(world, handles):
    return all(node.lib.ml_wait(handle, 1, 0) == 0 for node, handle in zip(world.nodes, handles))


@pytest.mark.parametrize("cut", [50 * MS, 400 * MS, 5 * SECOND])
@pytest.mark.parametrize("side", [0, 1])
def test_a_one_way_cut_and_a_deadline_stop_nobody(cut, side):
    """READY 1 is said once when the deadline passes. The sender that missed it is at its eager limit, and asks."""
    end = [None]
    link = lambda source, destination, datagram, now: [] if source == side and now < end[0] else [now + 2 * MS]
    with World(2, {"grad": [(60 * UNIT, UNIT)]}, link, eager=4 * UNIT) as world:
        end[0] = world.now + cut
        for step in range(3):
            posted, sent, handles = exchange(world, step, deadline=100 * MS)
            world.run(lambda: all(x.over_at for x in posted) and all_sent(world, handles))  # noqa: B023
            check(world, "grad", 0, posted, sent)
        world.run(lambda: world.now > end[0], 20 * SECOND)
        resumed = world.now
        world.run_for(3 * SECOND)  # a rank that had to wait for a second has asked by then
        posted, sent, handles = exchange(world, 10, deadline=5 * SECOND)
        world.run(lambda: all(x.over_at for x in posted) and all_sent(world, handles), SECOND)
        assert all(x.arrived.all() for x in posted) and world.now > resumed
        assert sum(node.counters(1 - node.rank)["asks"] for node in world.nodes) > 0


@pytest.mark.parametrize("trip", [4 * MS, 60 * MS])
@pytest.mark.parametrize("cut", [50 * MS, 250 * MS, 1300 * MS, 5 * SECOND])
@pytest.mark.parametrize("way", [(0,), (1,), (0, 1)])
def test_after_a_cut_an_exchange_is_over_at_once(trip, cut, way):
    """Two round trips and 50 ms later, wherever in its back-off the cut has ended."""
    end = [0]
    link = lambda source, destination, datagram, now: [] if source in way and now < end[0] else [now + trip // 2]
    late = []
    with World(2, {"grad": [(60 * UNIT, UNIT)]}, link) as world:
        for step in range(6):
            end[0] = world.now + cut + step * 17 * MS
            posted, _, _ = exchange(world, step)
            world.run(lambda: all(x.over_at for x in posted))  # noqa: B023
            late.append(max(x.over_at for x in posted) - end[0])
            world.run_for(100 * MS)
        assert max(late) <= 2 * trip + 60 * MS, [time / MS for time in late]


def test_a_receiver_that_skips_a_step_is_not_waited_for():
    """It never asks for step 1. Its sender has nothing from it that would say so."""
    with World(2, {"grad": [(60 * UNIT, UNIT)]}, eager=4 * UNIT) as world:
        first, second = world.nodes
        sent = [pieces(0, 2, 60 * UNIT, step) for step in range(3)]
        handles = []
        for step in range(3):
            handles.append(first.send("grad", step, 0, sent[step]))
            if step != 1:
                second.post(world.now, "grad", step, 0)
        last = second.exchanges["grad", 2, 0]
        world.run(lambda: last.over_at and all_sent(world, handles[2:]), 5 * SECOND)
        assert last.arrived.all() and all(first.lib.ml_wait(handle, 1, 0) == 0 for handle in handles)


def test_who_is_asked_says_its_state():
    """READY 0 while it waits, READY 1 when it is done, and nothing before it has posted."""
    node = Node(0, 2, {"grad": [(3 * UNIT, UNIT)]})
    now, number = SECOND, iter(range(100))

    def ask(step):
        node.produce_all(now)
        asked = encode(ASK, source=1, channel=CHANNEL, step=step, number=next(number))
        assert node.handle(now, 1, asked) == "taken"
        said = [packet.decode(datagram) for _, datagram in node.produce_all(now)]
        return [(fields["step"], fields["index"]) for _, kind, fields, _ in said if kind == READY]

    assert ask(1) == []
    node.post(now, "grad", 1, 0)
    assert ask(1) == [(1, 0)]
    assert ask(0) == [(0, 1)]  # passed
    now += 5 * MS
    for unit in range(3):
        node.handle(
            now, 1, encode(DATA, bytes(UNIT), source=1, channel=CHANNEL, step=1, index=unit, number=next(number))
        )
    assert ask(1) == [(1, 1)]
    assert ask(2) == []
    node.close()


@pytest.mark.parametrize("steps", [12, 40])
def test_a_rank_that_is_far_ahead_of_one_that_computes_loses_nothing(steps):
    """More steps than a receiver keeps: what it is asked about and has not come to is no step that it left out."""
    with World(2, {"grad": [(3 * UNIT, UNIT)]}) as world:
        first, second = world.nodes
        sent = [pieces(0, 2, 3 * UNIT, step) for step in range(steps)]
        posted = second.post(world.now, "grad", 0, 0)
        handles = [first.send("grad", step, 0, sent[step]) for step in range(steps)]
        world.run_for(300 * MS)
        for step in range(steps):
            posted = second.post(world.now, "grad", step, 0) if step else posted
            world.run(lambda: posted.over_at, 5 * SECOND)  # noqa: B023
            assert posted.arrived.all() and (posted.pieces[0, : 3 * UNIT] == sent[step][1]).all()
        world.run(lambda: all(first.lib.ml_wait(handle, 1, 0) == 0 for handle in handles), SECOND)


def test_a_rank_that_is_far_ahead_asks_seldom():
    """At intervals that double, and begin anew with each sign of life, of which there is one a second."""
    asked = []

    def link(source, destination, datagram, now):
        if fields_of(datagram)[0] == ASK:
            asked.append(now)
        return [now + MS]

    with World(2, {"grad": [(60 * UNIT, UNIT)]}, link, eager=4 * UNIT) as world:
        world.nodes[0].send("grad", 0, 0, pieces(0, 2, 60 * UNIT))
        world.run_for(20 * SECOND)
    assert 20 <= len(asked) <= 200


def test_an_outage_in_which_what_must_arrive_is_under_way_is_not_taken_for_one():
    """Nothing full has come for longer than the peers' timeout when it is over, and for most of that nothing at all."""
    state = ["data"]
    link = lambda source, destination, datagram, now: (
        []
        if source == 0 and (state[0] == "cut" or (state[0] == "data" and fields_of(datagram)[0] == DATA))
        else [now + MS]
    )
    with World(2, {"grad": [(30 * UNIT, UNIT)]}, link, reported=("grad",), peer_timeout=30 * SECOND) as world:
        first, second = world.nodes
        posted = second.post(world.now, "grad", 0, 0)
        first.send("grad", 0, 0, pieces(0, 2, 30 * UNIT), np.ones((2, 30), bool))
        world.run_for(1900 * MS)
        state[0] = "cut"
        world.run_for(28_200 * MS)
        state[0] = "well"
        world.run(lambda: posted.over_at or second.failed()[0], 20 * SECOND)
        assert second.failed() == (0, 0) and posted.arrived.all()


def test_what_must_arrive_and_cannot_is_not_asked_for_for_ever():
    """Its sender lives and sends it again and again; after the peers' timeout it counts as gone."""
    link = lambda source, destination, datagram, now: (
        [] if source == 0 and fields_of(datagram)[0] == DATA else [now + MS]
    )
    with World(2, {"grad": [(30 * UNIT, UNIT)]}, link, reported=("grad",), peer_timeout=5 * SECOND) as world:
        first, second = world.nodes
        second.post(world.now, "grad", 0, 0)
        first.send("grad", 0, 0, pieces(0, 2, 30 * UNIT), np.ones((2, 30), bool))
        begun = world.now
        world.run(lambda: second.failed()[0], 20 * SECOND)
        assert second.failed() == (DEAF, 0) and world.now - begun >= 5 * SECOND


def test_the_list_of_what_must_arrive_is_taken_though_no_memory_is_left():
    """The memory of an exchange that waits here is asked for by this rank, not by peers."""
    buckets = {"grad": [(600 * UNIT, UNIT)] * 9}
    node = Node(0, 2, buckets, reported=("grad",), memory=20_000, packet=1408)
    number = iter(range(10_000))
    for bucket in range(1, 9):  # what nobody has asked for yet fills the pool
        for unit in range(600):
            node.handle(SECOND, 1, encode(
                DATA, bytes(UNIT), source=1, channel=CHANNEL, bucket=bucket, index=unit, number=next(number)
            ))  # fmt: skip
    assert node.counters(1)["early_dropped"] > 100
    posted = node.post(SECOND, "grad", 0, 0)
    must = list(range(0, 600, 2))
    room = CONTROL_BYTES // 4 - 1
    for part in range(-(-len(must) // room)):
        payload = np.array([len(must), *must[part * room : (part + 1) * room]], "<u4").tobytes()
        end = encode(END, payload, source=1, channel=CHANNEL, index=600 + part, number=next(number))
        assert node.handle(SECOND, 1, end) == "taken"
    node.timers(SECOND + 20 * MS)
    asked = [packet.decode(datagram) for _, datagram in node.produce_all(SECOND + 20 * MS)]
    assert sum(fields["index"] for _, kind, fields, _ in asked if kind == NACK) == 300
    for unit in must:
        node.handle(SECOND + 21 * MS, 1, encode(
            DATA, bytes(UNIT), source=1, channel=CHANNEL, index=unit, number=next(number)
        ))  # fmt: skip
    node.timers(SECOND + 60 * MS)
    assert posted.over_at and posted.arrived[1].sum() == 300
    node.close()


def test_numbers_are_taken_once():
    """Sealed datagrams in an order far from theirs, some of them several times: as a set that remembers would do."""
    generator = random.Random(5)
    units = 3000
    settings = {"cipher": True, "window": 10**5, "eager": 1 << 24, "rate": 2e6}  # which 8,192 numbers are enough for
    node, other = (Node(rank, 2, {"grad": [(units * UNIT, UNIT)] * 8}, **settings) for rank in range(2))
    for bucket in range(8):
        node.post(SECOND, "grad", 0, bucket)
        other.send("grad", 0, bucket, pieces(1, 2, units * UNIT, bucket))
    sealed, now = [], SECOND
    for _ in range(4000):
        now += MS
        sealed += [datagram for _, datagram in other.produce_all(now)]
    assert len(sealed) > 8 * units
    numbers = [fields_of(datagram)[1]["number"] for datagram in sealed]
    order = sorted(range(len(sealed)), key=lambda k: k + generator.choice([0, 40, 3000, 12_000]) * generator.random())
    order = [k for k in order for _ in range(generator.choice([1, 1, 2]))]
    order += generator.sample(range(len(sealed)), 500)  # and once more at the end: an attacker
    ring = 8192 - 64
    seen, top, again = set(), 0, 0
    for k in order:
        fresh = numbers[k] not in seen and numbers[k] + ring >= top
        before = node.counters(1)["received"]
        node.handle(now, 1, sealed[k])
        assert node.counters(1)["received"] - before == fresh, numbers[k]
        if fresh:
            seen.add(numbers[k])
            top = max(top, numbers[k] + 1)
        again += not fresh
    assert again > 3000 and len(seen) > 10_000
    node.close()
    other.close()


def test_a_fast_path_that_reorders_loses_nothing_to_the_window():
    """Half of the datagrams come 10 ms later, which is 15,000 numbers at that rate."""
    generator = random.Random(1)
    link = lambda source, destination, datagram, now: [now + MS + generator.randrange(2) * 10 * MS]
    settings = {"cipher": True, "rate": 2e8, "reorder": 50 * MS, "window": 10**5, "eager": 1 << 24}
    with World(2, {"grad": [(20_000 * UNIT, UNIT)]}, link, **settings) as world:
        posted, sent, _ = exchange(world, 0)
        world.run(lambda: all(x.over_at for x in posted))
        check(world, "grad", 0, posted, sent)
        assert all(x.arrived.all() for x in posted)


def test_a_replayed_request_costs_nothing():
    """A NACK asks for many units; who replays it would have them sent as often as he likes."""
    buckets = {"grad": [(100 * UNIT, UNIT)]}
    lost = [True]
    nacks = []

    def link(source, destination, datagram, now):
        kind, _ = fields_of(datagram)
        if kind == NACK:
            nacks.append(datagram)
            lost[0] = False
        return [] if kind == DATA and lost[0] else [now + MS]

    with World(2, buckets, link, cipher=True, reported=("grad",), packet=1408) as world:
        first, second = world.nodes
        posted = second.post(world.now, "grad", 0, 0)
        handle = first.send("grad", 0, 0, pieces(0, 2, 100 * UNIT), np.ones((2, 100), bool))
        world.run(lambda: len(nacks) > 0)
        world.run_for(MS)
        resent = [first.counters(1)["resent"]]
        for _ in range(100):
            assert first.handle(world.now, 1, nacks[0]) == "duplicate"
        first.produce_all(world.now)
        resent.append(first.counters(1)["resent"])
        assert resent[1] - resent[0] <= 100
        world.run(lambda: posted.over_at and posted.arrived.all(), 5 * SECOND)
        assert first.lib.ml_wait(handle, 1, 0) == 0


# --- a rank is lost and the others go on ------------------------------------------------------------------------------


SILENT, LEFT, IN_VAIN = 1, 3, 5
UNITS = 30
TIMEOUT = 5 * SECOND


def three_ranks(gone):
    """Three ranks, of which nothing comes from the last one, nor to it, once ``gone`` holds a time that has passed."""

    def link(source, destination, datagram, now):
        cut = 2 in (source, destination) and gone and now >= gone[0]
        return [] if cut else [now + 2 * MS]

    return World(3, {"grad": [(UNITS * UNIT, UNIT)]}, link, eager=4 * UNIT, peer_timeout=TIMEOUT, bears=True)


def survivors_exchange(all_of_them, step, limit):
    """The exchange of the first two ranks; what they posted."""
    nodes = all_of_them.nodes[:2]
    sent = [np.full((3, UNITS * UNIT), 10 * step + node.rank, np.uint8) for node in nodes]
    posted = [node.post(all_of_them.now, "grad", step, 0) for node in nodes]
    handles = [node.send("grad", step, 0, sent[node.rank]) for node in nodes]
    all_of_them.run(lambda: all(x.over_at for x in posted) and all_sent(all_of_them, handles), limit)
    for node, got, other in zip(nodes, posted, (1, 0)):
        assert got.arrived[other].all() and not got.arrived[2].any()
        assert (got.pieces[other][: UNITS * UNIT] == 10 * step + other).all()
        assert not node.failed()[0]
    return posted


def test_who_is_silent_for_the_timeout_is_done_without():
    """The exchange under way waits for it, and no later one does."""
    gone = []
    with three_ranks(gone) as three:
        gone.append(three.now + 500 * MS)
        posted, _, handles = exchange(three, 0)
        three.run(lambda: all(x.over_at for x in posted) and all_sent(three, handles))
        assert all(x.arrived.all() for x in posted)
        three.run_for(SECOND)
        began = three.now
        survivors_exchange(three, 1, 2 * TIMEOUT)
        assert TIMEOUT - 2 * SECOND <= three.now - began <= TIMEOUT + SECOND
        assert [node.lib.ml_lost(node.channel, 2) for node in three.nodes[:2]] == [SILENT] * 2
        for step in range(2, 6):
            survivors_exchange(three, step, 200 * MS)
        assert all(node.counters(2)["lost"] == 5 * UNITS for node in three.nodes[:2])


def test_who_is_lost_by_the_caller_is_done_without_at_once_and_what_came_stays():
    with three_ranks([]) as three:
        posted = [node.post(three.now, "grad", 0, 0) for node in three.nodes]
        data = [np.full((3, UNITS * UNIT), node.rank + 1, np.uint8) for node in three.nodes]
        for node in three.nodes[:2]:
            node.send("grad", 0, 0, data[node.rank])
        three.run(lambda: posted[2].over_at)
        assert not posted[0].over_at
        three.nodes[0].lib.ml_lose(three.nodes[0].channel, 2, three.now)
        three.nodes[0].look(three.now)
        assert posted[0].over_at and posted[0].arrived[1].all() and not posted[0].arrived[2].any()
        assert not posted[1].over_at  # to whom nobody said it
        assert three.nodes[0].lib.ml_lost(three.nodes[0].channel, 2) == IN_VAIN
        assert not three.nodes[0].lib.ml_lost(three.nodes[0].channel, 1)


@pytest.mark.parametrize("deaf", [False, True])
def test_who_is_done_without_hears_of_it(deaf):
    """``deaf``: not at first, and again when it sends something."""
    gone = []
    with three_ranks(gone) as three:
        three.run_for(50 * MS)
        if deaf:
            gone.append(three.now)
        three.nodes[0].lib.ml_lose(three.nodes[0].channel, 2, three.now)
        three.run_for(100 * MS)
        assert three.nodes[2].lib.ml_lost(three.nodes[2].channel, 0) == (0 if deaf else LEFT)
        gone.clear()
        sent = np.full((3, UNITS * UNIT), 3, np.uint8)
        posted = [node.post(three.now, "grad", 0, 0) for node in three.nodes[1:]]
        handles = [node.send("grad", 0, 0, sent) for node in three.nodes[1:]]
        three.run(lambda: posted[1].over_at, SECOND)
        assert three.nodes[2].lib.ml_lost(three.nodes[2].channel, 0) == LEFT
        assert not posted[1].arrived[0].any() and posted[1].arrived[1].all()
        three.run(lambda: all_sent(three, handles[1:]), SECOND)


def test_who_leaves_is_done_without_at_once():
    with three_ranks([]) as three:
        posted = [node.post(three.now, "grad", 0, 0) for node in three.nodes[:2]]
        data = [np.full((3, UNITS * UNIT), node.rank + 1, np.uint8) for node in three.nodes]
        for node in three.nodes[:2]:
            node.send("grad", 0, 0, data[node.rank])
        three.run_for(50 * MS)
        three.nodes[2].lib.ml_close(three.nodes[2].channel, three.now)
        three.run(lambda: all(x.over_at for x in posted), SECOND)
        assert [node.lib.ml_lost(node.channel, 2) for node in three.nodes[:2]] == [LEFT] * 2
        survivors_exchange(three, 1, 200 * MS)
