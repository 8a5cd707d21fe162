"""Tables of stability: steps along gradients of old weights, and averaging between islands.

The latter, by theory and with the real rules, takes a minute: as a program this writes benchmarks/results/averaging.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_lossy.base.files import write_text
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import theory
from megatron_lossy.lab.theory.islands import deviation, growth_per_iteration, speed
from megatron_lossy.mechanisms.islands.rules import critical_gain, stability_bound

OUT = Path(__file__).parent.parent / "benchmarks" / "results" / "averaging.md"
GAIN = 0.5  # the paper's first coefficient
CASES = ((0.05, 0), (0.05, 10), (0.05, 50), (0.05, 100), (0.01, 50), (0.25, 10), (1, 10))
HEADINGS = (
    "share, delay, subset",
    "q",
    "largest stable gain",
    f"`ema` {GAIN:g}: deviation per iteration",
    "`mixing` auto: gain",
    "`mixing` auto: deviation per iteration",
    "speed of a drift, `none`, theory",
    "measured",
    "`mixing`, measured",
    "steps of noise that `mixing` auto leaves",
    "that `smith` leaves, theory",
    "measured",
)
STAGES = (1, 2, 3, 4, 8, 16)
MOMENTA = (0.9, 0.99)


def delayed_steps() -> str:
    """The table of docs/async_pipeline.md: how large a step gradients of old weights leave stable, in closed form."""
    headings = ["stages", "no momentum"]
    headings += [f"{kind}, {momentum:g}" for momentum in MOMENTA for kind in ("heavy ball", "looking ahead")]
    lines = ["| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]
    for stages in STAGES:
        cells = [theory.delayed_step_bound(stages - 1)]
        for momentum in MOMENTA:
            cells += [
                theory.delayed_step_bound(stages - 1, momentum, nesterov) / (1 - momentum) for nesterov in (False, True)
            ]
        lines.append("| " + " | ".join([str(stages), *(f"{cell:.3g}" for cell in cells)]) + " |")
    return "\n".join(lines) + "\n"


def row(fraction: float, delay: int, subset: str) -> list[str]:
    """One line of the table."""
    config = LossyConfig(
        islands=4, sync_method="parameters", sync_fraction=fraction, sync_delay=delay, sync_subset=subset
    )
    drawn = subset == "bernoulli"
    known = "-"
    if drawn or not config.overlap:
        known = f"{theory.speed_uncorrected(fraction, 1, delay, drawn):.3f}"
    ema = replace(config, delay_correction=f"ema:{GAIN},{GAIN},1000")
    uncorrected, smith = replace(config, delay_correction="none"), replace(config, delay_correction="smith")
    return [
        f"{100 * fraction:g} %, {delay}, {subset}",
        f"{fraction * delay:g} on average" if drawn else str(config.overlap),
        f"{stability_bound(config):.3f}",
        # What grows fast is float32's infinity after 800 iterations.
        f"{growth_per_iteration(ema, 400 if config.overlap > 5 else 800):.4f}" if delay else "-",
        f"{critical_gain(config):.3f}",
        f"{growth_per_iteration(config):.4f}" if config.overlap or (drawn and delay) else "-",
        known,
        f"{speed(uncorrected):.3f}",
        f"{speed(config):.3f}",
        f"{deviation(config):.1f}",
        f"{theory.deviation_predicted(fraction, 1, delay, drawn):.1f}",
        f"{deviation(smith):.1f}",
    ]


def main() -> None:
    """Measure averaging, and write."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| --- " * len(HEADINGS) + "|"]
    for fraction, delay in CASES:
        for subset in ("cyclic",) if fraction == 1 else ("cyclic", "bernoulli"):
            lines.append("| " + " | ".join(row(fraction, delay, subset)) + " |")
            print(lines[-1], flush=True)
    write_text(OUT, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
