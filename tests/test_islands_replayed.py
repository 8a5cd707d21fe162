"""Runs of islands that were killed, made again in one process from their logs: bit for bit."""

from __future__ import annotations

import json
import re

import pytest

from tests.programs import run_program
from tests.test_islands_apart import LOSS, MODEL, SYNC, Run, data
from tests.trainer import as_flags

pytestmark = [
    pytest.mark.shows("islands that are launches of their own: made again from their logs"),
    pytest.mark.programs,
    pytest.mark.nightly,
]

__all__ = ["data"]


def again(settings, log, ranks=1, **more):
    """Make the run in ``log`` again; returns the finished program."""
    own = {"virtual_workers": 3 * ranks, "island_schedule": log, "transport": "pieces"}
    return run_program("megatron_lossy.train", *as_flags(settings | own | more))


def lines(log, slot, rank=0):
    return [json.loads(line) for line in (log / f"island_{slot}" / f"_exchanges_{rank}.jsonl").open()]


@pytest.mark.parametrize(
    ("rejoin", "transport", "more", "ranks"),
    [
        ("copy", "pieces", LOSS | {"sync_dtype": "int8"}, 1),
        ("listen", "torch", {"delay_correction": "smith", "p_grad": 0.2, "p_param": 0.2}, 2),
        ("copy", "udp", LOSS | {"delay_correction": "ema"}, 1),
    ],
)
def test_real_kills_are_made_again(data, tmp_path, serve, rejoin, transport, more, ranks):
    """Weights are equal whenever an island saves, has copied another one, or leaves; with another learning rate that is noticed."""
    _, url = serve()
    log = tmp_path / "log"
    settings = MODEL | data | SYNC | {"train_iters": 1200, "eval_interval": 1200, "log_interval": 10} | more
    settings |= {"island_rejoin": rejoin, "transport": transport}
    saved = {"save": tmp_path / "saved", "load": tmp_path / "saved", "save_replicas": True, "save_interval": 20}
    run = Run(url, settings | saved | {"delivery_log": log}, ranks)
    run.start(0, 1, 2)
    run.until(1, r"iteration +50/")
    run.kill(2)
    run.until(0, r"iteration +90/")
    run.start(2)
    run.until(2, "goes on at iteration")
    run.until(0, r"iteration +250/")
    run.kill(1)
    run.until(0, r"iteration +260/")
    run.start(1)
    ends = run.ends()
    assert all(not any(statuses) for statuses, *_ in ends.values()), ends
    events = [[one["event"] for one in lines(log, slot) if "event" in one] for slot in range(3)]
    assert [one.count("enters") for one in events] == [1, 2, 2]
    copies = sum(one.count("copied") for one in events)
    assert rejoin != "copy" or copies

    done = again(settings, log, ranks)
    assert done.returncode == 0, done.stderr
    said = re.search(r"up to iteration 1200 of 1200; weights were as recorded (\d+) times", done.stderr)
    known = sum("weights" in line for slot in range(3) for line in lines(log, slot))
    assert int(said[1]) == known > 100
    other = again(settings, log, ranks, lr=1e-3)
    assert other.returncode == 2 and "other flags or data?" in other.stderr, other.stderr
