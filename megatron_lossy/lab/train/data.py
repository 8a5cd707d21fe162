"""Samples in Megatron's order: indexed files, GPTDataset, and the slice of each global batch that a rank takes.

The order is a function of (seed, consumed samples) alone. GPTDataset shuffles by the seed. Sample ``s`` of global batch
``b`` is sample ``b * global_batch_size + s`` of the shuffled data set, whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

from ...base import device
from ...base.errors import UsageError, machine_error, refuse
from ...base.files import naming, publish, writing
from ..data import (
    Tokenizer,
    build_tokenizer,
    check_dataset,
    read_description,
    stdlib_documents,
    validation_documents,
    write_indexed,
)
from .config import TrainConfig

_VALIDATION_SHARE = 0.05
_DEFAULT_FOLDER = "build/data"


def build_datasets(
    config: TrainConfig, tokenizer, iterations: int | None = None
) -> tuple[GPTDataset, GPTDataset | None]:
    """Return training and validation data, with the samples that ``config`` needs. Collective over all ranks.

    ``iterations``: those of the worker that makes most; default ``--train-iters``.
    """
    evaluations = -(-config.train_iters // config.eval_interval)
    train_samples = (iterations or config.train_iters) * config.global_batch_size
    valid_samples = evaluations * config.eval_iters * config.global_batch_size
    cache = _cache_folder(config, train_samples, valid_samples)
    first = torch.distributed.get_rank() == 0
    # The cache is written aside, because GPTDataset takes the unfinished cache of a killed run for complete. It has a
    # folder of its own, because another run may be building the same one.
    place = [str(cache if cache.is_dir() else _building_folder(cache)) if first else None]
    torch.distributed.broadcast_object_list(place)
    folder = Path(place[0])
    importlib.invalidate_caches()  # caches of folders may be older than the helper
    train = get_blend_from_list(list(config.data_path))
    valid = get_blend_from_list(list(config.valid_data_path)) if config.eval_iters else None
    dataset_config = GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.seq_length,
        blend_per_split=[train, valid, None],
        path_to_cache=str(folder),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    try:
        with _naming_cache(folder.parent):
            train, valid, _ = BlendedMegatronDatasetBuilder(
                GPTDataset, [train_samples, valid_samples, 0], lambda: True, dataset_config
            ).build()
    except Exception:
        if first and folder != cache:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    torch.distributed.barrier()
    if first and folder != cache:
        try:
            publish(folder, cache)
        except OSError:  # another run was faster; the loaded files stay mapped
            shutil.rmtree(folder, ignore_errors=True)
    return train, valid


@contextlib.contextmanager
def _naming_cache(cache: Path) -> Iterator[None]:
    """Return a context that writes ``cache``. Its :class:`OSError` names ``cache``, or a file elsewhere."""
    try:
        yield
    except Exception as error:
        failed = error if isinstance(error, OSError) else machine_error(error)
        name = failed.filename if failed else None
        if isinstance(name, str) and cache.absolute() not in Path(name).absolute().parents:
            raise
        with naming(cache):
            raise


def _building_folder(cache: Path) -> Path:
    """Make a new folder next to ``cache``. Remove the folders that killed runs left there at least an hour ago."""
    with writing("--data-cache-path", cache.parent):
        cache.parent.mkdir(parents=True, exist_ok=True)
    for left in cache.parent.glob(f"{cache.name}.building.*"):
        with contextlib.suppress(FileNotFoundError):  # another run finished with it meanwhile
            if time.time() - left.stat().st_mtime > 3600:
                shutil.rmtree(left, ignore_errors=True)
    folder = cache.with_name(f"{cache.name}.building.{uuid.uuid4().hex}")
    folder.mkdir(parents=True)
    return folder


def _cache_folder(config: TrainConfig, *samples: int) -> Path:
    """Return a folder for exactly these sample indices: other data has another folder, even under the same name."""
    files = [os.path.abspath(prefix) + ".idx" for _, prefix in config.data_sets()]
    content = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    text = json.dumps([content, config.data_path, config.valid_data_path, config.seed, config.seq_length, samples])
    base = Path(config.data_cache_path) if config.data_cache_path else Path(files[0]).parent / "cache"
    return base / hashlib.sha256(text.encode()).hexdigest()[:16]


class RankBatches:
    """The micro-batches of data-parallel rank ``rank`` of ``size``, from global sample ``consumed`` on, as an iterator.

    ``parts``: of consecutive samples in each global batch, which as many groups of equally many consecutive ranks take.
    Each is a dictionary of tensors [micro-batch, sequence] on the device of the rank: ``tokens``, ``labels``,
    ``position_ids`` (int64) and ``loss_mask`` (float32). Reading a sample costs microseconds (a slice of a mapped
    file), so that no worker process is needed.
    """

    def __init__(
        self, dataset: GPTDataset, config: TrainConfig, consumed: int, rank: int, size: int, parts: int = 1
    ) -> None:
        self._dataset = dataset
        self._size = config.micro_batch_size
        part, self._rank = divmod(rank, size // parts)
        self._stride = self._size * (size // parts)
        self._part = self._left = config.global_batch_size // parts
        self._others = config.global_batch_size - self._part
        self._consumed = consumed + part * self._part

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def skip(self, samples: int) -> None:
        """Leave out the rank's part of the next ``samples`` of all ranks."""
        self._consumed += samples

    def __next__(self) -> dict[str, torch.Tensor]:
        first = self._consumed + self._rank * self._size
        samples = [self._dataset[index] for index in range(first, first + self._size)]
        self._consumed += self._stride
        self._left -= self._stride
        if self._left <= 0:
            self._consumed, self._left = self._consumed + self._others, self._part
        return on_device(samples, device.current_device())


def on_device(samples: Sequence[Mapping[str, torch.Tensor]], target: torch.device) -> dict[str, torch.Tensor]:
    """Return the micro-batch of ``samples`` on ``target``; see :class:`RankBatches`.

    It crosses in one piece. On CUDA it does so from page-locked memory, without a wait for the device's queued work.
    """
    shape = (len(samples), len(samples[0]["tokens"]))
    count = shape[0] * shape[1]
    # As words: the float32 of the masks, two each, come last.
    words = torch.empty(len(_WORDS) * count + -(-count // 2), dtype=torch.int64, pin_memory=target.type == "cuda")
    for key, values in _parts(words, shape).items():
        for row, sample in zip(values, samples, strict=True):
            row.copy_(sample[key])
    return _parts(words.to(target, non_blocking=target.type == "cuda"), shape)


#: Parts of a micro-batch that are int64.
_WORDS = ("tokens", "labels", "position_ids")


def _parts(words: torch.Tensor, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return views of ``words``: the parts of a micro-batch of ``shape``."""
    count = shape[0] * shape[1]
    parts = dict(zip(_WORDS, words[: len(_WORDS) * count].view(len(_WORDS), *shape), strict=True))
    return {**parts, "loss_mask": words[len(_WORDS) * count :].view(torch.float32)[:count].view(shape)}


# --- the files, made first if need be, and their check --------------------------------------------------------------


def with_data_paths(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with the paths that ``--data`` stands for."""
    if config.data is None:
        return config
    # The text is that of this Python's library.
    name = f"{config.data}-{platform.python_version()}-{config.tokenizer.replace(os.sep, '_')}"
    prefix = os.path.join(config.data_cache_path or _DEFAULT_FOLDER, name)
    return dataclasses.replace(config, data=None, data_path=(prefix + "_train",), valid_data_path=(prefix + "_valid",))


def write_text(paths: TrainConfig) -> None:
    """Write the data sets of ``--data`` unless they exist. ``paths`` has their paths.

    If several processes, on machines that share the folder, call this at once, one writes and the others wait. Data
    that a run has found complete must not be replaced while it reads it.
    """
    tokenizer = build_tokenizer(paths.tokenizer)
    if _complete(paths, tokenizer):
        return
    prefix = paths.data_path[0].removesuffix("_train")
    with writing("--data-cache-path", os.path.dirname(prefix) or "."):
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        lock = open(prefix + ".lock", "w")
    with lock:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or this process dies
        if not _complete(paths, tokenizer):
            documents = stdlib_documents()
            validation = validation_documents([name for name, _ in documents], _VALIDATION_SHARE)
            write_indexed(documents, prefix, tokenizer, overwrite=True, validation=validation)


def _complete(paths: TrainConfig, tokenizer: Tokenizer) -> bool:
    try:
        for _, prefix in paths.data_sets():
            check_dataset(prefix, tokenizer)
    except UsageError:
        return False
    return True


def check_data(config: TrainConfig) -> None:
    """Raise :class:`UsageError` unless the data sets are complete and made by ``--tokenizer``."""
    tokenizer = build_tokenizer(config.tokenizer)
    for flag, prefix in config.data_sets():
        check_dataset(prefix, tokenizer, flag)


def fingerprint(config: TrainConfig) -> list[Any]:
    """Return values that identify these data sets besides their names: a hash of the text, or at least the size."""
    result = []
    for _, prefix in config.data_sets():
        description = read_description(prefix)
        result.append(description.documents_sha256 if description else os.path.getsize(prefix + ".bin"))
    return result


def same_everywhere(data: list[Any]) -> list[Any]:
    """Return ``data``, this rank's :func:`fingerprint`. A collective call. Raise :class:`UsageError` if they differ."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, data)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise refuse("--data-path", f"on rank {rank}", "is not what rank 0 has there; copy one to all hosts")
    return data
