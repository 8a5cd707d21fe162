"""Imports that the fork server of :mod:`tests.ranks` makes once for all ranks."""

import contextlib
import gc
import warnings

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo  # each optimizer of torch does
import torch.distributed

from megatron_lossy.base import device

torch.set_num_threads(1)
device.prepare_import()

# Nobody captures what the server prints.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer

    import megatron_lossy.base.device.cpu
    import megatron_lossy.base.device.cpu_training
    import megatron_lossy.hooks
    import megatron_lossy.lab.delivery_log.verify
    import megatron_lossy.lab.report
    import megatron_lossy.lab.virtual
    import megatron_lossy.mechanisms.replicas.full_replicas
    import megatron_lossy.mechanisms.replicas.ranks
    import megatron_lossy.transport.udp
    import tests.contract
    import tests.trainer  # noqa: F401
    from megatron_lossy.config import LossyConfig

    # The training program needs more of Megatron than the hooks do.
    with contextlib.suppress(ImportError):
        import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401  when it saves

        import megatron_lossy.lab.train.loop  # noqa: F401

# At the first row of a delivery log, and with pandas half a second.
with contextlib.suppress(ImportError):
    import pandas  # noqa: F401
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401

LossyConfig()  # imports what its flags can name

# Otherwise the first collection in a rank visits, and so copies, everything that was imported here.
gc.collect()
gc.freeze()
