"""Flags of the asynchronous pipeline: stages that update without waiting for each other (docs/async_pipeline.md)."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.errors import refuse
from ...base.flags import flag, refuse_unused
from ...base.section import Flags


@dataclass(frozen=True)
class AsyncPipelineFlags(Flags):
    """Flags of the asynchronous pipeline. Raises :class:`UsageError` for a value not allowed."""

    async_pipeline: bool = flag(
        False,
        "pipeline stages without a flush: each updates after every global batch, with the gradient of weights that are as "
        "many updates old as there are stages after it (docs/async_pipeline.md)",
        group="asynchronous pipeline",
        basic=True,
    )
    virtual_stages: int | None = flag(
        None,
        "with --virtual-workers and --async-pipeline: compute as this many pipeline stages would, in one process",
        metavar="P",
    )

    def changes(self) -> bool:
        return self.async_pipeline

    def holds_samples(self) -> bool:
        """Return whether samples are under way between iterations, if there are several pipeline stages."""
        return self.async_pipeline

    def notes(self) -> list[str]:
        if not self.async_pipeline:
            return []
        stages = "" if self.virtual_stages is None else f" of {self.virtual_stages} virtual stages"
        return [f"asynchronous pipeline{stages}"]

    def check(self) -> None:
        if not self.async_pipeline:
            refuse_unused(self, "virtual_stages", "needs --async-pipeline")
        elif self.virtual_stages is not None and self.virtual_stages < 1:
            raise refuse("--virtual-stages", self.virtual_stages, "must be at least 1")
