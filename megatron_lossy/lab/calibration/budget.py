"""Costs that a row may have beyond the unhooked step: ``budget.yaml``, a line a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

FILE = Path(__file__).with_name("budget.yaml")
#: End of the names of places in threads of their own, which the step does not wait for.
ASIDE = " (aside)"


@dataclass(frozen=True)
class Cost:
    """Per step, beyond the unhooked step, on the rank with most of it.

    ``kernels``: launches; ``to_device``, ``from_device``: bytes; ``synchronisations``, ``blocking``, ``pageable``: how often the
    host waits, copies with the host waiting, and copies asynchronously but not from page-locked memory, by place
    (``file:function``).
    """

    kernels: float = 0.0
    to_device: float = 0.0
    from_device: float = 0.0
    synchronisations: Mapping[str, float] = field(default_factory=dict)
    blocking: Mapping[str, float] = field(default_factory=dict)
    pageable: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """``rows``: what each may cost; ``losses``: the mean loss of its iterations; ``reasons``: of waits, by place."""

    rows: Mapping[str, Cost]
    losses: Mapping[str, float]
    reasons: Mapping[str, str]


def read(file: Path = FILE) -> Budget:
    """Return the committed budget."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    lines = content["rows"]
    costs = {name: Cost(**{k: v for k, v in line.items() if k != "loss"}) for name, line in lines.items()}
    return Budget(costs, {name: line["loss"] for name, line in lines.items()}, content["reasons"] or {})
