"""What the delivery log says about messages between pipeline stages: written, verified, summed up, resumed."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core import parallel_state

from megatron_lossy import hooks
from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from megatron_lossy.delivery_log.schema import pack, unpack
from megatron_lossy.delivery_log.summary import summary_text
from megatron_lossy.delivery_log.verify import verify
from megatron_lossy.delivery_log.writer import DeliveryLog
from megatron_lossy.lab.virtual import VirtualCluster
from megatron_lossy.mechanisms.boundaries.log import BoundaryLog, boundary_files, columns
from megatron_lossy.mechanisms.boundaries.loss import Boundary
from megatron_lossy.mechanisms.boundaries.messages import Messages
from megatron_lossy.mechanisms.boundaries.summary import summarize_boundaries
from tests.boundaries import boundary_lost, boundary_rows
from tests.ranks import run_ranks
from tests.test_pipeline_boundaries import BOTH, PLAIN, place_of
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows("messages between stages in the log: by value, drawn again, resumed")

UDP = {"transport": "udp", "act_transport": "udp", "udp_key_file": "none", "loss_unit": "packet"}
#: Of messages of the tiny model.
PACKETS = 21
COUNTED = ("packets", "lost", "repaired", "again", "zeros")


def problems(folder):
    return verify(DeliveryLogFolder(folder)).problems


# --- without Megatron ------------------------------------------------------------------------------------------------


def write(folder, config, steps, first=0, reruns=()):
    """The log of one process of two boundaries, two replicas and messages of different lengths; each step of ``reruns`` twice.

    Returns what became of each message.
    """
    config = dataclasses.replace(config, delivery_log=str(folder))
    exchanges, log, messages = DeliveryLog(config), BoundaryLog(config), Messages(config)
    for one in (exchanges, log):
        if first:
            one.restart(first)
    fates = []
    for step in range(first, steps):
        for _ in range(1 + (step in reruns)):
            messages.begin(step, 3)
            places = itertools.product(range(3), ("act", "act-grad"), (Boundary(1, 1, 4), Boundary(2, 3, 4)), (0, 1))
            for number, phase, boundary, rank in places:
                fate = messages.next(phase, boundary, rank, 0, step, 40 + 7 * number)
                fates.append(fate)
                log.crossed(messages.identify(phase, boundary, rank, None, step, False), fate)
            evaluation = messages.identify("act", Boundary(1, 1, 4), 0, None, step, True)
            log.crossed(evaluation, fate)  # leaves no trace
        for one in (exchanges, log):
            one.finish_iteration(step, True, list)
    for one in (exchanges, log):
        one.close()
    return fates


FLAGS = dataclasses.replace(BOTH, delivery_log="later", delivery_log_chunk=3)


@pytest.mark.parametrize("bitmaps", [False, True])
def test_rows_are_what_became_of_messages(tmp_path, bitmaps):
    """In the order of a sorted table; summed up by phase and stream, and right when drawn again."""
    config = dataclasses.replace(FLAGS, delivery_log_bitmaps=bitmaps)
    fates = write(tmp_path, config, 8, reruns={4})
    rows = boundary_rows(tmp_path)
    assert len(rows) == len(fates) == 9 * 3 * 2 * 2 * 2
    assert sum(row["lost"] for row in rows) == sum(fate.raw for fate in fates) > 0
    assert sum(row["repaired"] for row in rows) == sum(fate.raw - fate.residual for fate in fates) > 0
    assert sum(row["again"] for row in rows) == sum(fate.again for fate in fates) > 0
    assert sum(row["zeros"] for row in rows) == sum(fate.lost.sum() for fate in fates) > 0
    expected = sorted(pack(~fate.lost[None])[0].tobytes() for fate in fates if fate.lost.any())
    assert sorted(row["bitmap"] for row in rows if row["bitmap"] is not None) == (expected if bitmaps else [])
    assert problems(tmp_path) == []
    total = summarize_boundaries(tmp_path)
    for (phase, stream), crossed in total.items():
        mine = [row for row in rows if (row["phase"], row["stream"]) == (phase, stream)]
        assert crossed.total["messages"] == len(mine) == 27
        for name in COUNTED:
            assert crossed.total[name] == sum(row[name] for row in mine)
        assert crossed.total["asked"] == sum(row["lost"] - row["repaired"] for row in mine if row["again"])
    assert len(total) == 8


def test_the_summary_for_people(tmp_path):
    write(tmp_path, FLAGS, 4)
    rows = [row for row in boundary_rows(tmp_path) if (row["phase"], row["stream"]) == ("act", "boundary-e1-s2-c0")]
    lost, packets, again = (sum(row[name] for row in rows) for name in ("lost", "packets", "again"))
    text = summary_text(DeliveryLogFolder(tmp_path))
    part = text.split("act, boundary-e1-s2-c0, after layer 3 of 4\n")[1].split("\n\n")[0]
    assert f"lost      {lost} of {packets} packets, {100 * lost / packets:.2f} %" in part
    assert f"of {again} of 12 messages" in part
    assert "zeros     " in part and "by parity" in part


def test_a_run_that_loses_nothing_there_has_no_such_files(tmp_path):
    from megatron_lossy.run.observers import make_observers

    names = [
        {
            type(one).__name__
            for one in make_observers(SimpleNamespace(config=LossyConfig(**flags, delivery_log=str(tmp_path))))
        }
        for flags in ({"p_grad": 0.1}, {"p_act": 0.1})
    ]
    assert [("BoundaryLog" in found) for found in names] == [False, True]


@pytest.mark.parametrize("iteration", [0, 2, 3, 5])
def test_a_restart_drops_what_comes_after_the_checkpoint(tmp_path, iteration):
    write(tmp_path / "whole", FLAGS, 7)
    write(tmp_path / "parts", FLAGS, 5)
    if iteration == 0:
        with pytest.raises(UsageError, match="holds the log of a run"):
            write(tmp_path / "parts", FLAGS, 7)
        return
    write(tmp_path / "parts", FLAGS, 7, first=iteration)
    assert boundary_rows(tmp_path / "parts") == boundary_rows(tmp_path / "whole")
    assert problems(tmp_path / "parts") == []


def changed(folder, change):
    """Let ``change`` alter the rows of the file in the middle."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = boundary_files(folder)[0][1].path
    rows, note = pq.read_table(path).to_pylist(), pq.read_metadata(path).metadata
    written = pa.Table.from_pylist(change(rows) or rows, schema=columns().with_metadata(note))
    pq.write_table(written, path, write_page_checksum=True)


def fewer_lost(rows):
    row = next(row for row in rows if row["repaired"])
    row["repaired"] -= 1
    row["lost"] -= 1


def more_zeros(rows):
    rows[0]["zeros"] += 1


def another_seed(rows):
    """As many zeros, but others."""
    row = next(row for row in rows if row["zeros"] and not row["again"])
    arrived = unpack(np.frombuffer(row["bitmap"], np.uint8)[None], row["packets"])
    row["bitmap"] = pack(np.roll(arrived, 1, axis=1))[0].tobytes()


def short_bitmap(rows):
    row = next(row for row in rows if row["bitmap"])
    row["bitmap"] = row["bitmap"][1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fewer_lost, "what is drawn again from the recorded seed is not what was recorded"),
        (more_zeros, "its numbers do not agree"),
        (another_seed, "what is drawn again from the recorded seed is not what was recorded"),
        (short_bitmap, "bitmap and zeros do not agree"),
        (lambda rows: rows[1:], "a message is missing"),
        (lambda rows: [dict(row, iteration=row["iteration"] + 3) for row in rows], "has records of iteration 6"),
        (lambda rows: [dict(row, stream="boundary-e9-s9-c0") for row in rows], "stream 'boundary-e9-s9-c0' is not one"),
    ],
)
def test_a_wrong_record_is_found(tmp_path, change, message):
    write(tmp_path, dataclasses.replace(FLAGS, delivery_log_bitmaps=True), 9)
    changed(tmp_path, change)
    verdict = verify(DeliveryLogFolder(tmp_path))
    [found] = verdict.problems
    assert message in found and "_boundaries_00000_000000003_000000005.parquet" in found
    assert verdict.usable[0] == (0, 2)


def test_missing_and_damaged_files_are_found(tmp_path):
    write(tmp_path, FLAGS, 9)
    path = boundary_files(tmp_path)[0][1].path
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    [found] = problems(tmp_path)
    assert path.name in found and "\n" not in found
    path.unlink()
    assert problems(tmp_path) == ["rank 0: no records of boundaries of iterations 3 to 5"]


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
    found = {(row["iteration"], row["phase"], row["stream"], row["message"]): row for row in rows}
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
    assert sorted(boundary_files(stages)) == [0, 1]
    for path in stages.glob("_boundaries_00000_*"):
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
        mine = [row for row in rows if row["phase"] == phase]
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
    total = summarize_boundaries(tmp_path)
    streams = sorted({stream for _, stream in total})
    assert len(streams) == len(names) and all(stream.endswith(name) for stream, name in zip(streams, names))
    assert {crossed.total["messages"] for crossed in total.values()} == {6}
    assert [Stream.parse(stream).tensor for stream in streams] == ([0, 1] if sequence else [None])


def allowed(rank, *args):
    from tests.test_pipeline_boundaries import allow_sequence_parallel_norms

    allow_sequence_parallel_norms()
    return logged(rank, *args)
