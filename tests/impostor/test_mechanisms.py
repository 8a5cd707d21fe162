"""Mechanisms on a device wait only where they decide, block on no copy, and give the values of a CPU."""

from collections import Counter

import pytest
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.calibration.rows import STEPS, Row, rows
from tests.ranks import run_ranks
from tests.test_islands_exchange import cross

pytestmark = [
    pytest.mark.shows("mechanisms on a pretended device: no copy blocks, who waits", device=False),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def found(runs):
    """A function that runs a row and returns its findings on the first rank."""

    def run(row):
        findings = [one for _, one in runs(row)]
        assert [one.faults for one in findings] == [[]] * row.ranks
        return findings[0]

    return run


def waits(findings):
    """Return the waits of ours per steady iteration: by kind of place, here or in a thread aside."""
    counted = Counter()
    for count, times in findings.counts.items():
        if count.phase == "steady" and count.place.home == "megatron_lossy" and count.kind == "synchronisation":
            counted["aside" if count.place.aside else count.place.file] += times / STEPS
    return counted


def copies_that_block(findings):
    return [
        f"{count.kind} at {count.place}"
        for count in findings.counts
        if count.phase == "steady"
        and count.place.home == "megatron_lossy"
        and count.kind in ("blocking copy", "pageable copy")
    ]


def test_the_trainer_waits_for_the_loss_and_for_signals(found):
    base = found(Row("unhooked"))
    assert copies_that_block(base) == []
    assert waits(base) == {"lab/train/workers.py": 1, "lab/train/records.py": 1}


@pytest.mark.parametrize(
    ("row", "here", "aside"),
    [
        # Megatron's step has waited for the gradients when a choice is asked for: that costs nothing more.
        ("error-feedback-packet-pieces-overlap", 0, 0),
        ("element-quantile-overlap", 0, 0),
        # Of islands only threads wait, about once for each exchange.
        ("islands-smith", 0, 1.5),
        ("islands-late-bf16", 0, 1.5),
        # Replicas decide on the host: a comparison, a repair; and every other step a synchronisation with its three.
        ("replicas-flips", 3.5, 0),
        ("stages", 0, 0),
    ],
)
def test_who_waits(found, row, here, aside):
    """``here``, ``aside``: waits per step beyond those of the trainer, on its threads and on others."""
    findings = found(rows()[row])
    assert copies_that_block(findings) == []
    counted = waits(findings)
    assert counted.pop("aside", 0) <= aside
    assert sum(counted.values()) - 2 <= here, counted


def means(rank):
    """By case, where means of islands on the device differ from those of host memory; and what is wrong."""
    from .device import install
    from .tracker import Tracker

    tracker = Tracker()
    install(tracker)
    wrong = []
    for islands in (2, 3):
        for flags in (
            {},
            {"sync_dtype": "bf16"},
            {"sync_dtype": "int8", "wire_block": 32},
            {"p_sync": 0.4, "loss_unit": "packet", "packet_bytes": 64},
        ):
            for broken in (False, True):
                config = LossyConfig(islands=islands, sync_method="parameters", **flags)
                sent = torch.randn(islands, 101, generator=torch.Generator().manual_seed(islands))
                if broken:
                    sent[1, 7] = torch.inf
                there = sent.pin_memory().to("cuda", non_blocking=True)
                expected, found = (_bits(*cross(config, one, 3)) for one in (sent, there))
                if expected != found:
                    wrong.append((islands, flags, broken))
    return wrong, tracker.findings().faults


def _bits(means_, told):
    """Return the values that arrived, their places, and the reports."""
    result = []
    for mean in means_:
        arrived = torch.ones_like(mean.values, dtype=torch.bool) if mean.arrived is None else mean.arrived[0]
        values = mean.values.where(arrived, 0.0).cpu().view(torch.int32).tolist()
        result.append((values, arrived.cpu().tolist()))
    return result, [[(one.exchange, one.arrived.tolist()) for one in island] for island in told]


def test_means_of_islands_on_the_device_are_those_of_host_memory():
    """To the last bit, also where an island has a value that is not finite."""
    [(wrong, faults)] = run_ranks(means, 1, grouped=False)
    assert wrong == [] and faults == []
