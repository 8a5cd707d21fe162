"""Accelerators by name, with their kind and memory; what this node has of them, hosts of a hostfile, tokenizers on a disk."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import cannot, refuse

GIB = 2**30

#: Variables for the environment of every rank, by kind. Without them Megatron's calls of CUDA fail on Gaudi.
ENVIRONMENT = {"hpu": {"PT_HPU_GPU_MIGRATION": "1"}}


@dataclass(frozen=True)
class Device:
    """``kind``: cuda, hpu or cpu. ``memory``: bytes, as nvidia-smi or hl-smi shows them; None if unlimited."""

    kind: str
    memory: int | None


_MIB = 2**20
DEVICES = {
    "a100-40gb": Device("cuda", 40960 * _MIB),
    "a100-80gb": Device("cuda", 81920 * _MIB),
    "h100": Device("cuda", 81559 * _MIB),
    "h200": Device("cuda", 143771 * _MIB),
    "b200": Device("cuda", 183359 * _MIB),
    "gaudi2": Device("hpu", 98304 * _MIB),
    "gaudi3": Device("hpu", 131072 * _MIB),
    "cpu": Device("cpu", None),
}


_FILES = {"cuda": ("/dev", r"nvidia\d+"), "hpu": ("/dev/accel", r"accel\d+")}


def device_count(kind: str) -> int:
    """Accelerators of this machine, counted by their device files, which any process may list."""
    folder, pattern = _FILES[kind]
    if not Path(folder).is_dir():
        return 0
    return sum(re.fullmatch(pattern, path.name) is not None for path in Path(folder).iterdir())


def check_devices(kind: str, wanted: int) -> None:
    """Raise :class:`UsageError` unless this machine has ``wanted`` accelerators of ``kind``."""
    if kind == "cpu":
        return
    found = device_count(kind)
    if found < wanted:
        raise refuse("--device", f"({kind})", f"{wanted} accelerators are asked for on this node, {found} are there")


def first_host(file: str) -> str:
    """Return the first host of an Open MPI hostfile, on which rank 0 runs. Raises :class:`UsageError`."""
    try:
        lines = [line.split("#", 1)[0].split() for line in Path(file).read_text().splitlines()]
    except OSError as error:
        raise cannot("--hostfile", file, "read", error) from None
    hosts = [words[0] for words in lines if words]
    if not hosts:
        raise refuse("--hostfile", file, "names no host")
    return hosts[0]


def check_tokenizer(name: str) -> None:
    """Raise :class:`UsageError` unless the tokenizer is on a disk.

    64 ranks must not fetch it at once, maybe without a network.
    """
    kind, _, source = name.partition(":")
    if kind == "sentencepiece" and not os.path.isfile(source):
        raise refuse("--tokenizer", name, "there is no such model file")
    if kind == "hf" and not os.path.isdir(source):
        cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub"))
        if not (cache.expanduser() / f"models--{source.replace('/', '--')}").is_dir():
            raise refuse(
                "--tokenizer",
                name,
                f"is neither a folder nor in {cache}; download it once, or give hf:FOLDER or sentencepiece:FILE",
            )
