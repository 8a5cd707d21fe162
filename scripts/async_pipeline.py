"""The table of docs/async_pipeline.md: how large a step gradients of old weights leave stable, in closed form."""

from __future__ import annotations

from megatron_lossy.theory import delayed_step_bound

STAGES = (1, 2, 3, 4, 8, 16)
MOMENTA = (0.9, 0.99)


def table() -> str:
    """The Markdown table."""
    headings = ["stages", "no momentum"]
    headings += [f"{kind}, {momentum:g}" for momentum in MOMENTA for kind in ("heavy ball", "looking ahead")]
    lines = ["| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]
    for stages in STAGES:
        cells = [delayed_step_bound(stages - 1)]
        for momentum in MOMENTA:
            cells += [delayed_step_bound(stages - 1, momentum, nesterov) / (1 - momentum) for nesterov in (False, True)]
        lines.append("| " + " | ".join([str(stages), *(f"{cell:.3g}" for cell in cells)]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
