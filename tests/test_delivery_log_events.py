"""The log of events: errors in gradients, repairs, messages between stages. Verify, summary, continuation."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.channel.corruption import make_corruption
from megatron_lossy.channel.corruption.applied import Errors
from megatron_lossy.config import LossyConfig, given
from megatron_lossy.delivery_log.events import EventLog, event_files
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from megatron_lossy.delivery_log.schema import pack, unpack
from megatron_lossy.delivery_log.writer import DeliveryLog, claim_delivery_log
from megatron_lossy.lab.delivery_log.summary import message_totals, summary_text
from megatron_lossy.lab.delivery_log.verify import verify, verify_events
from megatron_lossy.mechanisms.boundaries.messages import Boundary, Messages
from megatron_lossy.mechanisms.replicas.full_replicas import Mismatch
from megatron_lossy.mechanisms.replicas.synchroniser import Synchronisation
from megatron_lossy.run.base import make_observers
from tests.boundaries import boundary_lost, boundary_rows, event_rows
from tests.contract import made
from tests.ranks import run_ranks
from tests.test_delivery_log import flip_bits, rewrite, truncate
from tests.test_pipeline_boundaries import BOTH, PLAIN, allow_sequence_parallel_norms, place_of
from tests.tiny_gpt import TinyGPT

pytestmark = [
    pytest.mark.shows("messages between stages in the log: by value, resumed"),
    pytest.mark.shows("the log of events: changed, missing and added records are noticed", device=False),
]

#: Of messages of the tiny model.
PACKETS = 21
RANKS, STEPS, SIZES = 3, 9, (6, 5000, 3)
KEPT = {"replica_check": "repair", "param_sync_interval": 4}
MESSAGES = given(BOTH)
KINDS = {
    "noise": {"grad_error": "gaussian:0.5"} | KEPT,
    "relative": {"grad_error": "gaussian:2rms", "grad_error_rate": 0.8} | KEPT,
    "flips": {"grad_error": "bit-flip:4", "grad_error_rate": 0.5} | KEPT,
    "reduce": {"grad_error": "bit-flip", "grad_error_at": "reduce", "grad_error_ranks": (0, 2)} | KEPT,
    "messages": MESSAGES,
}
ERRORS = [name for name in KINDS if "grad_error" in KINDS[name]]


def errors_of(config, ranks):
    """A function of a step that returns the events of each rank; the first bucket has no gradient now and then."""
    corruption = make_corruption(config)
    runs = [np.array([[0, size]]) for size in SIZES]
    errors = {rank: Errors(corruption, rank, runs, 32) for rank in ranks}

    def events(step):
        drawn = torch.Generator().manual_seed(step)
        gradients = [torch.randn(size, generator=drawn) for size in SIZES]
        gradients[0] *= step % 3 > 0
        found = {}
        for rank in ranks:
            for bucket, gradient in enumerate(gradients):
                errors[rank].hit(Exchange("grad", Stream(), step), bucket, gradient.clone())
            found[rank] = errors[rank].take(step)
            if rank == 0 and step % 4 == 3:
                found[rank] += [
                    Mismatch(Stream().name, 1, (2,), "majority"),
                    Synchronisation({"dense-e0-s0-c0": "mean"}, 4, 4, 0.1, 0),
                ]
        return found

    return events


def messages_of(config, ranks):
    """The same of one process of two boundaries, two replicas and messages of different lengths; step 4 runs twice."""
    messages = Messages(config)

    def events(step):
        found = []
        for _ in range(1 + (step == 4)):
            messages.begin(step, 3)
            places = itertools.product(range(3), ("act", "act-grad"), (Boundary(1, 1, 4), Boundary(2, 3, 4)), (0, 1))
            for number, phase, boundary, rank in places:
                found.append(messages.next(phase, boundary, rank, None, step, 40 + 7 * number))
            # Leaves no trace:
            found.append(messages.next("act", Boundary(1, 1, 4), 0, None, step, 40, evaluation=True))
        return {0: found}

    return events


def record(folder, kind, steps=STEPS, first=0, ranks=None, skipped=(), alone=False, **flags):
    """Log the events of ``ranks``, each in files of its own, or ``alone`` in one process. Return all events.

    In iterations in ``skipped`` nothing happens.
    """
    config = LossyConfig(**KINDS[kind] | flags, delivery_log=str(folder))
    ranks = (range(RANKS) if kind in ERRORS else [0]) if ranks is None else ranks
    logs = {rank: EventLog(config, rank) for rank in ranks}
    events_of = (errors_of if kind in ERRORS else messages_of)(config, ranks)
    recorded = []
    for log in logs.values():
        log.iterations = 3
        if first:
            log.restart(first)
    for step in range(first, steps):
        for rank, events in events_of(step).items() if step not in skipped else ():
            logs[ranks[0] if alone else rank].happened(step, events)
            recorded += events
        for log in logs.values():
            log.finish_iteration(step, step not in skipped, list)
    for log in logs.values():
        log.close()
    return recorded


def problems_of(folder):
    """The problems of deliveries and events."""
    deliveries = DeliveryLogFolder(folder)
    return verify(deliveries).problems + verify_events(folder, deliveries).problems


def rows_of(folder):
    """All rows in an order that does not depend on who wrote them."""
    return sorted(json.dumps(row, default=bytes.hex) for row in event_rows(folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alone", [False, True])
def test_what_was_written_is_good(tmp_path, kind, alone):
    record(tmp_path, kind, skipped={5}, alone=alone)
    verdict = verify_events(tmp_path)
    assert verdict.problems == []
    assert verdict.usable == dict.fromkeys(range(RANKS if kind in ERRORS else 1), (0, STEPS - 1))
    kinds = [row["kind"] for row in event_rows(tmp_path)]
    assert verdict.rows == len(kinds) > 2 * RANKS
    assert ("spared" in kinds) == (kind == "relative") and ({"mismatch", "sync"} < set(kinds)) == (kind in ERRORS)


def test_rows_are_what_became_of_messages(tmp_path):
    """And they are summed up by phase and stream."""
    fates = [message.fate for message in record(tmp_path, "messages") if not message.evaluation]
    rows = event_rows(tmp_path)
    assert len(rows) == len(fates) == 10 * 3 * 2 * 2 * 2
    expected = [(fate.raw, fate.raw - fate.residual, fate.again, fate.lost.sum()) for fate in fates]
    assert [(row["lost"], row["repaired"], row["again"], row["zeros"]) for row in rows] == expected
    assert all(sum(column) > 0 for column in zip(*expected))
    expected = sorted(pack(~fate.lost[None])[0].tobytes() for fate in fates if fate.lost.any())
    assert sorted(row["bitmap"] for row in rows if row["bitmap"] is not None) == expected
    found = message_totals((0, row) for row in rows)
    for (phase, stream), total in found.items():
        mine = [row for row in rows if (row["kind"], row["stream"]) == (phase, stream)]
        assert total["messages"] == len(mine) == 30
        assert all(
            total[name] == sum(row[name] for row in mine) for name in ("packets", "lost", "repaired", "again", "zeros")
        )
        assert total["asked"] == sum(row["lost"] - row["repaired"] for row in mine if row["again"])
    assert len(found) == 8


def test_the_summary_for_people(tmp_path):
    record(tmp_path, "messages")
    deliveries = DeliveryLog(LossyConfig(**MESSAGES, delivery_log=str(tmp_path)))
    deliveries.finish_iteration(0, True, list)
    deliveries.close()
    rows = [row for row in event_rows(tmp_path) if (row["kind"], row["stream"]) == ("act", "boundary-e1-s2-c0")]
    lost, packets, again = (sum(row[name] for row in rows) for name in ("lost", "packets", "again"))
    text = summary_text(DeliveryLogFolder(tmp_path))
    part = text.split("act, boundary-e1-s2-c0, after layer 3 of 4\n")[1].split("\n\n")[0]
    assert f"lost      {lost} of {packets:,} packets, {100 * lost / packets:.2f} %" in part
    assert f"of {again} of 30 messages" in part
    assert "zeros     " in part and "by parity" in part


def first_of(which, **changes):
    """Changes in the first row for which ``which`` is its kind or holds; a function changes what is there."""
    chosen = which if callable(which) else lambda row: row["kind"] == which

    def change(rows):
        row = next(filter(chosen, rows))
        row.update({name: value(row[name]) if callable(value) else value for name, value in changes.items()})

    return change


def without(kind):
    return lambda rows: rows.remove(next(row for row in rows if row["kind"] == kind))


CONTENT = "its rows are not those that were written"
#: By name: what was recorded, the number of the file, its change, and the problem.
TAMPERED = {
    "size of noise": ("noise", 0, first_of("gaussian", std=0.25), CONTENT),
    "iteration": ("flips", 0, first_of("bit-flip", iteration=7), "has records of iteration 7"),
    "a missing error": ("flips", 0, without("bit-flip"), CONTENT),
    "all is missing": ("noise", 0, list.clear, CONTENT),
    "no bitmap": ("messages", 1, first_of(lambda row: row["bitmap"], bitmap=None), CONTENT),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_what_was_changed_is_noticed(tmp_path, name):
    kind, number, change, problem = TAMPERED[name]
    record(tmp_path, kind)
    path, _, first, last = event_files(tmp_path)[number]
    rewrite(path, change)
    verdict = verify_events(tmp_path)
    assert len(verdict.problems) == 1 and problem in verdict.problems[0]
    assert verdict.problems[0].startswith(f"{path.name}, row ")
    good = verdict.usable.pop(0)
    assert set(verdict.usable.values()) <= {(0, STEPS - 1)} and (good is None or first - 1 <= good[1] < last)


@pytest.mark.parametrize("damage", [truncate, flip_bits])
@pytest.mark.parametrize(("kind", "number"), [("noise", 4), ("messages", 1)])
def test_damaged_files(tmp_path, damage, kind, number):
    record(tmp_path, kind)
    file = event_files(tmp_path)[number]
    damage(file.path)
    verdict = verify_events(tmp_path)
    [problem] = verdict.problems
    assert problem.startswith(f"{file.path.name}, row 0, iteration 3: ") and "\n" not in problem
    assert verdict.usable[file.rank] == (0, 2)
    if kind in ERRORS:
        assert verdict.usable[0] == verdict.usable[2] == (0, 8)


def test_gaps_mixtures_and_missing_ranks(tmp_path):
    record(tmp_path, "noise")
    event_files(tmp_path)[4].path.unlink()
    assert verify_events(tmp_path).problems == ["rank 1: no records of events of iterations 3 to 5"]
    for path, rank, *_ in event_files(tmp_path):
        if rank == 1:
            path.unlink()
    assert verify_events(tmp_path).problems == ["no records of events of rank 1"]
    record(tmp_path, "noise", ranks=[1], loss_seed=7)
    [problem] = verify_events(tmp_path).problems
    assert "is of a run with other loss flags than the first file" in problem


@pytest.mark.parametrize("kind", [*ERRORS, "messages"])
def test_a_run_that_continues_has_the_log_of_one_that_did_not_stop(tmp_path, kind):
    record(tmp_path / "whole", kind)
    folder = tmp_path / "parts"
    record(folder, kind, steps=8)
    (folder / "._events_00000_000000000_000000002.parquet.1.tmp").touch()
    for first in (5, 3, 2):
        record(folder, kind, first=first)
        assert rows_of(folder) == rows_of(tmp_path / "whole")
        assert verify_events(folder).problems == [] and not list(folder.glob(".*"))


def test_a_folder_with_the_events_of_another_run_is_refused(tmp_path):
    config = LossyConfig(**KINDS["noise"], delivery_log=str(tmp_path))
    claim_delivery_log(config, RANKS, False, {})
    record(tmp_path, "noise")
    with pytest.raises(UsageError, match="holds the log of a run with these settings"):
        claim_delivery_log(config, RANKS, False, {})
    with pytest.raises(UsageError, match="holds the log of a run"):  # without a claim: in somebody's own program
        EventLog(config).finish_iteration(0, True, list)
    with pytest.raises(UsageError, match="is of a run with other loss flags; choose another folder"):
        EventLog(dataclasses.replace(config, loss_seed=7)).restart(4)


def test_the_command_line(tmp_path, rows):
    record(tmp_path, "flips")
    done = rows.run("megatron_lossy.delivery_log", "verify", tmp_path)
    assert done.returncode == 0
    assert done.stdout.endswith("good records of events; iterations 0 to 8 are usable for all ranks\n")
    rewrite(event_files(tmp_path)[3].path, first_of("bit-flip", digest=b""))
    done = rows.run("megatron_lossy.delivery_log", "verify", tmp_path)
    assert done.returncode == 1 and CONTENT in done.stdout
    done = rows.run("megatron_lossy.delivery_log", "summary", tmp_path)
    assert done.returncode == 2 and "holds events and no deliveries" in done.stderr


@pytest.mark.parametrize(
    ("flags", "logs"),
    [
        ({"p_grad": 0.1}, {"DeliveryLog"}),
        ({"p_act": 0.1}, {"DeliveryLog", "EventLog"}),
        (KINDS["reduce"], {"EventLog"}),
        ({**KINDS["reduce"], "p_grad": 0.1}, {"DeliveryLog", "EventLog"}),
    ],
)
def test_a_log_is_of_the_same_writer_as_others_and_only_of_what_can_happen(tmp_path, flags, logs):
    config = LossyConfig(**flags, delivery_log=str(tmp_path))
    writers = {
        type(observer).__name__: observer.rank
        for observer in make_observers(SimpleNamespace(config=config), writer=3)
        if hasattr(observer, "rank")
    }
    assert {name for name in writers if name.endswith("Log")} == logs and set(writers.values()) == {3}


def trained(rank, tiny, config, steps=3, workers=None, evaluates=False):
    """Train with a log."""
    with made(tiny, config, workers) as (run, lossy):
        for step in range(steps):
            if evaluates:
                run.evaluate(step)
            run.step(step)
        metrics = lossy.metrics()
    return metrics, parallel_state.get_tensor_model_parallel_rank()


def with_log(config, folder, **flags):
    return dataclasses.replace(config, delivery_log=str(folder), **flags)


def assert_as_drawn(rows, tiny, config, steps=3):
    """Each message by the plain reference. ``rows`` of one replica."""
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
    flags = {"act_loss_in_eval": True}
    run_ranks(trained, 2, PLAIN, with_log(BOTH, stages, **flags), 3, None, True)
    single = dataclasses.replace(PLAIN, pipeline=1)
    run_ranks(trained, 1, single, with_log(BOTH, one, **flags, virtual_boundaries=(1,)), 3, None, True)
    rows = boundary_rows(stages)
    assert rows == boundary_rows(one)
    assert_as_drawn(rows, PLAIN, BOTH)
    assert problems_of(stages) == problems_of(one) == []
    assert {file.rank for file in event_files(stages)} == {0, 1}
    for path in stages.glob("_events_00000_*"):
        path.unlink()
    assert problems_of(stages) == ["no records of events of rank 0"]


def test_virtual_workers_write_what_replicas_write(tmp_path):
    real, virtual = (tmp_path / name for name in ("real", "virtual"))
    tiny = TinyGPT(accumulation=2)
    flags = {"virtual_boundaries": (1,), "p_grad": 0.3}
    run_ranks(trained, 2, tiny, with_log(BOTH, real, **flags))
    run_ranks(trained, 1, tiny, with_log(BOTH, virtual, **flags), 3, 2)
    rows = boundary_rows(real)
    assert rows == boundary_rows(virtual)
    assert {row["stream"] for row in rows} == {"boundary-e0-s1-c0", "boundary-e1-s1-c0"}
    assert problems_of(real) == problems_of(virtual) == []


@pytest.mark.parametrize(("sequence", "names"), [(False, ["boundary-e0-s1-c0"]), (True, ["-t0", "-t1"])])
def test_copies_of_tensor_parallelism(tmp_path, sequence, names):
    """Equal losses are recorded by both and count once; otherwise their streams differ."""
    tiny = TinyGPT(tensor=2, pipeline=2, accumulation=2, tied=False, sequence_parallel=sequence)
    run_ranks(allowed, 4, tiny, with_log(BOTH, tmp_path))
    assert problems_of(tmp_path) == []
    files = event_files(tmp_path)
    total = message_totals((file.rank, row) for file in files for row in event_rows(file.path))
    streams = sorted({stream for _, stream in total})
    assert len(streams) == len(names) and all(stream.endswith(name) for stream, name in zip(streams, names))
    assert {summed["messages"] for summed in total.values()} == {6}
    assert [Stream.parse(stream).tensor for stream in streams] == ([0, 1] if sequence else [None])


def allowed(rank, *args):
    allow_sequence_parallel_norms()
    return trained(rank, *args)
