"""The delivery log: its format, writer, reader and replay, and ``python -m megatron_lossy.delivery_log`` (docs/delivery_log.md)."""
