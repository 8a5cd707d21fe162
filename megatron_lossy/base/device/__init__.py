"""The device that this process trains on, and its preparation before Megatron uses it.

Megatron is written for CUDA. On Gaudi, ``habana_frameworks.torch`` with ``PT_HPU_GPU_MIGRATION=1`` redirects it; on a
machine without an accelerator the patches of :mod:`.cpu` (and :mod:`.cpu_training` for ``megatron.training``) do.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import refuse
from ..ledger import Ledger
from .attempt import with_attempt_store

IMPORT = Ledger("imports of megatron.core on CPU")
CORE = Ledger("megatron.core on CPU")
TRAINING = Ledger("megatron.training on CPU")
OPTIMIZER = Ledger("megatron.core with torch's Adam")

# torch 2.13 renamed these, and its old names give warnings.
#: ``(output, input, op=, group=, async_op=)``
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: ``(output, input, group=, async_op=)``
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "hpu": "hccl"}
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}
_device_type: str | None = None


def device_type() -> str:
    """Return the accelerator of this machine, "hpu", "cuda" or "cpu"; or the device that :func:`prepare` was asked for.

    It is found once per process, because the CPU patches change torch's answers about CUDA.
    """
    global _device_type
    if _device_type is None:
        _device_type = _found_device()
    return _device_type


def _found_device() -> str:
    if importlib.util.find_spec("habana_frameworks") is not None:
        import habana_frameworks.torch  # noqa: F401  (registers torch.hpu)

        if torch.hpu.is_available():
            return "hpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def backend() -> str:
    """Return the ``torch.distributed`` backend of :func:`device_type`: "hccl", "nccl" or "gloo"."""
    return _BACKENDS[device_type()]


def current_device() -> torch.device:
    """Return the device that this process computes on."""
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, getattr(torch, kind).current_device())


def ranks_share_devices() -> bool:
    """Return whether NCCL is asked to let several ranks compute on one device, which it can from 2.31 on."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def take_device() -> torch.device:
    """Make this rank compute on the device that its node numbers as ``LOCAL_RANK``; call it before any process group.

    Without a launcher it stays with the current device. Ranks that may share a device take the devices in turns. Raise
    :class:`UsageError` if there is no such device. It also raises if every rank sees one device of its own: such ranks
    cannot be distinguished from ranks that would share a device.
    """
    kind = device_type()
    if kind == "cpu":
        return current_device()
    if kind == "hpu":
        # Registers the backend, and binds this process to the module of its LOCAL_RANK.
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    if "LOCAL_RANK" not in os.environ:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            why = "the launcher must say which device of its node a rank computes on"
            raise refuse("LOCAL_RANK", "is not set", why)
        return current_device()
    number, accelerator = int(os.environ["LOCAL_RANK"]), getattr(torch, kind)
    count = accelerator.device_count()
    if ranks_share_devices():
        number %= count
    if number >= count:
        allowed = f"this rank sees {count} {kind} device{'s'[: count != 1]}, numbered from 0; "
        allowed += f"start at most --nproc-per-node {count}, and let each rank see all devices of its node "
        raise refuse("LOCAL_RANK", number, f"{allowed}({_VISIBLE[kind]}; in Slurm --gpus-per-node)")
    accelerator.set_device(number)
    return torch.device(kind, number)


def init_process_group(name: str | None = None, **options: Any) -> None:
    """Call ``torch.distributed.init_process_group`` for the device and the backend of this rank, or ``name``.

    See :func:`take_device`. As Megatron's, the group is not bound to the device: torch would connect each of Megatron's twenty
    groups at once, most of which are never used. On an H200 that took about 6 GiB a rank.
    """
    take_device()
    # That is the device of this rank.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    torch.distributed.init_process_group(name or backend(), **with_attempt_store(options))


def prepare_import() -> None:
    """Prepare the first import of Megatron; call it before that. It may be called again.

    On CPU functions of Megatron under ``torch.compile`` stay as they are. HabanaAI's Megatron becomes importable
    without Intel's Transformer Engine: its core imports a function for fp8 parameters, and its ``megatron.training`` a norm,
    that only this package has. Stand-ins take their place, and raise an error when they are called. Nothing else imports them.
    """
    if not IMPORT.installed and (_device_type or _found_device()) == "cpu":
        from .cpu import import_patches

        IMPORT.install(import_patches())
    if importlib.util.find_spec("intel_transformer_engine") is not None:
        return
    for module, name in (
        ("intel_transformer_engine.cpp_extensions.cast", "cast_to_fp8"),
        ("megatron.core.transformer.custom_layers.intel_transformer_engine", "IntelTENorm"),
    ):
        # Just the leaf, so that importing the packages above it fails as before.
        leaf = types.ModuleType(module)
        setattr(leaf, name, _without_intel_transformer_engine)
        sys.modules.setdefault(module, leaf)


def _without_intel_transformer_engine(*_: object, **__: object) -> None:
    raise RuntimeError("this needs intel_transformer_engine, which is not installed")


def prepare(megatron_training: bool = False, cpu: bool = False) -> str:
    """Make Megatron usable on this machine's device and return :func:`device_type`; may be called again.

    Call it once the Megatron to train with is first on ``sys.path``. On CPU it imports ``megatron.core``, and with
    ``megatron_training`` also ``megatron.training``, which only a checkout of Megatron-LM has. ``cpu`` asks for the CPU
    even if there is an accelerator. With an accelerator nothing is patched, but for checkpoints of torch's Adam on CUDA.
    Raise :class:`UsageError` if this version of Megatron lacks a target of a patch, ``RuntimeError`` if another device
    is in use already.
    """
    global _device_type
    prepare_import()
    if cpu:
        if _device_type not in (None, "cpu"):
            raise RuntimeError(f"cannot switch to the CPU: this process already uses {_device_type}")
        _device_type = "cpu"
    if device_type() != "hpu" and not OPTIMIZER.installed:
        from .optimizer import patches

        OPTIMIZER.install(patches())
    if device_type() != "cpu":
        return device_type()
    if not CORE.installed:
        from .cpu import patches

        CORE.install(patches())
    if megatron_training and not TRAINING.installed:
        from .cpu_training import patches

        TRAINING.install(patches())
    return device_type()
