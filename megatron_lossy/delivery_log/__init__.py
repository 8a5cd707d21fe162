"""The delivery log: format, writer, reader and replay; a command (docs/delivery_log.md)."""
