"""Tables of stability: steps along gradients of old weights, and averaging between islands.

The latter, by theory and with the real rules, takes a minute: as a program this writes benchmarks/results/averaging.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megatron_lossy.base.exchange import Stream
from megatron_lossy.base.files import write_text
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import theory
from megatron_lossy.mechanisms.islands.mean import InMemory
from megatron_lossy.mechanisms.islands.rounds import Rounds
from megatron_lossy.mechanisms.islands.rules import critical_gain, stability_bound
from megatron_lossy.mechanisms.islands.vector import Segment, Subset, Vector

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
    """Return the table of docs/async_pipeline.md: the stable step with gradients of old weights, in closed form."""
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


# --- averaging between islands on vectors in memory, with the real subsets, rules and exchanges ---------------------------


STREAM = Stream("islands")
Act = Callable[[int, torch.Tensor], object]


def vectors_of(weights: torch.Tensor) -> list[Vector]:
    """Return each row of ``weights`` [islands, size] as the vector of an island."""
    return [Vector([Segment(0, row, None)], len(row), row.device) for row in weights]


def rounds_of(config: LossyConfig, weights: torch.Tensor, steps: int = 100_000) -> Rounds[InMemory]:
    """Return the exchanges between islands with ``weights`` [islands, size], which they change."""
    subset, crossing = Subset(config, weights.shape[1], 1, STREAM), InMemory(config, STREAM, None)
    return Rounds(config, subset, vectors_of(weights), crossing, steps, weights.device)


def simulate(
    config: LossyConfig, weights: torch.Tensor, steps: int, local: Act | None = None, after: Act | None = None
) -> torch.Tensor:
    """Return ``weights`` [islands, size] after ``steps`` iterations, in place.

    ``local`` makes an iteration of all islands, and ``after`` is called when they have exchanged. Both get the number
    of the iteration and the weights.
    """
    rounds = rounds_of(config, weights)
    for step in range(steps):
        if local is not None:
            local(step, weights)
        rounds.after_iteration(step)
        if after is not None:
            after(step, weights)
    return weights


def spread(weights: torch.Tensor) -> torch.Tensor:
    """Return the deviations [islands, size] from the mean over islands."""
    return weights - weights.mean(dim=0)


def growth_per_iteration(config: LossyConfig, steps: int = 800, size: int = 400) -> float:
    """Return the factor on deviations per iteration without local noise, over the second half of ``steps``."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(config.islands, size, generator=random)
    rounds = rounds_of(config, weights)
    if config.sync_method == "parameters" and config.correction == "ema":
        # Without this the first exchange would remove the deviations, which are no progress.
        rounds.rule.load_state_dict({"progress": spread(weights)})
    squares = []
    for step in range(steps):
        rounds.after_iteration(step)
        squares.append(spread(weights).double().square().sum().item())
    quarter = steps // 4
    early, late = max(squares[quarter : 2 * quarter]), max(squares[3 * quarter :])
    return float((late / early) ** (0.25 / quarter))


def deviation(config: LossyConfig, steps: int = 1200, size: int = 400) -> float:
    """Return the squared distance of islands to their mean, over the second half of ``steps``, under white local steps.

    It is relative to the distance that one iteration of such steps makes.
    """
    random = torch.Generator().manual_seed(0)
    squares: list[float] = []

    def walk(step: int, weights: torch.Tensor) -> None:
        weights += torch.randn(weights.shape, generator=random)

    def look(step: int, weights: torch.Tensor) -> None:
        squares.append(spread(weights).square().mean().item())

    simulate(config, torch.zeros(config.islands, size), steps, walk, look)
    late = squares[steps // 2 :]
    return sum(late) / len(late) / (1 - 1 / config.islands)


def speed(config: LossyConfig, steps: int = 1200, size: int = 400) -> float:
    """Return the share of a constant drift that remains, over the second half of ``steps``."""
    means: list[float] = []

    def drift(step: int, weights: torch.Tensor) -> None:
        weights += 1.0

    simulate(
        config, torch.zeros(config.islands, size), steps, drift, lambda _, weights: means.append(weights.mean().item())
    )
    half = steps // 2
    return (means[-1] - means[half - 1]) / (steps - half)


def row(fraction: float, delay: int, subset: str) -> list[str]:
    """Return one line of the table."""
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
        # Fast growth reaches float32's infinity within 800 iterations.
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
