"""What the fork server of :mod:`tests.ranks` imports once for all ranks."""

import gc
import warnings

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401
import torch.distributed  # noqa: F401

from megatron_lossy import device

torch.set_num_threads(1)
device.prepare_import()

# Nobody captures what the server prints.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.distributed  # noqa: F401
    import megatron.core.models.gpt  # noqa: F401
    import megatron.core.optimizer  # noqa: F401

    import megatron_lossy.device.cpu  # noqa: F401
    import megatron_lossy.device.cpu_training  # noqa: F401
    import megatron_lossy.hooks  # noqa: F401
    import megatron_lossy.virtual  # noqa: F401
    import tests.contract  # noqa: F401
    import tests.trainer  # noqa: F401

    try:
        import megatron_lossy.train.loop  # noqa: F401
    except ImportError:
        pass  # what the training program needs of Megatron is more than what the hooks do

# Otherwise the first collection in a rank visits, and so copies, everything that was imported here.
gc.collect()
gc.freeze()
