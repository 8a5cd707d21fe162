"""Whom the trainer blames for what fails while it reads and writes, on this rank or on others."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import time
import types

import pytest
import torch

from megatron_lossy.errors import UsageError
from tests.ranks import run_ranks

pytestmark = pytest.mark.shows("who is blamed for what cannot be read or written", device=False)


def _name(error: BaseException) -> str:
    return type(error).__name__


def _failure(error: Exception) -> torch.distributed.checkpoint.CheckpointException:
    """What torch raises on all ranks when ``error`` was raised on rank 1."""
    return torch.distributed.checkpoint.CheckpointException("read", {1: (error, None)})


def _load(monkeypatch, error: BaseException) -> None:
    """Load a checkpoint while ``error`` happens."""
    from megatron_lossy.train import checkpoint

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
    with pytest.raises(UsageError, match="--load run/iter_0000001: cannot be read .*; to go on from an older one"):
        _load(monkeypatch, _failure(error) if elsewhere else error)


def _save_on_a_full_disk(rank: int, folder: str) -> str:
    """Both ranks fail, and torch does not say why; rank 1 looks for the reason a second later than rank 0."""
    from megatron_lossy.train import checkpoint

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
    full = f"OSError [Errno {errno.EFBIG}] File too large: the checkpoint of iteration 3 was not saved: '{tmp_path}'"
    assert said == [full, full]
    assert not os.listdir(tmp_path)


def _tried_on_a_full_disk(rank: int, folder: str) -> int:
    from pathlib import Path

    from megatron_lossy.train import checkpoint

    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    return checkpoint._tried(Path(folder)).errno


def test_looking_for_the_reason_leaves_nothing(tmp_path):
    assert run_ranks(_tried_on_a_full_disk, 1, str(tmp_path)) == [errno.EFBIG]
    assert not os.listdir(tmp_path)


def _build(rank: int, folder: str, names: list[str | None]) -> list[str | None]:
    """The names of the errors that building data sets raises, where the error itself has ``names``."""
    from megatron_lossy.data import build_tokenizer
    from megatron_lossy.train import data
    from megatron_lossy.train.config import TrainConfig
    from tests.trainer import TINY, write_data

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
