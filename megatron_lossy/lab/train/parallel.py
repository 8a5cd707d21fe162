"""Process groups: the world's, and Megatron's on top of it, for one run at a time.

Under torchrun the world comes from its environment; alone, a program is a world of one rank.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel

from ...base import device
from ...base.jobs import World
from .config import TrainConfig


@contextlib.contextmanager
def world(config: TrainConfig, launched: World | None = None) -> Iterator[None]:
    """A context with the default process group, destroyed at the end. An existing group is used and left as it is.

    ``launched``: if given, the group is this rank's job in it.
    """
    if torch.distributed.is_initialized():
        yield
        return
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if launched is not None:
        launched.open(device.init_process_group, timeout)
    elif "RANK" in os.environ:
        device.init_process_group(timeout=timeout)
    else:
        store = torch.distributed.HashStore()
        device.init_process_group(store=store, rank=0, world_size=1, timeout=timeout)
    yield
    # After an exception other ranks may be gone: the end of the process then destroys the group.
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def model_parallel(config: TrainConfig) -> Iterator[None]:
    """A context with Megatron's process groups and random states of one run. The next run finds none of them."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        num_distributed_optimizer_instances=config.num_distributed_optimizer_instances,
        order="tp-cp-ep-pp-dp" if config.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        distributed_timeout_minutes=config.distributed_timeout_minutes,
        create_gloo_process_groups=False,  # nobody here uses them
    )
    groups = list(parallel_state._global_process_group_list)
    _seed(config.seed)
    yield
    # destroy_model_parallel only forgets the groups. Their sockets would add up over the runs of a process.
    parallel_state.destroy_model_parallel()
    gc.collect()
    for group in groups:
        if group is not None and group in torch.distributed.distributed_c10d._world.pg_map:
            torch.distributed.destroy_process_group(group)


def _seed(seed: int) -> None:
    """Seed as Megatron-LM does: pipeline stages differ, data-parallel ranks agree."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
