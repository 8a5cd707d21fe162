"""``--udp-deadline auto`` of streams: what it cuts on simulated links and on links that stall."""

import math
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lab import Lab, Link
from megatron_lossy.transport.stream import link
from megatron_lossy.transport.stream.deadline import Looks, Pace
from tests.programs import until
from tests.test_lab import needs_lab
from tests.test_stream import LONG, UNIT, UNITS, Ranks, finish, one_way

pytestmark = pytest.mark.shows("streams: the automatic deadline cuts tails, as far as the user accepts", device=False)

FRAMES = 16


# --- simulated links -----------------------------------------------------------------------------------------------------


def exchange(pace, sources):
    """Exchange over links on which the frames of each of ``sources`` come at the given times. Returns its seconds, and the lost share."""
    looks, cut = Looks(pace), {}

    def missing(now):
        return {
            name: sum(time > now for time in times) / FRAMES
            for name, times in enumerate(sources)
            if name not in cut and times[-1] > now
        }

    while True:
        now = looks.due(0.0)
        misses = missing(now)
        if not misses:
            break
        for name in looks.standing(0.0, now, misses):
            if pace.lose(misses[name] / len(sources)):
                cut[name] = now, misses[name] / len(sources)
        if not missing(now):
            break
    ended = max(cut[name][0] if name in cut else times[-1] for name, times in enumerate(sources))
    pace.note(ended)
    return ended, sum(lost for _, lost in cut.values())


def frames(draw, each, stalls=0.0, longest=0.0):
    """The times of the frames of a message, which come every ``each`` seconds, but for those before which the link stalls."""
    now, times = 0.0, []
    for _ in range(FRAMES):
        now += each + (draw.uniform(0, longest) if draw.random() < stalls else 0.0)
        times.append(now)
    return times


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.5, 0.9, 0.99, 1.0]),
    count=st.integers(1, 4),
    links=st.lists(st.tuples(st.floats(0.001, 0.1), st.floats(0, 0.5), st.floats(0, 5)), min_size=1, max_size=4),
)
def test_no_more_is_lost_than_is_accepted_whatever_links_do(seed, share, count, links):
    """Links become slower, faster and worse; one exchange loses no more than eight may."""
    draw, pace, lost = random.Random(seed), Pace(share), []
    for each, stalls, longest in links:
        for _ in range(40):
            sources = [frames(draw, each * draw.uniform(0.5, 2), stalls, longest) for _ in range(count)]
            lost.append(exchange(pace, sources)[1])
            assert sum(lost) <= (1 - share) * len(lost) + 1e-9
            assert lost[-1] <= 8 * (1 - share) + 1e-9


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), each=st.floats(0.001, 0.1))
def test_what_comes_at_more_than_half_the_usual_rate_is_not_cut(seed, each):
    draw, pace = random.Random(seed), Pace(0.5)
    for _ in range(40):
        assert exchange(pace, [frames(draw, each)])[1] == 0
    for _ in range(15):  # less than half of those that make the usual time
        assert exchange(pace, [frames(draw, each * draw.uniform(1, 1.6))])[1] == 0


@settings(deadline=None)
@given(each=st.floats(0.001, 0.1), late=st.floats(10, 1000))
def test_a_tail_is_cut(each, late):
    """The last frame of one exchange in ten is late."""
    draw, pace = random.Random(0), Pace(0.99)
    for number in range(100):
        times = frames(draw, each)
        cut = number > 10 and number % 10 == 0
        if cut:
            times[-1] += late * each * FRAMES
        took, lost = exchange(pace, [times])
        assert lost == (1 / FRAMES if cut else 0)
        assert took <= 1.5 * (FRAMES * each + 0.002) + 1e-9


def test_before_ten_exchanges_nothing_is_late():
    pace = Pace(0.99)
    for _ in range(9):
        pace.note(1.0)
    assert pace.usual == math.inf
    pace.note(1.0)
    assert pace.usual == pytest.approx(1.002)


# --- links that stall ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", [0.05, 0.5])
def test_a_link_that_loses_and_stalls_costs_a_tail_and_no_body(monkeypatch, rest):
    with Ranks(2, pause=0.0, deadline="auto") as ranks:
        [relay] = ranks.relays.values()
        for number in range(12):
            finish(*one_way(ranks, number))
        monkeypatch.setattr(link.Link, "loses", True)
        relay.most = len(relay.calls[0]) + (1 - rest) * UNITS * UNIT
        taking, giving = one_way(ranks, 12)
        if rest < 0.08:
            finish(taking, giving)
            assert 0.9 < taking.arrived[1].mean() < 1 and taking._cut
        else:
            waiting = threading.Thread(target=finish, args=(taking,))
            waiting.start()
            looks = set()
            until(lambda: looks.add(taking._looks._next) or len(looks) > 4)
        monkeypatch.setattr(link.Link, "loses", False)
        relay.most = math.inf
        relay.goes.set()
        if rest > 0.08:
            waiting.join()
            finish(giving)
            assert taking.arrived.all()
        taking, giving = one_way(ranks, 13)
        finish(taking, giving)
        assert taking.arrived.all()


@needs_lab
def test_the_kernel_counts_what_comes_behind_missing_packets():
    def lose():
        for channel in ranks.channels:
            measured = threading.Event()
            for one in channel.links.values():
                channel.host.ask(one.read)
            channel.host.ask(measured.set)
            assert measured.wait(LONG)
        return [one.loses for channel in ranks.channels for one in channel.links.values()]

    with Lab(Link(delay=0.001)) as lab, Ranks(2, lab=lab, deadline="auto") as ranks:
        for number in range(3):
            ranks.exchange(number)
        assert lose() == [False, False]
        lab.set(Link(delay=0.001, loss=0.02))
        assert all(arrived.all() for arrived in ranks.exchange(3))
        assert lose() == [True, True]
