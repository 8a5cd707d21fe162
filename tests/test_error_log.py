"""The log of errors in gradients and of repairs: what verify notices, continuation."""

import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.channel.corruption import Errors, make_corruption
from megatron_lossy.config import LossyConfig
from megatron_lossy.delivery_log.__main__ import main
from megatron_lossy.delivery_log.error_log import ErrorLog
from megatron_lossy.delivery_log.error_rows import error_files, read_errors, read_events, recorded_events
from megatron_lossy.delivery_log.verify_errors import verify_errors
from megatron_lossy.delivery_log.writer import claim_delivery_log
from megatron_lossy.mechanisms.replicas.full_replicas import Mismatch
from megatron_lossy.mechanisms.replicas.synchroniser import Synced
from megatron_lossy.run.observers import make_observers
from tests.test_delivery_log import flip_bits, rewrite, truncate

pytestmark = [
    pytest.mark.shows("recorded errors are replayed where they were recorded"),
    pytest.mark.shows("the log of errors: changed, missing and added records are noticed", device=False),
]

RANKS, STEPS, SIZES = 3, 9, (6, 5000, 3)
KINDS = {
    "noise": {"grad_error": "gaussian:0.5"},
    "relative": {"grad_error": "gaussian", "grad_error_relative": 2.0, "grad_error_rate": 0.8},
    "flips": {"grad_error": "bit-flip:4", "grad_error_rate": 0.5},
    "reduce": {"grad_error": "bit-flip", "grad_error_at": "reduce", "grad_error_ranks": (0, 2)},
}
KEPT = {"replica_check": "repair", "param_sync_interval": 4}


def record(folder, flags, steps=STEPS, first=0, ranks=range(RANKS), skipped=(), alone=False):
    """Log what happens to the gradients of ``ranks``, each in files of its own, or ``alone`` in one process.

    In iterations in ``skipped`` nothing is reduced; the first bucket of others has no gradient now and then.
    """
    config = LossyConfig(**flags, delivery_log=str(folder), delivery_log_chunk=3)
    corruption = make_corruption(config)
    runs = [np.array([[0, size]]) for size in SIZES]
    errors = {rank: Errors(corruption, rank, runs, 32, records=True) for rank in ranks}
    logs = {rank: ErrorLog(config, rank) for rank in ranks}
    for log in logs.values():
        log.restart(first)
    for step in range(first, steps):
        drawn = torch.Generator().manual_seed(step)
        gradients = [torch.randn(size, generator=drawn) for size in SIZES]
        gradients[0] *= step % 3 > 0
        for rank in ranks if step not in skipped else ():
            for bucket, gradient in enumerate(gradients):
                errors[rank].hit(Exchange("grad", Stream(), step), bucket, gradient.clone())
            what = errors[rank].take(step)
            if rank == 0 and step % 4 == 3 and flags.keys() >= KEPT.keys():
                what += [Mismatch(Stream(), 1, (2,), "majority"), Synced({"dense-e0-s0-c0": "mean"}, 4, 4, 0.1, 0)]
            (logs[ranks[0]] if alone else logs[rank]).happened(step, what)
        for log in logs.values():
            log.finish_iteration(step, step not in skipped, list)
    for log in logs.values():
        log.close()


def rows_of(folder):
    """All rows, and what the files say about them, in an order that does not depend on who wrote them."""
    found = [read_errors(path) for path, *_ in error_files(folder)]
    return sorted(json.dumps(row, default=bytes.hex) for table, _ in found for row in table.to_pylist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alone", [False, True])
def test_what_was_written_is_good(tmp_path, kind, alone):
    record(tmp_path, KINDS[kind] | KEPT, skipped={4}, alone=alone)
    verdict = verify_errors(tmp_path)
    assert verdict.problems == []
    assert verdict.usable == dict.fromkeys(range(RANKS), (0, STEPS - 1))
    kinds = [json.loads(row)["kind"] for row in rows_of(tmp_path)]
    assert verdict.rows == len(kinds) > 2 * RANKS
    assert ("spared" in kinds) == (kind == "relative") and {"mismatch", "sync"} < set(kinds)


def first_of(which, **changes):
    """Changes in the first row of the kind ``which``; a function changes what is there."""

    def change(rows):
        row = next(row for row in rows if row["kind"] == which)
        row.update({name: value(row[name]) if callable(value) else value for name, value in changes.items()})

    return change


def without(kind):
    def change(rows):
        rows.remove(next(row for row in rows if row["kind"] == kind))

    return change


def twice(rows):
    rows.append(dict(next(row for row in rows if row["kind"] == "bit-flip")))


def elsewhere(rows):
    rows.append(next(row for row in rows if row["kind"] == "bit-flip") | {"stream": "dense-e0-s1-c0"})


def where_none_is_drawn(rows):
    hit = next(row for row in rows if row["kind"] == "bit-flip")
    quiet = set(range(3)) - {row["iteration"] for row in rows if row["kind"] == "bit-flip"}
    rows.append(hit | {"iteration": quiet.pop()})


OTHER = "drawn again from the recorded seed in bucket"
CONTENT = "its rows are not those that were written"
TAMPERED = {
    "seed": ("noise", first_of("gaussian", seed=lambda seed: seed ^ 1), OTHER),
    "size of noise": ("noise", first_of("gaussian", std=0.25), OTHER),
    "seed of relative noise": ("relative", first_of("gaussian", seed=lambda seed: seed ^ 1), OTHER),
    "size of relative noise": ("relative", first_of("gaussian", std=lambda std: std * 1.01), CONTENT),
    "negative noise": ("relative", first_of("gaussian", std=-1.0), OTHER),
    "element": ("flips", first_of("bit-flip", elements=lambda elements: [*elements[:-1], 4]), OTHER),
    "bit": ("flips", first_of("bit-flip", bits=lambda bits: [(bits[0] + 1) % 32, *bits[1:]]), OTHER),
    "no bits": ("flips", first_of("bit-flip", bits=None), "'NoneType'"),
    "rank": ("flips", first_of("bit-flip", rank=1), "error in bucket"),
    "another stream": ("flips", elsewhere, "rank 0 of dense-e0-s1-c0, which was not reduced"),
    "iteration": ("flips", first_of("bit-flip", iteration=7), "has records of iteration 7"),
    "digest": ("flips", first_of("bit-flip", digest=b"12345678"), CONTENT),
    "a missing error": ("flips", without("bit-flip"), "no record of the error in bucket"),
    "all is missing": ("noise", list.clear, "no record of the error in bucket 0 of rank 0 of dense-e0-s0-c0"),
    "an error more": ("flips", where_none_is_drawn, "the recorded seed draws no error in bucket"),
    "an error twice": ("flips", twice, "two records of bucket"),
    "an error that was nothing": ("noise", first_of("gaussian", kind="spared"), OTHER),
    "repair": ("noise", first_of("mismatch", repaired=""), "--replica-check repair repairs nothing by ''"),
    "who differed": ("noise", first_of("mismatch", rank=1), CONTENT),
    "a missing repair": ("noise", without("mismatch"), CONTENT),
    "synchronisation": ("noise", first_of("sync", interval=3), "--param-sync-interval was 4, not 3"),
    "how": ("noise", first_of("sync", repaired="median"), "synchronises nothing by 'median'"),
    "kind": ("noise", first_of("sync", kind="rest"), "'rest' is no kind of record"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_what_was_changed_is_noticed(tmp_path, name):
    kind, change, problem = TAMPERED[name]
    record(tmp_path, KINDS[kind] | KEPT)
    late = name in ("repair", "who differed", "a missing repair", "synchronisation", "how", "kind")
    path, _, _, last = error_files(tmp_path)[1 if late else 0]
    rewrite(path, change)
    verdict = verify_errors(tmp_path)
    assert len(verdict.problems) == 1 and problem in verdict.problems[0]
    assert verdict.problems[0].startswith(f"{path.name}, row ")
    good = verdict.usable.pop(0)
    assert set(verdict.usable.values()) == {(0, STEPS - 1)} and (good is None or good[1] < last)


@pytest.mark.parametrize("damage", [truncate, flip_bits])
def test_damaged_files(tmp_path, damage):
    record(tmp_path, KINDS["noise"])
    path = error_files(tmp_path)[4][0]
    damage(path)
    verdict = verify_errors(tmp_path)
    assert verdict.problems[0].startswith(f"{path.name}, row 0, iteration 3: ")
    assert verdict.usable == {0: (0, 8), 1: (0, 2), 2: (0, 8)}
    with pytest.raises(UsageError, match=rf"--grad-error trace {path}: cannot be read: "):
        read_events(path)


def test_gaps_mixtures_and_missing_ranks(tmp_path):
    record(tmp_path, KINDS["noise"])
    error_files(tmp_path)[4][0].unlink()
    assert verify_errors(tmp_path).problems == ["rank 1: no errors of iterations 3 to 5"]
    for path, rank, *_ in error_files(tmp_path):
        if rank == 1:
            path.unlink()
    assert verify_errors(tmp_path).problems == ["no errors of rank 1 of dense-e0-s0-c0"]
    record(tmp_path, KINDS["noise"] | {"loss_seed": 7}, ranks=[1])
    [problem, *_] = verify_errors(tmp_path).problems
    assert "is of a run with other loss flags than the first file" in problem


def test_a_run_that_continues_has_the_log_of_one_that_did_not_stop(tmp_path):
    for kind, flags in KINDS.items():
        record(tmp_path / kind / "whole", flags | KEPT)
        folder = tmp_path / kind / "parts"
        record(folder, flags | KEPT, steps=8)
        (folder / ".errors_00000_000000000_000000002.parquet.1.tmp").touch()
        record(folder, flags | KEPT, first=5)
        assert rows_of(folder) == rows_of(tmp_path / kind / "whole")
        assert verify_errors(folder).problems == [] and not list(folder.glob(".*"))


def test_a_folder_with_the_errors_of_another_run_is_refused(tmp_path):
    config = LossyConfig(**KINDS["noise"], delivery_log=str(tmp_path))
    claim_delivery_log(config, RANKS, False, {})
    record(tmp_path, KINDS["noise"])
    for changes, resumes, message in (
        ({}, False, "holds the log of a run with these settings"),
        ({"grad_error": "gaussian:0.25"}, True, "--grad-error was gaussian:0.5 there and is gaussian:0.25 here"),
    ):
        with pytest.raises(UsageError, match=message):
            claim_delivery_log(dataclasses.replace(config, **changes), RANKS, resumes, {})
    claim_delivery_log(config, RANKS, True, {})
    log = ErrorLog(config)
    with pytest.raises(UsageError, match="holds the log of a run"):  # without a claim: in somebody's own program
        log.finish_iteration(0, True, list)


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)
    record(tmp_path, KINDS["flips"])
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.endswith(
        "good records of errors and repairs; iterations 0 to 8 are usable for all ranks\n"
    )
    rewrite(error_files(tmp_path)[3][0], first_of("bit-flip", digest=b""))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path)])
    told = capsys.readouterr().out
    assert ended.value.code == 1 and CONTENT in told
    with pytest.raises(SystemExit) as ended:
        main(["summary", str(tmp_path)])
    assert ended.value.code == 2 and "holds errors and no deliveries" in capsys.readouterr().err


def test_errors_are_replayed_where_they_were_recorded(tmp_path):
    """Those of a reduction are all of rank 0, and would hit no other."""
    for at, kind in (("reduce", "reduce"), ("broadcast", "noise")):
        record(tmp_path / at, KINDS[kind])
    for at, other in (("reduce", "broadcast"), ("broadcast", "reduce")):
        trace = {"grad_error": f"trace:{tmp_path / at!s}"}
        assert recorded_events(LossyConfig(**trace, grad_error_at=at))
        with pytest.raises(UsageError, match=f"^--grad-error-at {other}: must be {at}, as of the errors in "):
            recorded_events(LossyConfig(**trace, grad_error_at=other))


def test_the_log_of_errors_is_of_the_same_writer_as_others(tmp_path):
    config = LossyConfig(**KINDS["reduce"], p_grad=0.1, delivery_log=str(tmp_path))
    writers = {
        type(one).__name__: one.rank
        for one in make_observers(SimpleNamespace(config=config), writer=3)
        if hasattr(one, "rank")
    }
    assert writers["ErrorLog"] == 3 and set(writers.values()) == {3}
