"""What the fork server of :mod:`tests.ranks` imports once for all ranks."""

import torch  # noqa: F401
import torch.distributed  # noqa: F401

torch.set_num_threads(1)

import megatron.core.distributed  # noqa: E402, F401
import megatron.core.models.gpt  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401
