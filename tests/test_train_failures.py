"""Whom the trainer blames for what fails while it reads and writes, on this rank or on others; and ranks that are killed."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import resource
import signal
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_lossy.base.errors import UsageError
from megatron_lossy.lab.train.process import lost_contact
from tests.programs import Program, run_program, start_ranks
from tests.ranks import run_ranks
from tests.trainer import TINY, as_flags, checkpoint_bytes, read_records, recorded_losses, saved_replicas, write_data

pytestmark = pytest.mark.shows("who is blamed for what cannot be read or written", device=False)


def _name(error: BaseException) -> str:
    return type(error).__name__


def _failure(error: Exception) -> torch.distributed.checkpoint.CheckpointException:
    """Return the exception that torch raises on all ranks when ``error`` was raised on rank 1."""
    return torch.distributed.checkpoint.CheckpointException("read", {1: (error, None)})


def _load(monkeypatch, error: BaseException) -> None:
    """Load a checkpoint while ``error`` happens."""
    from megatron_lossy.lab.train import checkpoint

    def fail(state, path):
        raise error

    reading = types.SimpleNamespace(load_common_state_dict=lambda path: {"ranks": 1}, load=fail)
    monkeypatch.setattr(checkpoint, "dist_checkpointing", reading)
    monkeypatch.setattr(checkpoint, "FileSystemReader", lambda path: types.SimpleNamespace(read_metadata=lambda: None))
    monkeypatch.setattr(checkpoint, "latest_iteration", lambda folder: 1)
    monkeypatch.setattr(checkpoint, "_ranks", lambda: 1)
    monkeypatch.setattr(checkpoint.Checkpoints, "_state", lambda self, is_loading: {})
    checkpoint.Checkpoints.__new__(checkpoint.Checkpoints).load("run")


GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


@pytest.mark.parametrize("error", [GLOO, torch.OutOfMemoryError("out of memory"), AttributeError("ours")], ids=_name)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_good_checkpoint_is_not_blamed(monkeypatch, error, elsewhere):
    with pytest.raises(type(error)) as caught:
        _load(monkeypatch, _failure(error) if elsewhere else error)
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        EOFError("Ran out of input"),
        pickle.UnpicklingError("invalid load key"),
        RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "__0_0.distcp"),
        KeyError("model.weight"),
    ],
    ids=_name,
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_damaged_checkpoint_is(monkeypatch, error, elsewhere):
    with pytest.raises(UsageError, match=r"^--load run/iter_0000001: cannot be read \([^;]*\)$"):
        _load(monkeypatch, _failure(error) if elsewhere else error)


def test_an_older_checkpoint_is_named_if_there_is_one(tmp_path):
    from megatron_lossy.lab.train.checkpoint import _reading

    for iteration in (2, 4, 6):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    with (
        pytest.raises(UsageError, match="to go on from iteration 2, write that number into latest_checkpointed"),
        _reading(str(tmp_path / "iter_0000004")),
    ):
        raise EOFError("Ran out of input")


def _save_on_a_full_disk(rank: int, folder: str) -> str:
    """Fail on both ranks, without a reason from torch; rank 1 looks for it a second later than rank 0."""
    from megatron_lossy.lab.train import checkpoint

    def write(self, aside, final, iteration, common):
        if rank == 0:
            aside.mkdir()
        torch.distributed.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        raise torch.distributed.checkpoint.CheckpointException("write", {0: (RuntimeError("position"), None)})

    def tried_late(aside, tried=checkpoint._tried):
        time.sleep(rank)
        return tried(aside)

    checkpoint._tried = tried_late
    checkpoint.Checkpoints._write = write
    try:
        checkpoint.Checkpoints.__new__(checkpoint.Checkpoints).save(folder, 3, {})
    except Exception as error:
        torch.distributed.barrier()
        return f"{type(error).__name__} {error}"


def test_all_ranks_know_of_a_full_disk_and_leave_nothing(tmp_path):
    said = run_ranks(_save_on_a_full_disk, 2, str(tmp_path))
    full = f"NotSaved [Errno {errno.EFBIG}] File too large: the checkpoint of iteration 3 was not saved: '{tmp_path}'"
    assert said == [full, full]
    assert not os.listdir(tmp_path)


def _build(rank: int, folder: str, names: list[str | None]) -> list[str | None]:
    """Return the names of the errors that building data sets raises, where the error itself has ``names``."""
    from megatron_lossy.lab.data import build_tokenizer
    from megatron_lossy.lab.train import data
    from megatron_lossy.lab.train.config import TrainConfig
    from tests.trainer import TINY

    write_data(0, folder)
    prefix = os.path.join(folder, "train")
    config = TrainConfig(
        **TINY | dict(data_path=(prefix,), eval_iters=0, data_cache_path=os.path.join(folder, "cache"))
    )
    found = []
    for name in names:

        class Builder:
            def __init__(self, *_):
                pass

            def build(self, name=name):
                raise OSError(errno.EACCES, "Permission denied", name)

        data.BlendedMegatronDatasetBuilder = Builder
        try:
            data.build_datasets(config, build_tokenizer("byte"))
        except OSError as error:
            found.append(error.filename)
    return found


def test_a_data_set_that_cannot_be_read_is_not_called_the_cache(tmp_path):
    shard, cache = f"{tmp_path}/train.bin", f"{tmp_path}/cache"
    assert run_ranks(_build, 1, str(tmp_path), [shard, f"{cache}/x/index.npy", None]) == [[shard, cache, cache]]


def test_a_building_folder_that_another_run_finishes_meanwhile_is_no_error(tmp_path):
    from megatron_lossy.lab.train.data import _building_folder

    (tmp_path / "cache.building.gone").symlink_to(tmp_path / "nothing")  # listed, and not there when it is asked
    old, new = tmp_path / "cache.building.old", tmp_path / "cache.building.new"
    old.mkdir(), new.mkdir()
    os.utime(old, (0, 0))
    assert _building_folder(tmp_path / "cache").parent == tmp_path
    assert not old.exists() and new.exists()


# --- real ranks, killed with SIGKILL at any moment: the run ends as if nobody had killed it --------------------------


killed = pytest.mark.shows("ranks killed at any moment go on bit for bit")

ITERATIONS = 12
PACKETS = {"p_grad": 0.3, "p_param": 0.3, "loss_unit": "packet", "packet_bytes": 64, "eval_weights": "both"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 9000}


def new_folder(folder: Path, pattern: str) -> Callable[[], bool]:
    """Return a function that says whether there is a folder more: killed runs leave some of the same names."""

    def found() -> set[tuple[str, int]]:
        with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
            return {(path.name, path.stat().st_ino) for path in folder.glob(pattern)}
        return set()

    before = found()
    return lambda: bool(found() - before)


def kill_one(ranks: list[Program], chance: random.Random, reached: Callable[[], bool], together: bool) -> bool:
    """Kill one of ``ranks`` once ``reached()``, and see the others end; return whether that was before the end of the run.

    Those that train notice it by themselves. One that waits for the others to start cannot: a launcher ends it (``together``).
    """
    end = time.monotonic() + 60
    while not reached() and not any(rank.poll() is not None for rank in ranks) and time.monotonic() < end:
        time.sleep(0.0005)
    first, *others = chance.sample(ranks, len(ranks))
    happened = first.poll() is None and first.send_signal(signal.SIGKILL)
    for rank in others if together else ():
        if rank.poll() is None:
            rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.communicate(timeout=240)
    return happened


@pytest.mark.on_cuda
@killed
@pytest.mark.parametrize("size", [pytest.param(2, id="flat"), pytest.param(4, id="two sites")])
def test_killed_ranks_continue_bit_for_bit(size, data, tmp_path):
    """Killed while a checkpoint is written aside, at any moment, and when one is in its place, mostly before the tracker names it."""
    base = TINY | data | OVERLAP | PACKETS | {"grad_recovery": "previous"}
    base |= {"train_iters": ITERATIONS, "save_interval": 2, "log_interval": 1, "save_replicas": True}
    base |= {"sites": 2} if size > 2 else {}
    once, often = tmp_path / "once", tmp_path / "often"
    done = run_program("megatron_lossy.train", *as_flags(base | {"save": str(once)}), ranks=size)
    assert done.returncode == 0, done.stderr
    flags = as_flags(base | {"save": str(often), "load": str(often)})
    chance, seconds = random.Random(1), sum(record["seconds"] for record in read_records(once, "train"))
    happened = []
    for pattern in ("iter_*.tmp", None, "iter_*[0-9]"):
        ranks = start_ranks("megatron_lossy.train", *flags, ranks=size)
        at = time.monotonic() + chance.uniform(0, 1 + seconds)
        reached = new_folder(often, pattern) if pattern else lambda at=at: time.monotonic() > at
        happened.append(kill_one(ranks, chance, reached, together=pattern is None))
    done = run_program("megatron_lossy.train", *flags, ranks=size)
    assert done.returncode == 0, done.stderr
    assert any(happened)
    assert recorded_losses(once) == recorded_losses(often)
    assert checkpoint_bytes(once, ITERATIONS) == checkpoint_bytes(often, ITERATIONS)
    last = [record["lm loss"] for record in read_records(once, "valid")[-2:]]
    assert last[0] != last[1]  # replicas differ from the owners' weights, or nothing was to be restored
    assert saved_replicas(once, ITERATIONS) == saved_replicas(often, ITERATIONS)
    assert len(saved_replicas(once, ITERATIONS)) == size


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("NCCL error in: a.cpp:253, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA failed.", False),
        ("NCCL error in: a.cpp:9\nncclInvalidUsage: invalid usage\nDuplicate GPU detected", False),
        ("NCCL error in: a.cpp:9\nncclRemoteError: A call failed possibly due to a remote process exiting", True),
        ("NCCL error in: a.cpp:9, unhandled system error\nncclSystemError: System call failed", True),
        ("Process group watchdog: collective timed out", True),
    ],
)
def test_a_failure_of_the_own_device_is_not_a_lost_rank(text, lost):
    assert lost_contact(torch.distributed.DistBackendError(text)) == lost
