"""Transports of exchanges: lossy reduce-scatter and all-gather over a torch process group, with or without Megatron."""

from .base import Network, Transfer, Wire
from .choice import BucketSpec, cut_buckets, settled, wire_for
from .group import LossyGroup
from .network import check_channels, check_network, find_nodes
from .ops import check_average, lossy_all_gather, lossy_reduce_scatter

__all__ = [
    "BucketSpec",
    "LossyGroup",
    "Network",
    "Transfer",
    "Wire",
    "check_average",
    "check_channels",
    "check_network",
    "cut_buckets",
    "find_nodes",
    "lossy_all_gather",
    "lossy_reduce_scatter",
    "settled",
    "wire_for",
]
