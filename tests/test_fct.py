"""Completion times between data centers: closed forms, slow counts of one message, the command."""

import csv

import numpy as np
import pytest

from benchmarks.fct.__main__ import Condition, make_scheme, read, run_cell
from benchmarks.fct.schemes import Adaptive, Losses, Path, SelectiveRepeat, Smart, Tolerant, Uniform
from megatron_lossy.base.errors import UsageError
from tests.programs import ROOT, run_program

pytestmark = pytest.mark.shows("completion times by hand, in closed form, of every scheme", device=False)

PATH = Path()
FAR = Path(delay=1e5)  # where no packet is sent again before all are sent


def test_the_path():
    assert PATH.slot == pytest.approx(4158 * 8 / 100e3)
    assert PATH.latency == pytest.approx(408 + 7 * 4158 * 8 / 100e3 + 4158 * 8 / 400e3)
    assert PATH.rtt == pytest.approx(818.4, abs=0.1)
    assert Path(pairs=8).slot == pytest.approx(2 * PATH.slot) and Path(pairs=4).slot == PATH.slot
    assert [PATH.packets(size) for size in (1, 4096, 4097, 2**20)] == [1, 1, 2, 256]


@pytest.mark.parametrize("packets", [1, 99, 100, 101, 1000])
def test_without_loss(packets):
    """All packets and the way; parities only if data follows them."""
    none = Losses(0.0, 1, 0)
    plain = packets * PATH.slot + PATH.latency
    assert SelectiveRepeat().flow(PATH, packets, none).time == pytest.approx(plain)
    assert Smart().flow(PATH, packets, none).time == pytest.approx(plain)
    assert Adaptive().flow(PATH, packets, none).time == pytest.approx(plain)
    between = (packets - 1) // 100 * 10 * PATH.slot
    for scheme in (Uniform(100, 10), Tolerant(100, 10)):
        assert scheme.flow(PATH, packets, none).time == pytest.approx(plain + between)


class Given(Losses):
    """Losses that are written down."""

    def __init__(self, data, parities=(), again=(), high=()):
        self._data, self._parities, self._again, self._high = data, parities, again, high

    def first(self, data, parities):
        lost, lost_parity = np.zeros(data, dtype=bool), np.zeros(len(parities), dtype=bool)
        lost[list(self._data)] = True
        lost_parity[list(self._parities)] = True
        return lost, lost_parity

    def again(self, data):
        result = np.ones(data, dtype=int)
        for packet, times in self._again:
            result[packet] = times
        return result

    def important(self, data, count):
        assert len(self._high) == count
        return np.array(self._high)


def slots(count, path=FAR):
    return count * path.slot


def test_selective_repeat_by_hand():
    """One lost: asked for when the next one arrives. The last one lost: an RTO. Lost again: an RTO more."""
    scheme = SelectiveRepeat(timeout=3)
    told = FAR.latency + FAR.control
    for losses, sent_again, packets in [
        (Given([4]), slots(6) + told, 1),
        (Given([4, 5, 6]), slots(8) + told + slots(2), 3),  # all are asked for at once, and sent after each other
        (Given([9]), slots(10) + 3 * FAR.rtt, 1),
        (Given([4], again=[(4, 2)]), slots(6) + told + slots(1) + 3 * FAR.rtt, 2),
        (Given([8, 9]), slots(10) + 3 * FAR.rtt, 2),
        (Given(range(10)), slots(10) + 3 * FAR.rtt, 10),
    ]:
        flow = scheme.flow(FAR, 10, losses)
        # A packet is sent in the next whole slot, each time.
        assert 0 <= flow.time - (sent_again + slots(1) + FAR.latency) < slots(2) + 1e-6, (losses._data, flow)
        assert flow.again == packets


def test_uniform_by_hand():
    """Two blocks of 10 and 2 parities; one of a group is replaced when its parity arrives, two are asked for."""
    scheme, told = Uniform(10, 2), FAR.latency + FAR.control
    assert scheme.flow(FAR, 20, Given([3])).time == pytest.approx(slots(22) + FAR.latency)
    assert scheme.flow(FAR, 20, Given([13])).time == pytest.approx(slots(24) + FAR.latency)
    assert scheme.flow(FAR, 20, Given([12])).time == pytest.approx(slots(23) + FAR.latency)
    flow = scheme.flow(FAR, 20, Given([2, 4]))  # of one group: known when the block's last parity is there
    assert 0 <= flow.time - (slots(12) + told + slots(2) + FAR.latency) < slots(1) + 1e-6
    flow = scheme.flow(FAR, 20, Given([2, 4], parities=[1]))  # which is lost: the next packet shows it
    assert 0 <= flow.time - (slots(13) + told + slots(2) + FAR.latency) < slots(1) + 1e-6
    flow = scheme.flow(FAR, 20, Given([12, 14], parities=[3]))  # nothing follows
    assert 0 <= flow.time - (slots(24) + 2 * FAR.rtt + slots(2) + FAR.latency) < slots(1) + 1e-6


def test_smart_by_hand():
    """Packets of high priority have parity behind the data; others are never waited for."""
    scheme = Smart(100, 50, fraction=0.2)  # four of twenty, in two groups
    flow = scheme.flow(FAR, 20, Given([0, 1, 19], high=[3, 6, 9, 12]))
    assert flow.time == pytest.approx(slots(20) + FAR.latency) and flow.zeros == 3
    flow = scheme.flow(FAR, 20, Given([3], high=[3, 6, 9, 12]))
    assert flow.time == pytest.approx(slots(21) + FAR.latency) and (flow.zeros, flow.again) == (0, 0)
    flow = scheme.flow(FAR, 20, Given([3, 9, 10], high=[3, 6, 9, 12]))  # both of the first group
    assert flow.again == 2 and flow.zeros == 1
    assert 0 <= flow.time - (slots(22) + FAR.latency + FAR.control + slots(2) + FAR.latency) < slots(1) + 1e-6


def test_tolerant_by_hand():
    scheme = Tolerant(10, 2, bound=0.1)  # of twenty packets two
    flow = scheme.flow(FAR, 20, Given([2, 4]))
    assert flow.time == pytest.approx(slots(24) + FAR.latency) and (flow.zeros, flow.again) == (2, 0)
    flow = scheme.flow(FAR, 20, Given([2, 4, 6]))  # three of one group: more than two
    assert (flow.zeros, flow.again) == (0, 3)
    assert 0 <= flow.time - (slots(24) + FAR.latency + FAR.control + slots(3) + FAR.latency) < slots(1) + 1e-6


@pytest.mark.parametrize("burst", [None, 6.0])
def test_rates_and_bursts(burst):
    """4 standard deviations, over 400 messages of 5,000 packets; those of bursts from the messages' own spread."""
    lost = np.array([Losses(0.05, 1, flow, burst).first(5000, np.array([], dtype=int))[0] for flow in range(400)])
    rates = lost.mean(axis=1)
    assert abs(rates.mean() - 0.05) < 4 * rates.std() / 20
    runs = np.diff(np.flatnonzero(np.diff(np.pad(lost.ravel(), 1).astype(int))))[::2]
    assert abs(runs.mean() - (burst or 1 / 0.95)) < 4 * runs.std() / np.sqrt(len(runs)) + 0.01
    assert not Losses(0.0, 1, 0, burst).first(100, np.array([3, 7]))[0].any()


def test_every_scheme_loses_the_same():
    data, parities = Losses(0.1, 1, 5).first(100, np.array([10, 20]))
    assert np.array_equal(data, Losses(0.1, 1, 5).first(100, np.array([], dtype=int))[0]) and len(parities) == 2
    assert not np.array_equal(data, Losses(0.1, 1, 6).first(100, np.array([], dtype=int))[0])
    assert not np.array_equal(data, Losses(0.1, 2, 5).first(100, np.array([], dtype=int))[0])


def test_the_adaptive_code_costs_nothing_without_loss_and_holds_the_bound_with_it():
    for p in (0.0, 0.005, 0.02, 0.05):
        condition = Condition(16.8e6, p)
        adaptive = run_cell("adaptive", {"recovery": "adaptive"}, condition, PATH, 150, 1)
        repeat = run_cell("SR", {"recovery": "selective-repeat"}, condition, PATH, 150, 1)
        assert adaptive.median <= repeat.median
        assert adaptive.zeros <= 0.01
        assert (adaptive.parities < 0.001) == (p < 0.01)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "recovery None: must be one of selective-repeat, uniform"),
        ({"recovery": "fountain"}, "recovery fountain: must be one of"),
        ({"recovery": "uniform", "block": 100, "party": 10}, "not settings of uniform"),
        ({"recovery": "uniform", "block": 10, "parity": 11}, "needs 1 <= C <= B"),
        ({"recovery": "smart", "fraction": 2}, "fraction 2: must be in"),
        ({"recovery": "tolerant", "bound": 1.0}, "bound 1.0: must be in"),
    ],
)
def test_bad_schemes(given, error):
    with pytest.raises(UsageError, match=error):
        make_scheme("mine", given, 2.0)


STUDY = """
title: Small
megabytes: [0.1, 0.4]
rates: [0, 0.05]
timeouts: [2, 4]
bursts: [null, 4]
flows: 200
schemes:
  SR: {recovery: selective-repeat}
  SMART: {recovery: smart}
ours: SMART
paper: {SR: 91.7}
"""


def test_the_command(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY)
    out = tmp_path / "out"
    done = run_program("benchmarks.fct", str(tmp_path / "study.yaml"), "--out", str(out), "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert (
        "P99 of SMART is below that of SR by up to" in done.stdout and "RTO 4 round trips, bursts of 4" in done.stdout
    )
    assert {file.name for file in out.iterdir()} == {"fct.md", "fct.csv", "times.png", "gains.png"}
    rows = list(csv.DictReader((out / "fct.csv").open()))
    assert len(rows) == 2 * 2 * 2 * 2 * 2
    for row in rows:
        assert float(row["mean_low"]) <= float(row["mean"]) <= float(row["mean_high"])
        if row["rate"] == "0":
            assert float(row["p99"]) == float(row["mean"])
    again = run_program("benchmarks.fct", str(tmp_path / "study.yaml"), "--out", str(out))
    assert again.returncode == 2 and "holds results already" in again.stderr


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "fct").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies(file):
    settings = read(str(file), {})
    assert settings.paper and set(settings.paper) <= set(settings.schemes) and len(settings.conditions) > 50
