"""Lossy reduce-scatter and all-gather over a torch process group, with or without Megatron."""

from .group import BucketSpec, LossyGroup, find_nodes
from .ops import LossyWork, lossy_all_gather, lossy_reduce_scatter

__all__ = ["BucketSpec", "LossyGroup", "LossyWork", "find_nodes", "lossy_all_gather", "lossy_reduce_scatter"]
