"""Accelerators by name: their kind and their memory."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

#: Variables for the environment of every rank, by kind. Without them Megatron's calls of CUDA fail on Gaudi.
ENVIRONMENT = {"hpu": {"PT_HPU_GPU_MIGRATION": "1"}}


@dataclass(frozen=True)
class Device:
    """``kind``: cuda, hpu or cpu. ``memory``: bytes, as nvidia-smi or hl-smi shows them; None if unlimited."""

    kind: str
    memory: int | None


def _mib(value: int) -> int:
    return value * 2**20


DEVICES = {
    "a100-40gb": Device("cuda", _mib(40960)),
    "a100-80gb": Device("cuda", _mib(81920)),
    "h100": Device("cuda", _mib(81559)),
    "h200": Device("cuda", _mib(143771)),
    "b200": Device("cuda", _mib(183359)),
    "gaudi2": Device("hpu", _mib(98304)),
    "gaudi3": Device("hpu", _mib(131072)),
    "cpu": Device("cpu", None),
}
