"""What a benchmark ran on."""

from megatron_lossy.device.hardware import processor

__all__ = ["processor"]
