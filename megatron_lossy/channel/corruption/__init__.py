"""Errors in gradients after their reduction: which happen, and where. Pure: no process group, no megatron.

The models are those of *Identifying and Mitigating Errors in Gradient Aggregation of Distributed Data Parallel
Training* (PAFT), Definition 2.1 and section 5; flipped bits are ours (docs/corruption.md).
"""

from .base import Corruption, Event, make_corruption
