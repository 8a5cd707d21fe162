"""Events of full replicas: replicas that differed, and synchronisations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config import LossyConfig
from ...delivery_log.events import Kinds

if TYPE_CHECKING:
    import pyarrow


class ReplicaEvents(Kinds):
    """Replicas whose gradients differed, and synchronisations of their weights."""

    names = ("mismatch", "sync")

    @staticmethod
    def columns() -> list[pyarrow.Field]:
        import pyarrow as pa

        return [
            pa.field("action", pa.string()),
            pa.field("interval", pa.int32()),
            pa.field("divergence", pa.float64()),
        ]

    @staticmethod
    def happen(config: LossyConfig) -> bool:
        return config.needs_whole_optimizers()
