"""The rate next to other flows: the effect of the engine's rule on links and on a bottleneck."""

import ctypes
import dataclasses
import random

import numpy as np
import pytest

from benchmarks import congestion
from benchmarks.lab.bottleneck import Bottleneck, Flow, run
from megatron_lossy.base import native
from megatron_lossy.transport.udp.library import RULES, SECOND
from tests.udp_world import MS, World, load

pytestmark = pytest.mark.shows("rates next to others: the rule on links and at a bottleneck", device=False)

PHASES = ("starts", "grows", "dips")


#: Without a compiler there is an engine that was built before, but no packet model.
compiled = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


@compiled
def test_the_model_is_as_known_flows_are():
    """Cubic alone fills a queue of a round trip, and 92 % of a link without; four flows of a rule that ignores loss lose a fifth."""
    assert run(Bottleneck(queue=20), [Flow("cubic")]).used > 0.98
    assert 0.88 < run(Bottleneck(queue=2), [Flow("cubic")]).used < 0.95
    assert 0.15 < run(Bottleneck(240), [Flow("dedicated")] * 4).own_loss() < 0.35


@compiled
@pytest.mark.parametrize("loss", [0.0, 0.01, 0.1])
def test_a_dedicated_link_is_used(loss):
    """400 Mbit/s, 20 ms of round trip, 5 ms of queue."""
    outcome = run(Bottleneck(400, 20, 5, loss=loss), [Flow("dedicated")], seconds=8, warm=2)
    assert outcome.used > 0.9 and outcome.own_loss() < 0.04, (outcome.used, outcome.own_loss())


@compiled
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("flows", "path", "most"),
    [
        (1, Bottleneck(10), 0.02),
        (1, Bottleneck(1000), 0.025),
        (16, Bottleneck(10, 10, 10), 0.04),
        (4, Bottleneck(100, 100), 0.04),
        (16, Bottleneck(100), 0.025),
        (16, Bottleneck(100, 1, 1), 0.025),
        (16, Bottleneck(1000, 1, 1), 0.025),
    ],
)
def test_flows_lose_little_of_their_own_making(flows, path, most, seed):
    assert run(path, [Flow()] * flows, seconds=8, seed=seed).own_loss() < most
    assert run(path, [Flow("dedicated")] * flows, seconds=4, warm=2, seed=seed).own_loss() > most  # what it mends


@compiled
@pytest.mark.parametrize(
    ("path", "flows"),
    [
        (Bottleneck(sleep=10), 1),
        (Bottleneck(queue=20, sleep=10), 4),
        (Bottleneck(100, 100, 20, sleep=10), 1),
        (Bottleneck(1000, queue=5, sleep=3), 1),
    ],
)
def test_a_process_that_sleeps_is_not_taken_for_a_queue(path, flows):
    """Both ends do not run for a sixth of the time, and handle late what the kernel had meanwhile."""
    outcome = run(path, [Flow()] * flows, seconds=16, warm=4)
    assert outcome.used > 0.7 and outcome.own_loss() < 0.02


@compiled
@pytest.mark.parametrize(("loss", "least"), [(0.001, 0.6), (0.01, 0.6), (0.1, 0.9), (0.2, 0.85)])
def test_a_path_that_loses_is_used_all_the_same(loss, least):
    """Losses that dips prove get no answer; Cubic has a tenth of it, or less."""
    outcome = run(Bottleneck(loss=loss), [Flow()], seconds=20, warm=5)
    assert outcome.used > least
    assert outcome.own_loss() < 0.025
    assert run(Bottleneck(loss=loss), [Flow("cubic")], seconds=20, warm=5).used < (0.1 if loss >= 0.01 else 0.6)


@compiled
@pytest.mark.parametrize("loss", [0.05, 0.1])
def test_sixteen_flows_use_a_path_that_loses(loss):
    """Each has few datagrams in a dip, and takes several dips to find whose loss it is: by the median of five."""
    outcomes = [run(Bottleneck(loss=loss), [Flow()] * 16, seconds=20, warm=5, seed=seed) for seed in range(1, 6)]
    assert np.median([one.used for one in outcomes]) > 0.5
    assert np.median([one.own_loss() for one in outcomes]) < 0.03


@compiled
def test_it_takes_as_much_as_so_many_flows():
    """Eight Cubic flows leave another one 0.12 of what it has alone."""
    path, left = Bottleneck(queue=20), []
    for count in (1, 8):
        flows = [Flow(endless=True, as_flows=count), Flow("cubic")]
        outcome = run(path, flows, seconds=40, warm=8)
        left.append(outcome.delivered[1])
        assert outcome.own_loss(slice(1)) < 0.025
    alone = run(path, [Flow("cubic")], seconds=40, warm=8).delivered[0]
    assert 0.05 * alone < left[1] < 0.2 * alone < left[0]


@compiled
def test_nothing_is_credited_to_a_path_that_loses_nothing():
    """Not even where sixteen flows join one after the other, and the queue is always full."""
    flows = [Flow(endless=True, group=0, begin=0.1 * index) for index in range(16)]
    outcome = run(Bottleneck(100, 1, 1), flows, seconds=20)
    assert outcome.credit.max() < 0.02


@compiled
@pytest.mark.parametrize(("kind", "least"), [("cubic", 0.35), ("reno", 0.25)])
@pytest.mark.parametrize("queue", [2, 20])
def test_tcp_keeps_its_share(kind, least, queue):
    """A share of its rate alone; ``dedicated`` leaves it a twentieth behind a short queue."""
    path = Bottleneck(queue=queue)
    alone = run(path, [Flow(kind)], seconds=40, warm=8).delivered[0]
    shared, dedicated = (
        run(path, [Flow(rule, endless=True), Flow(kind)], seconds=40, warm=8).delivered[1] / alone
        for rule in ("shared", "dedicated")
    )
    assert shared > least
    assert dedicated < 0.1 or queue > 2


@compiled
@pytest.mark.parametrize("path", [Bottleneck(100, 1, 1), Bottleneck(100), Bottleneck(1000)])
def test_flows_to_one_host_get_even_by_what_it_tells(path):
    flows = [Flow(endless=True, group=0, begin=0.1 * index) for index in range(16)]
    got = run(path, flows, seconds=20, warm=5).delivered
    assert got.min() > 0.6 * got.max()


@compiled
@pytest.mark.parametrize(
    ("path", "after", "within"),
    [
        (Bottleneck(1000, queue=100), (100, 20), 1.0),
        (Bottleneck(100), (1000, 20), 1.5),
        (Bottleneck(1000), (1000, 30), 1.5),
    ],
)
def test_a_path_that_changes_is_mastered(path, after, within):
    """Four fifths of what there is, on average over half a second, after so many seconds."""
    changed = dataclasses.replace(path, steps=((5.13, *after),))
    trace = run(changed, [Flow(endless=True)], seconds=8, warm=0).trace
    begin = round((5.13 + within) / 0.1) + 1
    assert trace[begin : begin + 5, 0, 0].mean() / 0.1 > 0.8 * after[0] * 1e6 / 8


@compiled
def test_the_table_says_what_is_missed(tmp_path):
    congestion.main(["--only", "10 Mbit/s", "--seeds", "1", "--out", str(tmp_path)])
    (table,) = tmp_path.iterdir()
    (row,) = [line.split(" | ") for line in table.read_text().splitlines() if "10 Mbit/s" in line and line[0] == "|"]
    assert "missed" not in row[2] and "missed" in row[3]  # shared, dedicated


def engines_share_a_link(rule, senders, loss=0.0, seconds=8):
    """Ranks that send to rank 0 without end, over 100 Mbit/s with a queue of 2 ms and a round trip of 20 ms.

    Return the shares of what they sent in the second half that did not fit the queue, and of the link that they used.
    """
    rate, queue, shard = 12.5e6, 25e3, 500 * 1408
    random_, free, counts, half = random.Random(5), 0, [0, 0, 0], (1 + seconds / 2) * SECOND

    def link(source, destination, datagram, now):
        nonlocal free
        if destination:
            return [now + 10 * MS]
        size, counted = len(datagram) + 28, now > half
        counts[0] += counted
        if max(free - now, 0) * rate / SECOND > queue:
            counts[1] += counted
            return []
        free = max(free, now) + int(size * SECOND / rate)
        counts[2] += size * counted
        return [] if random_.random() < loss else [free + 10 * MS]

    settings_ = {"packet": 1408, "rate": 1.25e9, "rule": rule, "window": 3000}
    with World(senders + 1, {"grad": [(shard, 1408)]}, link, **settings_) as world:
        data, steps = np.zeros((senders + 1, shard), np.uint8), [0] * (senders + 1)

        def goes_on():
            for rank, node in enumerate(world.nodes):
                over = [key for key, x in node.exchanges.items() if x.over_at is not None]
                for key in over:
                    node.released(key)
                for _ in range(2 - len(node.exchanges) if rank == 0 else 0):
                    node.post(world.now, "grad", steps[0], 0)
                    steps[0] += 1
                while rank and steps[rank] < steps[0]:
                    node.lib.ml_release(node.send("grad", steps[rank], 0, data, to=[0]))
                    steps[rank] += 1
            return world.now > (1 + seconds) * SECOND

        world.run(goes_on, (seconds + 1) * SECOND)
    return counts[1] / counts[0], counts[2] / (rate * seconds / 2)


@pytest.mark.slow
def test_several_senders_use_a_link_together():
    own, used = engines_share_a_link("shared", 3)
    assert own < 0.04
    assert used > 0.6


@pytest.mark.parametrize("trip", [20, 100])
def test_bursts_that_are_shorter_than_a_window_end_the_start(trip):
    """A sender grows while nothing is lost. Then it sends bursts of less than a window every 50 ms; three fifths of each are lost.

    ``trip``: ms until a burst is reported: before the next one, or after it.
    """
    lib = load()
    rate = lib.ml_rate_new(4e6, 1.25e9, RULES["shared"], 1500, 1)
    now, came, sent, reports, free = SECOND, 0, [], [], 0
    out = (ctypes.c_double * 5)()

    def reported(until):
        while reports and reports[0][0] <= until:
            at, arrived, top, last = reports.pop(0)
            lib.ml_rate_sample(rate, at, trip * MS)
            lib.ml_rate_report(rate, at, arrived, 1500 * arrived, top, last // 1000 % 2**32, last, 0.0)
        lib.ml_rate_shared(rate, out)

    def burst(count, lost):
        nonlocal now, came, free
        reported(now)
        for _ in range(count):
            now = max(now, free)
            lib.ml_rate_look(rate, now, now)
            lib.ml_rate_shared(rate, out)
            free = max(free, now - MS // 4) + int(1500 * SECOND / out[0])
            sent.append(now)
        came += count - lost
        reports.append((now + trip * MS, came, len(sent), now))

    while out[0] < 30e6:
        burst(max(8, int(out[0] * 0.008 / 1500)), 0)
    assert PHASES[int(out[3])] == "starts"
    grown = out[0]
    for _ in range(80):
        now += 50 * MS
        burst(50, 30)
    assert PHASES[int(out[3])] != "starts" and out[0] < grown / 2
    lib.ml_rate_free(rate)
