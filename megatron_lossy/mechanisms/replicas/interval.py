"""The number of updates until replicas are averaged next.

PAFT, Algorithm 2, line 11 (``snr``), and a rule of ours (``divergence``). Divergence grows with the updates k since the
last synchronisation as k^a: a = 1/2 for SGD and Adam, up to 3/2 with momentum. The rule H <- k tau / r with r ~ k^a is
a map of slope 1 - a in logarithms, between -1/2 and 1/2: it settles. The slope of ``snr``, H ~ 1/r, is -a: a cycle from
a = 1 on.
"""

from __future__ import annotations

import math
from typing import Any

from .flags import LONGEST, ReplicaFlags

#: The ``divergence`` rule changes an interval at most by this factor at a time.
STEP = 4


class Interval:
    """The interval H, and the rule that changes it. ``current``: H now."""

    def __init__(self, config: ReplicaFlags) -> None:
        self._config = config
        self.current = config.param_sync_interval

    @property
    def needs_gradient(self) -> bool:
        """Whether the rule needs the length of local gradients."""
        return self._config.sync_rule[0] == "snr"

    def arrived(self, updates: int, divergence: float, mean: float, gradient: float | None) -> None:
        """Adapt H after a synchronisation that followed ``updates``.

        All other arguments are sums of squares over all parameters. ``divergence``: |mean - replica|^2 before it, the
        mean over replicas. ``mean``: of the mean replica. ``gradient``: of local gradients before their reduction, the
        mean over replicas.
        """
        if self._config.sync_rule[0] == "snr":
            assert gradient is not None
            self.current = self._within(snr(gradient, divergence))
        elif self._config.sync_rule[0] == "divergence":
            r = relative(divergence, mean)
            self.current = self._within(proportional(updates, r, self._config.sync_rule[1]))

    def _within(self, interval: float) -> int:
        return round(min(max(interval, 1), LONGEST))

    def state_dict(self) -> dict[str, Any]:
        """The state: H."""
        return {"current": self.current}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.current = state["current"]


def relative(divergence: float, mean: float) -> float:
    """r: the distance of replicas from their mean, relative to its length. Both arguments are sums of squares."""
    if divergence == 0:
        return 0.0
    r = math.sqrt(divergence / mean) if mean else math.inf
    return math.inf if math.isnan(r) else r


def snr(gradient: float, divergence: float) -> float:
    """The ratio of root mean squares; infinite for equal replicas. Arguments are sums of squares."""
    if divergence == 0:
        return math.inf
    ratio = gradient / divergence
    return 0.0 if math.isnan(ratio) else math.sqrt(ratio)


def proportional(updates: int, r: float, tolerance: float) -> float:
    """The interval for r = ``tolerance`` under proportional growth; at most a factor :data:`STEP` from ``updates``."""
    wanted = STEP * updates if r == 0 else updates * tolerance / r
    return min(max(wanted, math.ceil(updates / STEP)), STEP * updates)
