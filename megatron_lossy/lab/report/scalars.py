"""Recorded scalars by name: their units, their predictions, and the names that a user may ask for.

The names are those of docs/monitors.md and of the training records; runs of Megatron-LM may have more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...base.registry import MECHANISMS
from .runs import LOSS, WHOLE

PREDICTED = " predicted"
# The meaning of a scalar's value in tables: at the end of a run, and over all of it.
DEFINITION = (
    "of the last 10 % of a run's iterations (at least 10; the last record if there is none in them): the mean over "
    'records of what is finite; the largest where a name ends in "max", the smallest where it ends in "min"'
)
DEFINITION_WHOLE = "the median of the finite values of all records of a run"


@dataclass(frozen=True)
class Axis:
    """The axis for a scalar: its label, with the unit, and whether it is logarithmic."""

    label: str
    logarithmic: bool = False


_DRIFT_PAIRS = Axis("mean squared difference of two replicas (weight²)", True)
_DRIFT_OWNER = Axis("mean squared difference to the owner (weight²)", True)
AXES = {
    LOSS: Axis("language-model loss (nats per token)", True),
    "grad norm": Axis("gradient norm", True),
    "learning rate": Axis("learning rate"),
    "loss scale": Axis("loss scale", True),
    "consumed samples": Axis("samples consumed"),
    "skipped": Axis("skipped iterations of a record"),
    "seconds": Axis("seconds per iteration"),
    "loss rate grad": Axis("share of gradient units lost"),
    "loss rate param": Axis("share of parameter units lost"),
    "survivors mean": Axis("gradients that reach an owner, mean"),
    "survivors min": Axis("gradients that reach an owner, fewest"),
    "share without survivor": Axis("share of units that no gradient reached"),
    "stale age mean": Axis("age of stale units, mean (updates)"),
    "stale age max": Axis("age of stale units, largest (updates)"),
    "udp sent": Axis("datagrams sent"),
    "udp received": Axis("datagrams received"),
    "udp units lost": Axis("units lost by the network"),
    "udp late": Axis("datagrams that came too late"),
    "udp duplicate": Axis("datagrams that came twice"),
    "udp early dropped": Axis("datagrams that came too early to be kept"),
    "udp refused": Axis("datagrams of others, malformed, or not authentic"),
    "udp overflow": Axis("datagrams lost in receive buffers"),
    "udp too big": Axis("datagrams larger than the interface's MTU"),
    "udp send failed": Axis("datagrams that could not be sent"),
    "udp unreachable": Axis("ICMP errors"),
    "udp sent again": Axis("datagrams of high priority sent again"),
    "stream sent": Axis("units sent over streams"),
    "stream received": Axis("units received over streams"),
    "stream units lost": Axis("units that had not come at the deadline"),
    "stream arrived": Axis("share of units that arrived"),
    "stream late": Axis("units that came too late"),
    "stream late by": Axis("milliseconds that these were late by, mean"),
    "stream early dropped": Axis("units that came too early to be kept"),
    "stream sent bytes": Axis("bytes sent over streams"),
    "stream broken": Axis("connections that broke"),
    "stream refused": Axis("connections of others, malformed, or not authentic"),
    "gradient errors": Axis("errors in gradients of a record"),
    "error rms": Axis("standard deviation of the errors", True),
    "flipped bits": Axis("flipped bits of a record"),
    "drift pairs": _DRIFT_PAIRS,
    "drift owner": _DRIFT_OWNER,
    "drift over weight": Axis("distance of a replica from the owner over the length of the weights", True),
    "squared increment": Axis("mean squared change by an update (weight²)", True),
    "drift pairs predicted": _DRIFT_PAIRS,
    "drift owner predicted": _DRIFT_OWNER,
    "sharpness": Axis("largest eigenvalue of the preconditioned Hessian", True),
    "lr x sharpness": Axis("learning rate x sharpness", True),
    "lag x lr x sharpness": Axis("lag (updates) x learning rate x sharpness"),
    "largest lr x sharpness": Axis("largest stable learning rate x sharpness", True),
    "loss rate act": Axis("share of packets of activations lost"),
    "loss rate act-grad": Axis("share of packets of their gradients lost"),
    "zero share act": Axis("share of packets of activations that became zeros"),
    "zero share act-grad": Axis("share of packets of their gradients that became zeros"),
    "retransmitted share act": Axis("share of messages of activations sent again"),
    "retransmitted share act-grad": Axis("share of messages of their gradients sent again"),
    "gradient mismatches": Axis("buckets that differed, of a record"),
    "gradient repairs by majority": Axis("buckets repaired by majority, of a record"),
    "gradient repairs by mean": Axis("buckets repaired by their mean, of a record"),
    "param syncs": Axis("synchronisations of a record"),
    "param sync interval": Axis("updates between synchronisations", True),
    "replicas not finite": Axis("replicas that were not finite, most at a synchronisation"),
    "replica divergence": Axis("distance of replicas from their mean, over its length", True),
    "priority share": Axis("share of gradient units of high priority"),
    "recovered share": Axis("share of lost gradient units delivered all the same"),
    "residual share": Axis("share of gradient units lost for good"),
    "residual ratio": Axis("residual over gradients (sums of absolute values)"),
    "oldest residual": Axis("steps that a residual has waited, most"),
    "wire bytes": Axis("bytes sent, of gradients and parameters"),
    "wire rounding": Axis("error of codes over gradients (sums of squares)", True),
    **{name: Axis(*axis) for mechanism in MECHANISMS.all() for name, axis in mechanism.axes.items()},
}
"""The scalars that training with this package records. Those of drift need ``--drift-interval``, of sharpness its interval."""


def axis_of(name: str) -> Axis:
    """Return the axis of any scalar; a scalar that only Megatron-LM has is labelled by its name."""
    axis = AXES.get(plain := name.removesuffix(WHOLE), Axis(plain))
    return axis if plain == name else Axis(f"{axis.label}, median of the run", axis.logarithmic)


def needs_drift(name: str) -> bool:
    """Return whether only runs with ``--drift-interval`` record the scalar."""
    return name.startswith("drift ") or name.removesuffix(WHOLE) == "squared increment"


def needs_sharpness(name: str) -> bool:
    """Return whether only runs with ``--sharpness-interval`` record the scalar."""
    return name.removesuffix(WHOLE).endswith("sharpness")


def with_predictions(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return ``names`` in groups for one figure each: (X, X predicted) if both are asked for, else (X,)."""
    asked = set(names)
    return [
        (name, name + PREDICTED) if name + PREDICTED in asked else (name,)
        for name in names
        if not (name.endswith(PREDICTED) and name.removesuffix(PREDICTED) in asked)
    ]


def file_name(name: str) -> str:
    """Return a name as part of a file's name: letters, digits, dots and dashes; all else becomes one underscore."""
    return re.sub(r"[^\w.-]+", "_", name).strip("_")
