"""The parts that mechanisms have in runs of virtual workers, and what owners send there. No mechanism names its twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...base.registry import MECHANISMS
from .sending import Sending, seen

if TYPE_CHECKING:
    from ...transport import LossyGroup


def attach(run: Any) -> None:
    """Attach mechanisms to ``run``, of virtual workers."""
    if run.config.loses_at_boundaries:
        from ...mechanisms.boundaries.part import attach_virtual

        attach_virtual(run)
    if (run.config.virtual_stages or 1) > 1:
        from ..async_pipeline.virtual import Stages

        run.add_part(Stages(run.config.virtual_stages))
    MECHANISMS.attach(run)


def sending_of(groups: Sequence[LossyGroup], buckets: Sequence[Any], optimizers: Callable[[], list[Any]]) -> Sending:
    """Return the values that the owners of a stream send.

    ``groups``: one for every worker. ``buckets``: Megatron's. ``optimizers``: returns Megatron's, once they exist.
    """
    from ...mechanisms.lead.compensated import Compensated

    if groups[0].params and isinstance(groups[0].params[0], Compensated):
        from .leads import Leads

        return Leads(groups, buckets, optimizers)
    return Sending([seen(groups[0], bucket.param_data) for bucket in buckets], len(groups))
