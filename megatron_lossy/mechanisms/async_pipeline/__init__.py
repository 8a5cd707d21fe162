"""The asynchronous pipeline: stages that update without a flush (AsyncMesh, section 3; docs/async_pipeline.md)."""
