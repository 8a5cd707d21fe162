"""megatron-lossy: data-parallel training with Megatron over networks that lose data."""

__version__ = "0.1.0"
