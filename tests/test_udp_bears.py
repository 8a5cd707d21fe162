"""Channels that bear the loss of a rank: the others go on without it. No sockets, no clock."""

import numpy as np
import pytest

from megatron_lossy.transport.udp.engine import SECOND
from tests.test_udp_outages import all_sent, exchange
from tests.udp_world import MS, World

pytestmark = pytest.mark.shows("datagrams: a rank is lost and the others go on", device=False)

SILENT, LEFT, IN_VAIN = 1, 3, 5
UNIT, UNITS = 64, 30
TIMEOUT = 5 * SECOND


def world(gone, bears=True):
    """Three ranks, of which nothing comes from the last one, nor to it, once ``gone`` holds a time that has passed."""

    def link(source, destination, datagram, now):
        cut = 2 in (source, destination) and gone and now >= gone[0]
        return [] if cut else [now + 2 * MS]

    return World(3, {"grad": [(UNITS * UNIT, UNIT)]}, link, eager=4 * UNIT, peer_timeout=TIMEOUT, bears=bears)


def survivors_exchange(all_of_them, step, limit):
    """The exchange of the first two ranks; what they posted."""
    nodes = all_of_them.nodes[:2]
    sent = [np.full((3, UNITS * UNIT), 10 * step + node.rank, np.uint8) for node in nodes]
    posted = [node.post(all_of_them.now, "grad", step, 0) for node in nodes]
    handles = [node.send("grad", step, 0, sent[node.rank]) for node in nodes]
    all_of_them.run(lambda: all(x.over_at for x in posted) and all_sent(all_of_them, handles), limit)
    for node, one, other in zip(nodes, posted, (1, 0)):
        assert one.arrived[other].all() and not one.arrived[2].any()
        assert (one.pieces[other][: UNITS * UNIT] == 10 * step + other).all()
        assert not node.failed()[0]
    return posted


def test_who_is_silent_for_the_timeout_is_done_without():
    """The exchange under way waits for it, and no later one does."""
    gone = []
    with world(gone) as three:
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
    with world([]) as three:
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
    with world(gone) as three:
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
    with world([]) as three:
        posted = [node.post(three.now, "grad", 0, 0) for node in three.nodes[:2]]
        data = [np.full((3, UNITS * UNIT), node.rank + 1, np.uint8) for node in three.nodes]
        for node in three.nodes[:2]:
            node.send("grad", 0, 0, data[node.rank])
        three.run_for(50 * MS)
        three.nodes[2].lib.ml_close(three.nodes[2].channel, three.now)
        three.run(lambda: all(x.over_at for x in posted), SECOND)
        assert [node.lib.ml_lost(node.channel, 2) for node in three.nodes[:2]] == [LEFT] * 2
        survivors_exchange(three, 1, 200 * MS)
