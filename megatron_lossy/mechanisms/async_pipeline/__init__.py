"""The asynchronous pipeline: stages that update without a flush (AsyncMesh, section 3; docs/async_pipeline.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...run.mechanism import Mechanism, Part
from .flags import AsyncPipelineFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...config.refusal import Section


class AsyncPipeline(Mechanism):
    """The place of the asynchronous pipeline among the mechanisms."""

    name = "async-pipeline"
    Flags = AsyncPipelineFlags

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import ASYNC_PIPELINE

        return ASYNC_PIPELINE

    @classmethod
    def memory(cls, config: LossyConfig, device: Any) -> Sequence[Any]:
        from .memory import kept

        return kept(config, device)

    @classmethod
    def micro_batches_at_once(cls, config: LossyConfig, stage: int, stages: int, micro_batches: int) -> int | None:
        return (stages - 1 - stage) * micro_batches + 1 if config.async_pipeline else None

    @classmethod
    def workers(cls, run: Any) -> Any:
        if not run.config.async_pipeline:
            return None
        from ...hooks import Lossy
        from .workers import StageWorkers

        return StageWorkers if isinstance(run, Lossy) else None

    @classmethod
    def virtual_part(cls, config: LossyConfig) -> Part | None:
        if (config.virtual_stages or 1) == 1:
            return None
        from .virtual import Stages

        return Stages(config.virtual_stages)
