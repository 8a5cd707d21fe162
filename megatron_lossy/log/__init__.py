"""The delivery log: its format and reader, and ``python -m megatron_lossy.log`` (docs/delivery_log.md)."""
