"""The patches that megatron.training, and so Megatron-LM's own pretraining scripts, need on CPU beyond :mod:`.cpu`.

They are separate because megatron.training comes with a checkout of Megatron-LM. Wheels of megatron-core have it from
0.17 on.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import torch

from ..ledger import Ledger, Patch
from . import cpu
from .cpu import nothing, replaced


def _build_iterators(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        return original(*args, **kwargs)


def _async_loop(*args: Any, **kwargs: Any) -> None:
    """Run the new process that writes asynchronous checkpoints, and has no patch yet.

    Megatron goes on when it has copied the weights from the device. On CPU that copies nothing.
    """
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

    torch_patches = [patch for patch in patches() if patch.target.startswith("torch.cuda:")]
    Ledger("the writer of asynchronous checkpoints on CPU").install([*cpu.patches(), *torch_patches])
    writer = filesystem_async.FileSystemWriterAsync
    preload = writer.preload_tensors

    def preload_tensors(*given: Any, **named: Any) -> Any:
        return copy.deepcopy(preload(*given, **named))

    writer.preload_tensors = staticmethod(preload_tensors)
    async_utils.PersistentAsyncCaller.async_loop(*args, **kwargs)


def patches() -> list[Patch]:
    """Return every attribute that megatron.training needs replaced on a machine without an accelerator."""
    return [
        Patch(
            target="megatron.training.training:initialize_megatron",
            around=lambda original, *args, **kwargs: original(*args, **{"allow_no_cuda": True, **kwargs}),
            why="pretrain() asserts that CUDA is available",
        ),
        Patch(
            target="megatron.training.training:build_train_valid_test_data_iterators",
            around=_build_iterators,
            why="data loaders draw from the CPU's generator, which must reach dropout as the checkpoint left it",
        ),
        replaced("torch.cuda:device_count", lambda: 1, "without devices no parallel groups are initialised"),
        replaced(
            "torch.cuda:memory_stats",
            lambda device=None: collections.defaultdict(int),
            "logged to TensorBoard on request",
        ),
        replaced(
            "megatron.training.arguments:get_device_arch_version",
            lambda: 10,
            "GPUs before generation 10 need CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism",
            optional=True,
        ),
        *(
            replaced(
                f"megatron.training.{module}:is_real_cuda_device_available",
                lambda: True,
                "HabanaAI's asks for Gaudi's software where torch is not built for CUDA",
                optional=True,
            )
            for module in ("arguments", "initialize", "training")
        ),
        replaced(
            "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop",
            staticmethod(_async_loop),
            "the process of --use-persistent-ckpt-worker starts without these patches",
            optional=True,
        ),
        replaced("megatron.legacy.fused_kernels:load", nothing, "builds CUDA kernels with nvcc", optional=True),
    ]
