"""The trainer on a device waits for two numbers, and blocks on no copy; means of islands there are those of a CPU."""

from collections import Counter

import pytest
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.calibration.rows import STEPS, Row
from tests.ranks import run_ranks
from tests.test_islands_exchange import cross

from .exchanges import STALLS

pytestmark = [
    pytest.mark.shows("a trainer's waits on a pretended device; means of islands", device=False),
    pytest.mark.slow,
]


def test_the_trainer_waits_for_the_loss_and_for_signals_and_blocks_on_no_copy(runs):
    """The budget has the waits that each row adds to these."""
    _, findings = runs(Row("unhooked"))[0]
    counted = Counter()
    for count, times in findings.counts.items():
        if count.phase == "steady" and count.place.home == "megatron_lossy" and count.kind in STALLS:
            counted[count.kind, count.place.file] += times / STEPS
    kind = "synchronisation"
    assert findings.faults == []
    assert counted == {(kind, "lab/train/workers.py"): 1, (kind, "lab/train/records.py"): 1}


def means(rank):
    """By case, where means of islands on the device differ from those of host memory; and what is wrong."""
    from .device import tracked

    tracker, wrong = tracked(), []
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
