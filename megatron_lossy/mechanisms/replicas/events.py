"""Events of full replicas: replicas that differed, and synchronisations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...delivery_log.kinds import Kinds, Row

if TYPE_CHECKING:
    import pyarrow

#: The possible actions on replicas whose gradients differ, by --replica-check.
_REPAIRS = {"none": (), "log": ("",), "repair": ("majority", "mean"), "abort": ()}
_SYNCS = ("equal", "majority", "mean", "first", "nothing")


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

    def happen(self) -> bool:
        return self.config.needs_whole_optimizers()

    def check(self, iteration: int, rows: Sequence[Row]) -> None:
        config = self.config
        for row in rows:
            done = row["action"]
            if row["kind"] == "mismatch":
                if done not in _REPAIRS[config.replica_check]:
                    raise ValueError(f"--replica-check {config.replica_check} repairs nothing by {done!r}")
            elif not config.synchronises or done not in _SYNCS:
                raise ValueError(f"--param-sync-interval {config.param_sync_interval} synchronises nothing by {done!r}")
            elif config.sync_rule[0] == "fixed" and row["interval"] != config.param_sync_interval:
                raise ValueError(f"--param-sync-interval was {config.param_sync_interval}, not {row['interval']}")
