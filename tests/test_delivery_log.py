"""The delivery log: what is written, what is read back, what replays it, and what a broken one costs."""

import dataclasses
import itertools
import json
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Delivery, Exchange, Stream, cut
from megatron_lossy.config import LossyConfig
from megatron_lossy.delivery_log import writer
from megatron_lossy.delivery_log.reader import DeliveryLogFolder, log_files
from megatron_lossy.delivery_log.schema import RUN, Meta, file_name, pack, unpack
from megatron_lossy.delivery_log.writer import DeliveryLog, claim_delivery_log
from megatron_lossy.lab.delivery_log.summary import scan, summarize, summary_text
from megatron_lossy.lab.delivery_log.verify import verify
from megatron_lossy.transport import LossyGroup, Network, check_channels
from megatron_lossy.transport.base import CollectiveWire
from tests.ranks import run_ranks
from tests.rules import assert_same, reduce
from tests.test_virtual import trained
from tests.tiny_gpt import TinyGPT
from tests.trainer import TINY, train_runs

pytestmark = [
    pytest.mark.shows("recorded losses are replayed bit for bit, by ranks and virtual workers"),
    pytest.mark.shows("the log: killed and resumed runs, damaged files, pandas, DuckDB", device=False),
]

UNITS = {
    "shard": {},
    "bucket": {"loss_unit": "bucket"},
    "digests": {"loss_unit": "packet", "packet_bytes": 16},
    "bitmaps": {"loss_unit": "packet", "packet_bytes": 16, "transport": "udp"},
}
SHARDS = (5, 17, 60)  # elements of the shards of three buckets
LOSSY = {"p_grad": 0.4, "p_param": 0.3}
#: Losses of shards.
SIMPLE = LossyConfig(**LOSSY, delivery_log="later")


def write(folder, config, size, steps, skipped=(), streams=(Stream(),), first=0, ranks=None, chunk=1000, as_rank=None):
    """Log ``steps`` iterations of ``size`` ranks, one log for all receivers or, with ``ranks``, one for each.

    ``as_rank``: the writer of a file, if it is none of these. A file has ``chunk`` iterations. In those in ``skipped``
    the optimizer made no update. Return bool[N, N, units], receivers first, by exchange.
    """
    config = dataclasses.replace(config, delivery_log=str(folder))
    units, total = cut(SHARDS, [4] * 3, config.loss_unit, config.packet_bytes)
    networks = {phase: Network(config, phase, size) for phase in ("grad", "param")}
    everyone = np.arange(size)
    logs = []
    for rank in [None] if ranks is None else ranks:
        log = DeliveryLog(config, rank if as_rank is None else as_rank)
        log.iterations = chunk
        if first:
            log.restart(first)
        logs.append((log, everyone if rank is None else [rank]))
    truth = {}
    for step in range(first, steps):
        for stream in streams:
            for phase in ("grad", "param") if step not in skipped else ("grad",):
                exchange = Exchange(phase, stream, step)
                arrived = networks[phase].delivered_links(
                    exchange, np.tile(everyone, size), np.repeat(everyone, size), total
                )
                truth[exchange] = arrived = arrived.reshape(size, size, total)
                for log, receivers in logs:
                    log.observe(Delivery(exchange, everyone, receivers, arrived[list(receivers)], units))
        for log, _ in logs:
            log.finish_iteration(step, step not in skipped, list)
    for log, _ in logs:
        log.close()
    return truth


def replayed(folder, exchange, config, size, units):
    """Return the outcome of an exchange by a replay of the log in ``folder``."""
    flags = {name: getattr(config, name) for name in ("loss_unit", "packet_bytes", "lossy_self")}
    replay = LossyConfig(loss_model=("trace",), trace=str(folder), loss_seed=99, **flags)
    network = Network(replay, exchange.phase, size)
    everyone = np.arange(size)
    arrived = network.delivered_links(exchange, np.tile(everyone, size), np.repeat(everyone, size), units)
    return arrived.reshape(size, size, units)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 5),
    steps=st.integers(1, 7),
    unit=st.sampled_from(sorted(UNITS)),
    chunk=st.integers(1, 4),
    per_rank=st.booleans(),
    lossy_self=st.booleans(),
    skipped=st.sets(st.integers(0, 6)),
    model=st.sampled_from(["bernoulli", "gilbert-elliott"]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_replay_loses_what_was_recorded(
    tmp_path_factory, size, steps, unit, chunk, per_rank, lossy_self, skipped, model, seed
):
    folder = tmp_path_factory.mktemp("log")
    streams = (Stream(), Stream("expert", 1), Stream("embedding"))
    lossy_self &= unit != "bitmaps"
    config = LossyConfig(
        **LOSSY, **UNITS[unit], loss_model=(model,), loss_seed=seed, lossy_self=lossy_self, delivery_log="later"
    )
    ranks = range(size) if per_rank else None
    truth = write(folder, config, size, steps, skipped, streams, ranks=ranks, chunk=chunk)
    for exchange, arrived in truth.items():
        assert np.array_equal(replayed(folder, exchange, config, size, arrived.shape[2]), arrived), exchange
    for step in skipped & set(range(steps)):
        assert replayed(folder, Exchange("param", Stream(), step), config, size, arrived.shape[2]).all()
    if size == 1 and not lossy_self:
        return
    with pytest.raises(UsageError, match=f"no records of iteration {steps} of rank 0"):
        replayed(folder, Exchange("grad", Stream(), steps), config, size, arrived.shape[2])


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_bitmaps_are_packed_and_unpacked(units, seed):
    arrived = np.random.default_rng(seed).random((3, units)) < 0.5
    assert np.array_equal(unpack(pack(arrived), units), arrived)
    assert pack(arrived)[1, 0] & 1 == arrived[1, 0]


STEPS = 3
RANKS = 3
MODEL = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}
RULES = {
    "shard": ("previous", {}),
    "bucket": ("renormalize", {"loss_unit": "bucket", "lossy_self": True}),
    "feedback": ("error-feedback", {"loss_unit": "packet", "packet_bytes": 512}),
    "digests": ("previous", {"loss_unit": "packet", "packet_bytes": 512, "loss_model": ("gilbert-elliott",)}),
}


def configs(folder):
    """By name, the configuration of a run that records, and that of its replay, with another seed."""
    for name, (rule, flags) in RULES.items():
        log = str(folder / name)
        recording = LossyConfig(**LOSSY, **flags, grad_recovery=rule, delivery_log=log)
        replay = {key: flags[key] for key in ("loss_unit", "packet_bytes", "lossy_self") if key in flags}
        yield name, recording, LossyConfig(**replay, loss_model=("trace",), trace=log, loss_seed=77, grad_recovery=rule)


def record_and_replay(rank, folder, workers=None):
    results = {}
    for name, recording, replay in configs(folder):
        recorded = trained(rank, TinyGPT(**MODEL), recording, STEPS, workers)
        torch.distributed.barrier()  # a replay reads the files of all ranks
        results[name] = recorded, trained(rank, TinyGPT(**MODEL), replay, STEPS, workers)
    return results


def table(folder):
    """All rows of a log, in an order that does not depend on who wrote them."""
    order = ["iteration", "phase", "stream", "bucket", "destination", "source"]
    return pq.read_table(folder).sort_by([(name, "ascending") for name in order])


@pytest.mark.on_cuda
@pytest.mark.shows("recorded losses are replayed bit for bit, by ranks and virtual workers")
@pytest.mark.slow
def test_replays_of_real_and_virtual_runs_are_bit_identical_and_their_logs_equal(tmp_path):
    """Weights, losses and gradient norms after every step, in a trace of exactly as many steps as the run."""
    (tmp_path / "real").mkdir()
    (tmp_path / "virtual").mkdir()
    real = run_ranks(record_and_replay, RANKS, tmp_path / "real")
    [virtual] = run_ranks(record_and_replay, 1, tmp_path / "virtual", RANKS)
    for name in RULES:
        for results in [*real, virtual]:
            assert_same(*results[name])
        logs = [table(tmp_path / kind / name) for kind in ("real", "virtual")]
        assert logs[0].equals(logs[1]) and len(logs[0]) > 0
        links = RANKS * (RANKS - 1) + (RANKS if name == "bucket" else 0) / 2  # own gradients with --lossy-self
        exchanges = 2 * STEPS * (logs[0]["bucket"].to_numpy().max() + 1 or 1)
        assert len(logs[0]) == links * exchanges


@pytest.mark.on_cuda
@pytest.mark.shows("a CPU's log is replayed on a GPU, and the other way")
def test_a_log_is_replayed_on_another_device(tmp_path, ranks_on):
    """Kernels of devices round otherwise, and Adam makes steps of it; what is lost moves replicas by more."""
    tables = []
    for there, here in (("cpu", ranks_on), (ranks_on, "cpu")):
        folder = tmp_path / f"{len(tables)}"
        folder.mkdir()
        name, recording, replay = next(configs(folder))
        recorded = run_ranks(trained, 2, TinyGPT(**MODEL), recording, STEPS, on=there)
        again = run_ranks(trained, 2, TinyGPT(**MODEL), replay, STEPS, on=here)
        for mine, theirs in zip(recorded, again, strict=True):
            for (loss, norm, *_), (loss_again, norm_again, *_) in zip(mine, theirs, strict=True):
                assert (loss_again, norm_again) == pytest.approx((loss, norm), rel=1e-3)
        tables.append(table(folder / name))
    assert tables[0].equals(tables[1]) and len(tables[0]) > 0


def test_a_resumed_run_has_the_log_of_an_uninterrupted_one(data, tmp_path):
    base = TINY | data | {"eval_iters": 0, "eval_interval": 1000}
    once, twice = ({**LOSSY, "delivery_log": str(tmp_path / name)} for name in ("once", "twice"))
    again = base | {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    run_ranks(train_runs, 2, (base, once), (again | {"exit_interval": 5}, twice), (again, twice))
    assert table(tmp_path / "once").equals(table(tmp_path / "twice"))
    assert set(table(tmp_path / "twice")["iteration"].to_pylist()) == set(range(TINY["train_iters"]))
    names = sorted(path.name for path in (tmp_path / "twice").iterdir())
    assert names[:2] == [RUN, "rank_00000_000000000_000000004.parquet"]  # closed for the checkpoint


def killed_log(rank, folder):
    units, total = cut(SHARDS, [4] * 3, "shard", 1)
    log = DeliveryLog(LossyConfig(**LOSSY, delivery_log=str(folder)))
    log.iterations = 10
    for step in range(37):
        arrived = np.ones((2, 2, total), dtype=bool)
        log.observe(Delivery(Exchange("grad", Stream(), step), range(2), range(2), arrived, units))
        log.finish_iteration(step, True, list)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_stream_that_began_after_the_first_file_is_known(tmp_path):
    """Say, of parameters, while the optimizer skipped its first updates."""
    late = Stream(chunk=1)
    write(tmp_path, SIMPLE, 2, 2)
    write(tmp_path, SIMPLE, 2, 5, streams=(Stream(), late), first=2)
    folder = DeliveryLogFolder(tmp_path)
    assert late.name not in folder.ranks[0][0].meta.streams
    assert folder.size(late.name) == 2 and (late.name, 0) in folder.writers
    assert verdict(tmp_path).problems == []
    replay = LossyConfig(loss_model=("trace",), trace=str(tmp_path))
    Network(replay, "param", 2).channel.check("param", late, 2, None, None)


def test_a_killed_run_loses_at_most_its_open_file(tmp_path):
    with pytest.raises(AssertionError, match="the process died"):
        run_ranks(killed_log, 1, tmp_path)
    assert DeliveryLogFolder(tmp_path).covered(0) == [(0, 29)]
    assert set(table(tmp_path)["iteration"].to_pylist()) == set(range(30))


@pytest.mark.parametrize("iteration", [0, 1, 4, 5, 9])
def test_a_restart_drops_what_comes_after_the_checkpoint_and_nothing_else(tmp_path, iteration):
    write(tmp_path / "a", SIMPLE, 3, 9, chunk=4)
    write(tmp_path / "whole", SIMPLE, 3, 12)
    log = DeliveryLog(dataclasses.replace(SIMPLE, delivery_log=str(tmp_path / "a")))
    log.restart(iteration)
    kept = table(tmp_path / "a")["iteration"].to_pylist() if iteration else []
    assert set(kept) == set(range(iteration))
    write(tmp_path / "a", SIMPLE, 3, 12, first=iteration or 0, chunk=4)
    assert table(tmp_path / "a").equals(table(tmp_path / "whole"))
    files = [(file.path.name, file.first) for file in log_files(tmp_path / "a")]  # whose names say what they cover
    assert (file_name(0, iteration, min(iteration + 3, 11)), iteration) in files
    assert DeliveryLogFolder(tmp_path / "a").covered(0) == [(0, 11)]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_row_group_holds_whole_iterations(tmp_path, monkeypatch, resumed):
    """Also where it is full in the middle of one."""
    monkeypatch.setattr(writer, "_GROUP_BYTES", 1)
    streams = (Stream(), Stream("expert", 1))
    write(tmp_path, SIMPLE, 3, 4, streams=streams)
    if resumed:
        write(tmp_path, SIMPLE, 3, 9, streams=streams, first=4)
    [*_, path] = sorted(tmp_path.glob("rank_*"))
    file = pq.ParquetFile(path)
    groups = [set(file.read_row_group(group)["iteration"].to_pylist()) for group in range(file.num_row_groups)]
    assert groups == [{step} for step in (range(4, 9) if resumed else range(4))]


def test_a_folder_with_another_run_is_refused(tmp_path):
    config = LossyConfig(**LOSSY, delivery_log=str(tmp_path))
    run = {"hidden_size": 64, "seed": 1}
    claim_delivery_log(config, 3, False, run)
    claim_delivery_log(dataclasses.replace(config, loss_seed=5), 3, False, run)  # nothing is recorded yet
    claim_delivery_log(config, 3, False, run)
    write(tmp_path, config, 3, 2)
    claim_delivery_log(config, 3, True, run)
    for changes, ranks, resumes, other, message in (
        ({}, 3, False, {}, "holds the log of a run with these settings"),
        ({"loss_seed": 5}, 3, True, {}, "--loss-seed was 1234 there and is 5 here"),
        ({}, 4, True, {}, "of 3 data-parallel ranks, here 4"),
        ({}, 3, True, {"hidden_size": 32}, "--hidden-size was 64 there and is 32 here"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            claim_delivery_log(dataclasses.replace(config, **changes), ranks, resumes, run | other)
        assert f"--delivery-log {tmp_path}" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UsageError, match="holds the log of a run"):  # without a claim: in somebody's own program
        write(tmp_path, config, 3, 2)
    (tmp_path / RUN).unlink()
    with pytest.raises(UsageError, match="holds another run"):
        claim_delivery_log(config, 3, True, run)
    with pytest.raises(UsageError, match="must be a folder that can be written to"):
        claim_delivery_log(dataclasses.replace(config, delivery_log=__file__), 3, False, run)


def of_an_earlier_version(folder):
    """Take from the log in ``folder`` every flag that has its default, as if there had been none."""
    default = json.loads(json.dumps(dataclasses.asdict(LossyConfig())))
    note = json.loads((folder / RUN).read_text())
    note["loss"] = {name: value for name, value in note["loss"].items() if value != default[name]}
    (folder / RUN).write_text(json.dumps(note))
    for path in folder.glob("*.parquet"):
        rewrite(path, note=lambda meta: dataclasses.replace(meta, loss=note["loss"]))
    return note["loss"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_flag_that_a_log_does_not_know_had_its_default(tmp_path, unit):
    """Verified, replayed and continued as ever; and still it is another run where such a flag is another."""
    config = LossyConfig(**LOSSY, **UNITS[unit], delivery_log=str(tmp_path))
    run = {"hidden_size": 64}
    claim_delivery_log(config, 3, False, run)
    truth = write(tmp_path, config, 3, 6, skipped={4}, ranks=range(3))
    assert of_an_earlier_version(tmp_path).keys() == LOSSY.keys() | UNITS[unit].keys()
    found = verdict(tmp_path)
    assert found.problems == [] and found.rows == len(table(tmp_path))
    for exchange, arrived in truth.items():
        units = arrived.shape[-1]
        np.testing.assert_array_equal(replayed(tmp_path, exchange, config, 3, units), arrived)
    claim_delivery_log(config, 3, True, run | {"use_distributed_optimizer": True})  # what nobody noted is not known
    for changes, message in (
        ({"grad_error": "bit-flip", "grad_error_at": "reduce"}, "--grad-error was none there and is bit-flip here"),
        ({"loss_seed": 7}, "--loss-seed was 1234 there and is 7 here"),
    ):
        with pytest.raises(UsageError, match=message):
            claim_delivery_log(dataclasses.replace(config, **changes), 3, True, run)
    write(tmp_path, config, 3, 9, first=5, ranks=range(3))
    assert verdict(tmp_path).problems == [] and verdict(tmp_path).usable == dict.fromkeys(range(3), (0, 8))


def verdict(folder):
    return verify(DeliveryLogFolder(folder))


def broken(folder, damage):
    """A log of 3 ranks and 9 iterations in files of 3, whose middle file of rank 1 ``damage`` changes."""
    flags = {"loss_unit": "packet", "packet_bytes": 4, "transport": "udp"}
    config = LossyConfig(**LOSSY, **flags, delivery_log="later")
    write(folder, config, 3, 9, ranks=range(3), chunk=3)
    path = folder / "rank_00001_000000003_000000005.parquet"
    damage(path)
    return config, path


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_bits(path):
    column = pq.read_metadata(path).row_group(0).column(8)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_bits, Path.unlink])
def test_what_precedes_a_broken_file_is_usable(tmp_path, damage):
    config, path = broken(tmp_path, damage)
    found = verdict(tmp_path)
    assert found.usable == {0: (0, 8), 1: (0, 2), 2: (0, 8)}
    [problem] = found.problems
    if damage is Path.unlink:
        assert problem == "rank 1: no records of iterations 3 to 5"
    else:
        assert problem.startswith(f"{path.name}, row 0, iteration 3: ")
    for step in range(3):
        replayed(tmp_path, Exchange("grad", Stream(), step), config, 3, sum(SHARDS))
    with pytest.raises(UsageError, match="--trace .*iteration 3") as error:
        replayed(tmp_path, Exchange("grad", Stream(), 3), config, 3, sum(SHARDS))
    assert "\n" not in str(error.value)


def rewrite(path, change=list, note=lambda meta: meta):
    """Write the file again, and otherwise as it was, with rows that ``change`` changed, or with another note."""
    file = pq.ParquetFile(path)
    rows, meta = file.read().to_pylist(), Meta.decode(file.metadata.metadata)
    change(rows)
    with pq.ParquetWriter(path, file.schema_arrow, store_schema=False) as writer:
        writer.write_table(pa.Table.from_pylist(rows, file.schema_arrow))
        writer.add_key_value_metadata(note(meta).encode())


@pytest.mark.parametrize("unit", ["shard", "digests"])
def test_a_wrong_record_is_found(tmp_path, unit):
    config = LossyConfig(**LOSSY, **UNITS[unit], delivery_log="later")
    write(tmp_path, config, 3, 9)

    def change(rows):
        row = next(row for row in rows[30:] if row["lost"])
        row["lost"] -= 1

    [path] = tmp_path.glob("*.parquet")
    rewrite(path, change)
    [problem] = verdict(tmp_path).problems
    assert ("bitmap and lost do not agree" if unit == "shard" else "drawn again") in problem
    if unit == "digests":  # the number lost is right, but not who
        write(tmp_path / "two", config, 3, 9)
        [path] = (tmp_path / "two").glob("*.parquet")
        rewrite(path, lambda rows: [row.update(digest=b"12345678") for row in rows])
        assert "drawn again" in verdict(tmp_path / "two").problems[0]


def test_a_missing_rank_and_a_mixture_are_found(tmp_path):
    write(tmp_path, SIMPLE, 3, 4, ranks=range(3))
    (tmp_path / "rank_00001_000000000_000000003.parquet").unlink()
    assert verdict(tmp_path).problems == ["no records of rank 1 of dense-e0-s0-c0"]
    with pytest.raises(UsageError, match="no records of rank 1"):
        check_channels(LossyConfig(loss_model=("trace",), trace=str(tmp_path)), 3, 4)
    write(tmp_path, dataclasses.replace(SIMPLE, loss_seed=1), 3, 4, ranks=[1])
    assert "other loss flags" in verdict(tmp_path).problems[0]
    with pytest.raises(UsageError, match="different runs"):
        check_channels(LossyConfig(loss_model=("trace",), trace=str(tmp_path)), 3, 4)


def test_a_log_that_does_not_fit_is_refused(tmp_path):
    config = LossyConfig(**LOSSY, loss_unit="packet", packet_bytes=16, lossy_self=True, delivery_log="later")
    write(tmp_path, config, 3, 4)
    fits = {"loss_model": ("trace",), "trace": str(tmp_path), "loss_unit": "packet", "packet_bytes": 16}
    fits["lossy_self"] = True
    check_channels(LossyConfig(**fits), 3, 4)
    for changes, size, steps, message in (
        ({"loss_unit": "shard"}, 3, 4, "--loss-unit shard: the run recorded in"),
        ({"packet_bytes": 32}, 3, 4, "--packet-bytes 32: the run recorded in"),
        ({"lossy_self": False}, 3, 4, "--lossy-self off"),
        ({}, 4, 4, "is of 3 ranks, but the group has 4"),
        ({}, 3, 5, "no records of iteration 4 of rank 0, the run needs 5"),
        ({"trace": str(tmp_path.parent)}, 3, 4, "holds no delivery log"),
    ):
        with pytest.raises(UsageError, match=message):
            check_channels(LossyConfig(**{**fits, **changes}), size, steps)
    network = Network(LossyConfig(**fits), "grad", 3)
    with pytest.raises(UsageError, match="has 22 units per link in phase grad, this run has 9"):
        network.channel.check("grad", Stream(), 3, 9, 4)
    with pytest.raises(UsageError, match="no records of expert-e0-s0-c0"):
        network.channel.check("grad", Stream("expert"), 3, 22, 4)


def test_the_step_after_a_trace_can_be_looked_at_but_not_taken(tmp_path):
    write(tmp_path, SIMPLE, 3, 4)
    replay = LossyConfig(loss_model=("trace",), trace=str(tmp_path), grad_recovery="previous")
    networks = {phase: Network(replay, phase, 3) for phase in ("grad", "param")}
    units, _ = cut([3], [4], "shard", 1)
    transport = CollectiveWire(networks, Stream(), range(3), 0, {"grad": units, "param": units})
    assert transport.steps("grad") == 4
    group, buffer = LossyGroup(replay, transport), torch.ones(9)
    # The rule asks what the step after the last one will lose.
    reduce(group, 0, buffer, buffer[:3], 3, lambda: None).wait()
    with pytest.raises(UsageError, match="iteration 4"):
        reduce(group, 0, buffer, buffer[:3], 4, lambda: None)


def test_pandas_and_duckdb_read_it(tmp_path):
    import duckdb
    import pandas

    config = LossyConfig(**LOSSY, loss_unit="bucket", delivery_log="later")
    truth = write(tmp_path, config, 3, 8, ranks=range(3), chunk=3)
    (tmp_path / RUN).write_text("{}")
    frame = pandas.read_parquet(tmp_path)
    lost = frame[(frame.phase == "grad") & (frame.source == 0) & (frame.destination == 2)].lost.sum()
    expected = sum((~arrived[2, 0]).sum() for exchange, arrived in truth.items() if exchange.phase == "grad")
    assert lost == expected > 0
    query = f"select sum(lost)::int from '{tmp_path}/*.parquet' where phase = 'grad' and source = 0 and destination = 2"
    assert duckdb.sql(query).fetchall() == [(expected,)]
    query = f"select count(*) from '{tmp_path}/*.parquet' where lost = 1 and bitmap = '\\x00'::blob"
    assert duckdb.sql(query).fetchall() == [(int(frame.lost.sum()),)]


def test_what_several_ranks_recorded_counts_once(tmp_path):
    """Peers of tensor parallelism receive the same, and each writes it."""
    config = LossyConfig(**LOSSY, loss_unit="bucket")
    write(tmp_path, config, 3, 4, ranks=range(3))
    once = [rows.source.tolist() for rows in scan(DeliveryLogFolder(tmp_path))]
    write(tmp_path, config, 3, 4, ranks=[1], as_rank=7)
    assert len(list(tmp_path.glob("rank_00007*.parquet"))) == 1
    assert [rows.source.tolist() for rows in scan(DeliveryLogFolder(tmp_path))] == once


def test_summary_counts_rates(tmp_path):
    config = LossyConfig(**LOSSY, loss_unit="bucket", delivery_log="later")
    truth = write(tmp_path, config, 4, 30, skipped={7}, chunk=3)
    found = summarize(DeliveryLogFolder(tmp_path))
    links = [(a, b) for a in range(4) for b in range(4) if a != b]
    for phase in ("grad", "param"):
        rates = found[phase]["dense-e0-s0-c0"]
        arrived = np.stack([arrived for exchange, arrived in truth.items() if exchange.phase == phase])
        assert rates.lost.sum() == sum((~arrived[:, b, a]).sum() for a, b in links)
        assert rates.rates[0, 1] == (~arrived[:, 1, 0]).mean()
    text = summary_text(DeliveryLogFolder(tmp_path))
    assert "iterations 0 to 29, 10 files of 1 writing ranks" in text
    assert "%" in text and all(before == " " for before, sign in itertools.pairwise(text) if sign == "%")
    assert "flags: --p-grad 0.4 --p-param 0.3 --loss-unit bucket" in text


def test_the_command_line(tmp_path, rows):
    def command(name, status=0):
        done = rows.run("megatron_lossy.delivery_log", name, tmp_path)
        assert done.returncode == status
        return done

    config = LossyConfig(**LOSSY, **UNITS["digests"], delivery_log="later")
    write(tmp_path, config, 3, 6, streams=(Stream(), Stream("expert")))
    assert "grad, expert-e0-s0-c0, 3 ranks" in command("summary").stdout
    assert "iterations 0 to 5 are usable for all ranks" in command("verify").stdout
    [path] = tmp_path.glob("*.parquet")
    truncate(path)
    assert f"{path.name}, row 0, iteration 0: " in command("verify", status=1).stdout
    refused = command("summary", status=2).stderr
    assert refused.count("\n") == 1 and path.name in refused
