"""What the fork server of :mod:`tests.ranks` imports once for all ranks."""

import torch  # noqa: F401
import torch.distributed  # noqa: F401

from megatron_lossy import device

torch.set_num_threads(1)
device.prepare_import()

import megatron.core.distributed  # noqa: E402, F401
import megatron.core.models.gpt  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401
