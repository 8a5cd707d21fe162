"""Information for users about datagrams: metrics over all ranks, a line for what can be mended, a table at the end."""

import collections
import dataclasses

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.report.scalars import AXES
from megatron_lossy.transport.ends import close_ends
from megatron_lossy.transport.monitor import DatagramMonitor, StreamMonitor
from tests.contract import made
from tests.ranks import run_ranks
from tests.tiny_gpt import TinyGPT

pytestmark = pytest.mark.shows("metrics of datagrams, and what can be mended is said", device=False)

QUIET = {"received": 100_000, "overflow": 0, "early_dropped": 0, "bad_tag": 0}
TOTAL = ("too_big", "send_failed", "unreachable")


def numbered(names, first):
    """Counters of which each has another number."""
    return {name: first + number for number, name in enumerate(names)}


def test_counters_of_peers_and_socket_are_added_up():
    engine = numbered(("malformed", "foreign", "socket_overflow", *TOTAL), 10)
    peer = numbered(("sent", "received", "lost", "late", "duplicate", "early_dropped", "malformed", "bad_tag"), 100)
    found = DatagramMonitor.totals([peer, peer], engine)
    assert (found["sent"], found["units_lost"], found["overflow"], found["bad_tag"]) == (200, 204, 12, 214)
    assert found["refused"] == 2 * (106 + 107) + 10 + 11
    assert all(found[name] == engine[name] for name in TOTAL)


@pytest.mark.parametrize(
    ("change", "iterations", "reasons"),
    [
        ({}, 99, []),
        ({"overflow": 100}, 0, []),
        ({"overflow": 101}, 0, ["overflow"]),
        ({"early_dropped": 1}, 0, ["early_dropped"]),
        ({"bad_tag": 1}, 0, ["bad_tag"]),
        ({"too_big": 1}, 0, ["too_big"]),
        ({"send_failed": 1}, 0, ["send_failed"]),
        ({}, 100, ["loss"]),
    ],
)
def test_what_can_be_mended_is_said(change, iterations, reasons):
    said = DatagramMonitor.advice(collections.Counter(QUIET | change), iterations)
    assert list(said) == reasons
    assert all(len(line) < 250 for line in said.values())


def measured(rank, config, overlap=True):
    tiny = TinyGPT(overlap_param_gather=overlap, overlap_grad_reduce=overlap, bucket_size=3000)
    with made(tiny, config) as (run, lossy):
        for step in range(3):
            run.step(step)
        first = lossy.metrics()
        run.step(3)
        second = lossy.metrics()
        kind = StreamMonitor if config.transport == "stream" else DatagramMonitor
        monitor = kind(lambda: [group.wire for group in lossy.groups], rank)
        lines = monitor.summary()
    close_ends()  # before or after the record of a run, when a program ends
    assert len(monitor.summary()) == len(lines)
    return first, second, lines


def test_metrics_are_sums_over_ranks_since_the_last_record():
    """An iteration counts when the gather of its parameters is over: in the next forward pass."""
    config = LossyConfig(transport="udp", packet_bytes=256)
    both = run_ranks(measured, 2, config)
    assert both[0][:2] == both[1][:2]
    first, second, lines = both[0]
    assert {name for name in first if name.startswith("udp ")} <= set(AXES)
    assert first["udp units lost"] == first["loss rate grad"] == second["loss rate param"] == 0
    assert first["udp received"] > 2 * second["udp received"] > 0
    assert lines[-1].startswith("udp, rank 0, all: sent ") and both[1][2][0].startswith("udp, rank 1, all: sent ")
    assert "dense-e0-s0-c0, ranks 0 and 1: sent" in lines[0] and "round trip" in lines[0]
    assert len(both[1][2]) == 1  # of every peer once


def test_lines_of_islands_have_the_rank_that_was_launched(capsys):
    """Each of them has a rank 0; peers are listed by the first of all ranks only."""

    class Link:
        name, rank = "islands dense-0", 1

        def counters(self):
            return {0: collections.Counter(sent=5)}

        def rates(self):
            return {0: {"rate": 1e6, "rtt_min": 0.001}}

    for rank in (0, 2):
        DatagramMonitor(lambda: [Link()], rank).close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "udp, islands dense-0, ranks 1 and 0",
        "udp, rank 0, all",
        "udp, rank 2, all",
    ]


class _Delivery:
    """All units of ``units`` cross, and the first ``lost`` do not arrive."""

    def __init__(self, lost, units=10):
        self.arrived, self.crossing = np.arange(units) >= lost, np.ones(units, dtype=bool)


def test_much_loss_is_said_if_it_lasts_without_a_break(caplog):
    """Iterations in a row count, and not all of them together."""
    monitor = DatagramMonitor(list, rank=0)
    monitor._now = collections.Counter

    def iterate(numbers, lost):
        for number in numbers:
            monitor.observe(_Delivery(lost))
            monitor.finish_iteration(number, True, None)
        return [record.getMessage() for record in caplog.records]

    assert not iterate(range(1, 100), lost=3)  # 99 of them
    assert not iterate([100], lost=2)  # 20 % is not more than that
    assert not iterate(range(101, 200), lost=3)
    [said] = iterate([200], lost=3)
    assert "more than 20 % of units were lost in each of 100 iterations" in said
    assert len(iterate(range(201, 320), lost=10)) == 1  # it is said once


def test_metrics_of_streams_are_sums_over_ranks():
    (first, _, lines), (second, _, others) = run_ranks(
        measured, 2, LossyConfig(transport="stream", packet_bytes=256), False
    )
    assert first == second and {name for name in AXES if name.startswith("stream ")} <= set(first)
    assert first["stream arrived"] == 1 and first["stream units lost"] == first["stream broken"] == 0
    assert 256 * first["stream sent"] < first["stream sent bytes"] and first["stream sent"] == first["stream received"]
    assert "ranks 0 and 1: sent" in lines[0] and "round trip" in lines[0] and len(others) == 1


def test_loss_of_a_deadline_is_counted():
    config = LossyConfig(transport="udp", packet_bytes=256, udp_deadline="0.2")
    [(first, _, _), _] = run_ranks(measured, 2, dataclasses.replace(config))
    assert first["udp units lost"] > 0 and first["loss rate grad"] + first["loss rate param"] > 0
