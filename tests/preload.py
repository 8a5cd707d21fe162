"""What the fork server of :mod:`tests.ranks` imports once for all ranks."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401
import torch.distributed  # noqa: F401

from megatron_lossy import device

torch.set_num_threads(1)
device.prepare_import()

import megatron.core.distributed  # noqa: E402, F401
import megatron.core.models.gpt  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401

import megatron_lossy.device.cpu  # noqa: E402, F401
import megatron_lossy.device.cpu_training  # noqa: E402, F401
import megatron_lossy.hooks  # noqa: E402, F401
import megatron_lossy.virtual  # noqa: E402, F401
import tests.contract  # noqa: E402, F401
import tests.trainer  # noqa: E402, F401

try:
    import megatron_lossy.train.loop  # noqa: F401
except ImportError:
    pass  # what the training program needs of Megatron is more than what the hooks do

# Otherwise the first collection in a rank visits, and so copies, everything that was imported here.
gc.collect()
gc.freeze()
