"""The data sets of a run: their files, made first if need be, and their check."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import platform
from typing import Any

import torch

from ...base.errors import UsageError, refuse
from ...base.files import writing
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


def with_data_paths(config: TrainConfig) -> TrainConfig:
    """``config`` with the paths that ``--data`` stands for."""
    if config.data is None:
        return config
    # The text is that of this Python's library.
    name = f"{config.data}-{platform.python_version()}-{config.tokenizer.replace(os.sep, '_')}"
    prefix = os.path.join(config.data_cache_path or _DEFAULT_FOLDER, name)
    return dataclasses.replace(config, data=None, data_path=(prefix + "_train",), valid_data_path=(prefix + "_valid",))


def prepare_text(config: TrainConfig) -> None:
    """Write the data sets of ``--data`` unless they exist. Rank 0 writes, all ranks wait: a collective call."""
    if config.data is not None and torch.distributed.get_rank() == 0:
        write_text(with_data_paths(config))
    torch.distributed.barrier()


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
        for prefix in prefixes(paths):
            check_dataset(prefix, tokenizer)
    except UsageError:
        return False
    return True


def prefixes(config: TrainConfig) -> list[str]:
    """The prefixes in ``--data-path`` and ``--valid-data-path``, without the weights between them."""
    return [prefix for _, prefix in config.data_sets()]


def check_data(config: TrainConfig) -> None:
    """Raise :class:`UsageError` unless the data sets are complete and made by ``--tokenizer``."""
    tokenizer = build_tokenizer(config.tokenizer)
    for flag, prefix in config.data_sets():
        check_dataset(prefix, tokenizer, flag)


def fingerprint(config: TrainConfig) -> list[Any]:
    """Values that tell these data sets from others under the same names: a hash of the text, or at least the size."""
    result = []
    for prefix in prefixes(config):
        description = read_description(prefix)
        result.append(description.documents_sha256 if description else os.path.getsize(prefix + ".bin"))
    return result


def same_everywhere(data: list[Any]) -> list[Any]:
    """``data``, the :func:`fingerprint` of this rank. A collective call. Raises :class:`UsageError` if ranks differ."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, data)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise refuse("--data-path", f"on rank {rank}", "is not what rank 0 has there; copy one to all hosts")
    return data
