"""Notes about flags of islands that are allowed, but rarely wanted."""

from __future__ import annotations

from .flags import IslandFlags

#: A moving average of an element settles in this many exchanges.
_SETTLES = 10


def advice(config: IslandFlags, steps: int | None) -> list[str]:
    """Lines about flags that are allowed but rarely wanted, for a run of ``steps`` iterations, if known."""
    if not config.averages or config.sync_method != "parameters":
        return []
    notes = []
    if config.overlap and config.correction != "smith":
        smaller = 1 / (config.rounds_under_way + 1)
        notes.append(
            f"{under_way(config)}; with --sync-fraction of at most {smaller:.3g} there is none, and --delay-correction smith "
            "knows of them"
        )
    visits = None if steps is None else steps // (config.parts * config.sync_interval)
    if config.correction == "ema" and visits is not None and visits < _SETTLES:
        notes.append(
            f"--delay-correction ema: an element is exchanged {visits} times in this run; its average never settles"
        )
    return notes


def under_way(config: IslandFlags) -> str:
    """Exchanges of an element that are under way at once, in words."""
    if config.sync_subset == "bernoulli":
        many, subset = (
            f"{config.mean_overlap:.3g} later exchanges of an element on average",
            " and --sync-subset bernoulli",
        )
    else:
        many = f"{config.overlap} later exchanges of an element"
        subset = " and --sync-subset partition" if config.sync_subset == "partition" else ""
    return f"{many} under way (--sync-delay {config.sync_delay}){subset}"
