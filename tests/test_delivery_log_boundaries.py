"""What the delivery log says about messages between pipeline stages: written, verified, summed up, resumed."""

import dataclasses
import itertools

import numpy as np
import pytest
from megatron.core import parallel_state

from megatron_lossy import hooks
from megatron_lossy.config import LossyConfig
from megatron_lossy.delivery_log.events import event_files
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from megatron_lossy.delivery_log.schema import unpack
from megatron_lossy.delivery_log.verify import verify, verify_events
from megatron_lossy.exchange import Stream
from megatron_lossy.mechanisms.boundaries.events import totals
from megatron_lossy.virtual import VirtualCluster
from tests.boundaries import boundary_lost, boundary_rows, event_rows
from tests.ranks import run_ranks
from tests.test_pipeline_boundaries import BOTH, PLAIN, place_of
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows("messages between stages in the log: by value, drawn again")

UDP = {"transport": "udp", "act_transport": "udp", "udp_cipher": "none", "loss_unit": "packet", "packet_bytes": 1408}
#: Of messages of the tiny model.
PACKETS = 21


def problems(folder):
    deliveries = DeliveryLogFolder(folder)
    return verify(deliveries).problems + verify_events(folder, deliveries).problems


# --- runs ------------------------------------------------------------------------------------------------------------


def logged(rank, tiny, config, steps=3, workers=None, evaluates=False):
    """Train with a log."""
    cluster = VirtualCluster(config, workers) if workers else None
    lossy = cluster or hooks.install(config)
    run = build(tiny, cluster)
    for step in range(steps):
        if evaluates:
            run.evaluate(step)
        run.step(step)
    metrics = lossy.metrics()
    lossy.uninstall()
    return metrics, parallel_state.get_tensor_model_parallel_rank()


def with_log(config, folder, **flags):
    return dataclasses.replace(config, delivery_log=str(folder), delivery_log_chunk=2, **flags)


def assert_as_drawn(rows, tiny, config, steps=3):
    """Each message by the plain reference. ``rows`` of one replica, with bitmaps."""
    stages = tiny.pipeline * (tiny.virtual or 1)
    found = {(row["iteration"], row["kind"], row["stream"], row["message"]): row for row in rows}
    for step, phase, stage, number in itertools.product(
        range(steps), ("act", "act-grad"), range(1, stages), range(tiny.accumulation)
    ):
        boundary = place_of(stage, tiny)
        row = found.pop((step, phase, boundary.stream(0).name, number))
        lost = boundary_lost(config, phase, boundary, 0, 0, step, number, PACKETS)
        assert (row["packets"], row["zeros"]) == (PACKETS, lost.sum())
        if lost.any():
            np.testing.assert_array_equal(~unpack(np.frombuffer(row["bitmap"], np.uint8)[None], PACKETS)[0], lost)
    assert not found


def test_stages_and_one_process_write_the_same(tmp_path):
    """And it is what is drawn, training alone, though evaluations in between lose something as well."""
    stages, one = (tmp_path / name for name in ("stages", "one"))
    flags = {"act_loss_in_eval": True, "delivery_log_bitmaps": True}
    run_ranks(logged, 2, PLAIN, with_log(BOTH, stages, **flags), 3, None, True)
    single = dataclasses.replace(PLAIN, pipeline=1)
    run_ranks(logged, 1, single, with_log(BOTH, one, **flags, virtual_boundaries=(1,)), 3, None, True)
    rows = boundary_rows(stages)
    assert rows == boundary_rows(one)
    assert_as_drawn(rows, PLAIN, BOTH)
    assert problems(stages) == problems(one) == []
    assert {file.rank for file in event_files("DIR", stages)} == {0, 1}
    for path in stages.glob("_events_00000_*"):
        path.unlink()
    assert problems(stages) == ["no records of act-grad of boundary-e0-s1-c0"]


def test_virtual_workers_write_what_replicas_write(tmp_path):
    real, virtual = (tmp_path / name for name in ("real", "virtual"))
    tiny = TinyGPT(accumulation=2)
    flags = {"virtual_boundaries": (1,), "p_grad": 0.3}
    run_ranks(logged, 2, tiny, with_log(BOTH, real, **flags))
    run_ranks(logged, 1, tiny, with_log(BOTH, virtual, **flags), 3, 2)
    rows = boundary_rows(real)
    assert rows == boundary_rows(virtual) and {row["stream"] for row in rows} == {
        "boundary-e0-s1-c0",
        "boundary-e1-s1-c0",
    }
    assert problems(real) == problems(virtual) == []


def test_over_udp_the_same_is_recorded_with_bitmaps(tmp_path):
    """Of drawn losses; an exchange's records are late by a forward pass, and messages of the next iteration are there already."""
    over_udp = LossyConfig(**vars(BOTH) | UDP)
    [(metrics, _), _] = run_ranks(logged, 2, PLAIN, with_log(over_udp, tmp_path))
    rows = boundary_rows(tmp_path)
    assert_as_drawn(rows, PLAIN, over_udp)
    assert problems(tmp_path) == []
    for phase in ("act", "act-grad"):
        mine = [row for row in rows if row["kind"] == phase]
        lost, zeros, again, packets = (sum(row[name] for row in mine) for name in ("lost", "zeros", "again", "packets"))
        assert metrics[f"loss rate {phase}"] == pytest.approx(lost / packets)
        assert metrics[f"zero share {phase}"] == pytest.approx(zeros / packets)
        assert metrics[f"retransmitted share {phase}"] == pytest.approx(again / len(mine))


@pytest.mark.parametrize(("sequence", "names"), [(False, ["boundary-e0-s1-c0"]), (True, ["-t0", "-t1"])])
def test_copies_of_tensor_parallelism(tmp_path, sequence, names):
    """Where they lose the same, both record it and it counts once; where not, their streams differ."""
    tiny = TinyGPT(tensor=2, pipeline=2, accumulation=2, tied=False, sequence_parallel=sequence)
    run_ranks(allowed, 4, tiny, with_log(BOTH, tmp_path))
    assert problems(tmp_path) == []
    files = event_files("DIR", tmp_path)
    total = totals((file.rank, row) for file in files for row in event_rows(file.path))
    streams = sorted({stream for _, stream in total})
    assert len(streams) == len(names) and all(stream.endswith(name) for stream, name in zip(streams, names))
    assert {one["messages"] for one in total.values()} == {6}
    assert [Stream.parse(stream).tensor for stream in streams] == ([0, 1] if sequence else [None])


def allowed(rank, *args):
    from tests.test_pipeline_boundaries import allow_sequence_parallel_norms

    allow_sequence_parallel_norms()
    return logged(rank, *args)
