"""Loss for models of PyTorch's ``fully_shard`` (FSDP2) and ``DistributedDataParallel``, without Megatron (docs/pytorch.md).

    lossy = make_lossy(model, optimizer, LossyConfig(p_grad=0.1, p_param=0.1))

Nothing of torch is patched: FSDP2 and DDP have places for exchanges of others.
"""

from .base import LossyRun
from .make import make_lossy

__all__ = ["LossyRun", "make_lossy"]
