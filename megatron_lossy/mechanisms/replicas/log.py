"""Rows of the log of errors about replicas that differed, and about synchronisations (docs/corruption.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .flags import ReplicaFlags

if TYPE_CHECKING:
    import pyarrow

#: The possible actions on replicas whose gradients differ, by --replica-check.
_REPAIRS = {"none": (), "log": ("",), "repair": ("majority", "mean"), "abort": ()}
_SYNCS = ("equal", "majority", "mean", "first", "nothing")


def columns() -> list[pyarrow.Field]:
    """The columns that no error has."""
    import pyarrow as pa

    return [
        pa.field("repaired", pa.string()),
        pa.field("interval", pa.int32()),
        pa.field("divergence", pa.float64()),
    ]


def check_row(config: ReplicaFlags, row: Mapping[str, Any]) -> bool:
    """Whether ``row`` is about replicas. Raises ``ValueError`` if the flags cannot have led to it."""
    done = row["repaired"]
    if row["kind"] == "mismatch":
        if done not in _REPAIRS[config.replica_check]:
            raise ValueError(f"--replica-check {config.replica_check} repairs nothing by {done!r}")
        return True
    if row["kind"] != "sync":
        return False
    if not config.synchronises or done not in _SYNCS:
        raise ValueError(f"--param-sync-interval {config.param_sync_interval} synchronises nothing by {done!r}")
    if config.sync_rule[0] == "fixed" and row["interval"] != config.param_sync_interval:
        raise ValueError(f"--param-sync-interval was {config.param_sync_interval}, not {row['interval']}")
    return True
