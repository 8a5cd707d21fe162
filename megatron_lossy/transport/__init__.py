"""How an exchange crosses; lossy reduce-scatter and all-gather over a torch process group, with or without Megatron."""

from .group import BucketSpec, LossyGroup, find_nodes
from .network import Deliveries, Network, check_channels
from .ops import LossyWork, lossy_all_gather, lossy_reduce_scatter

__all__ = [
    "BucketSpec",
    "Deliveries",
    "LossyGroup",
    "LossyWork",
    "Network",
    "check_channels",
    "find_nodes",
    "lossy_all_gather",
    "lossy_reduce_scatter",
]
