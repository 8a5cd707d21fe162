"""The asynchronous pipeline: stages that update without a flush (AsyncMesh, section 3; docs/async_pipeline.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...run.mechanism import Mechanism
from .flags import AsyncPipelineFlags

if TYPE_CHECKING:
    from ...config.refusal import Section


class AsyncPipeline(Mechanism):
    """The place of the asynchronous pipeline among the mechanisms."""

    name = "async-pipeline"
    Flags = AsyncPipelineFlags

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import ASYNC_PIPELINE

        return ASYNC_PIPELINE
