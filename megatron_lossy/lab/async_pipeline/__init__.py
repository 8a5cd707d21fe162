"""The asynchronous pipeline in our trainer: stages that do not wait for each other (AsyncMesh; docs/async_pipeline.md)."""
