"""Our changes to Megatron: patches of its functions, and the run behind them.

Call ``install(LossyConfig(p_grad=0.1, p_param=0.1))`` before DDP wraps the model, then build and train with
megatron-core as always.
"""

from __future__ import annotations

from ..config import LossyConfig
from .megatron_core import install
from .runtime import Lossy
from .versions import check_version
