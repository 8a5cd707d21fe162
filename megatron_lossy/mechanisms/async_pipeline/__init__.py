"""The asynchronous pipeline: stages that update without a flush (AsyncMesh, section 3; docs/async_pipeline.md)."""

from __future__ import annotations

from ...run.mechanism import Mechanism
from .flags import AsyncPipelineFlags


class AsyncPipeline(Mechanism):
    """The place of the asynchronous pipeline among the mechanisms."""

    name = "async-pipeline"
    Flags = AsyncPipelineFlags
    table = "megatron_lossy.mechanisms.async_pipeline.refusals:ASYNC_PIPELINE"
