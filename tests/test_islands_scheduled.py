"""Real islands that come and go by a schedule: gloo ranks, with the weights of virtual islands to the last bit."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.test_islands_churn import write
from tests.test_islands_ranks import LOST, SMALL, check_same, train_both
from tests.trainer import write_data

pytestmark = pytest.mark.shows("real islands that come and go by a schedule are virtual ones, bit for bit")

#: All slots and all events; one that copies or listens, one that keeps, one that never returns.
EVENTS = [
    (1, 2, "join"),
    (2, 1, "stop"),
    (3, 0, "cut"),
    (4, 0, "return"),
    (5, 1, "return"),
    (5, 2, "freeze"),
    (6, 2, "return"),
    (7, 1, "stop"),
]
THREE = {"islands": 3, "sync_method": "parameters", "sync_fraction": 0.5, "island_keep": 2, "save_replicas": True}
SIX = {"global_batch_size": 6}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    run_ranks(write_data, 1, str(folder))
    return {"data_path": (str(folder / "train"),), "valid_data_path": (str(folder / "valid"),)}


def test_one(data, tmp_path):
    path = write(tmp_path / "events", *EVENTS)
    loss = THREE | {"sync_delay": 1, "island_schedule": path}
    cases = {"a": (SIX, loss)}
    train_both(data, tmp_path, 3, cases)
    check_same(tmp_path / "virtual" / "a", tmp_path / "real" / "a", 3)
