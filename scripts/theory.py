"""Drift, ages, lag and recovery rules: simulated with the real channels and rules, in a real run, and by closed form.

    python scripts/theory.py --out DIR

writes theory_DATE.md, .csv and .png to DIR and prints the tables. Formulas and what they mean: docs/theory.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import sys
import time
from pathlib import Path

import numpy as np

from megatron_lossy.base.device.environment import processor, versions
from megatron_lossy.base.errors import refuse, usage_errors
from megatron_lossy.base.files import replace_file, write_text
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import theory
from megatron_lossy.lab.theory import simulate
from megatron_lossy.lab.theory.picture import draw
from megatron_lossy.lab.theory.rows import STABILITY, Row, agreement, markdown, write_csv
from megatron_lossy.lab.theory.simulate import Measured

ROOT = Path(__file__).resolve().parent.parent
MOMENTUM, BURST, BURN_IN, BLOCKS = 0.9, 4.0, 100, 20
BURST_RATES, SETTLING_RATES, AGE_RATES = (0.1, 0.2, 0.4), (0.1, 0.4), (0.1, 0.4)
SETTLING_STEPS, SETTLING_RUNS = 16, 40
LAG_RATES, LAG_MOMENTA, LAG_RECEIVERS, LAG_RUNS = (0.1, 0.2, 0.3, 0.4), (0.9, 0.5), 2_000, 4
RECOVERY_RATES, RECOVERY_WORKERS = (0.1, 0.2, 0.4, 0.6), (2, 4, 8, 16, 64)
RULES = (
    ("renormalize", False),
    ("renormalize", True),
    ("renormalize-remote", False),
    ("previous", False),
    ("previous", True),
    ("zero", False),
    ("zero", True),
)
#: After so many steps of ``previous`` at p = 0.6 a sender was never heard with probability 1e-9.
PREVIOUS_BURN_IN = 40
REAL_RATES, REAL_COORDINATES, REAL_LAGS = (0.1, 0.4), 20_000, 24
REAL_FLAGS = (
    "--virtual-workers 8 --micro-batch-size 1 --global-batch-size 8 --lr-decay-style constant --eval-iters 0 "
    "--loss-unit packet --packet-bytes 1024"
)


class Ticker:
    """A line on stderr: what is being done, how much of it is done, and how long it has taken."""

    def __init__(self) -> None:
        self._started = self._shown = time.monotonic()

    def start(self, label: str, total: int) -> None:
        """``total`` ticks of ``label`` follow."""
        self._label, self._total, self._done = label, total, 0

    def tick(self) -> None:
        """One of them is done."""
        self._done += 1
        now = time.monotonic()
        if now - self._shown > 0.5 or self._done == self._total:
            self._shown = now
            text = f"[{now - self._started:4.0f} s] {self._label}: {self._done} of {self._total}"
            print(f"\r{text:<78}", end="\n" if self._done == self._total else "", file=sys.stderr, flush=True)


def drifts(workers: int, steps: int, rates: list[float], seed: int, ticker: Ticker) -> list[Row]:
    """Steady state: uncorrelated increments and momentum, independent losses and bursts."""
    walks = [simulate.random_walk(BURN_IN + steps, (workers, 4), phi, seed + k) for k, phi in enumerate((0, MOMENTUM))]
    increments, momentum = np.concatenate(walks, axis=2), theory.ar1(MOMENTUM, 2000)
    rows = []
    for burst, p in [(None, p) for p in rates] + [(BURST, p) for p in BURST_RATES]:
        config = LossyConfig(p_param=p, loss_seed=seed, **bursts_of(burst))
        name = "drift" if burst is None else f"drift, bursts of {burst:g}"
        ticker.start(f"{name}, p = {p}", len(increments))
        for quantity, formula, series in zip(
            ("between receivers", "to the owner"),
            (theory.drift_between, theory.drift_to_owner),
            simulate.drift(config, workers, increments, ticker.tick),
            strict=True,
        ):
            paper = float(theory.drift_paper(p)) if quantity == "between receivers" else None
            for part, chosen, gamma in (
                (name, slice(0, 4), (1.0,)),
                (f"{name}, momentum {MOMENTUM:g}", slice(4, 8), momentum),
            ):
                measured = Measured.over(series[BURN_IN:, chosen].mean(axis=1), BLOCKS)
                rows.append(Row(part, quantity, p, workers, p, measured, float(formula(p, gamma, burst=burst)), paper))
    return rows


def settling(workers: int, seed: int, ticker: Ticker) -> list[Row]:
    """Drift after t broadcasts of replicas that were equal."""
    rows = []
    for p in SETTLING_RATES:
        ticker.start(f"time to steady state, p = {p}", SETTLING_STEPS * SETTLING_RUNS)
        runs = []
        for run in range(SETTLING_RUNS):
            increments = simulate.random_walk(SETTLING_STEPS, (workers, 4), 0, seed + run)
            config = LossyConfig(p_param=p, loss_seed=seed + run)
            runs.append(simulate.drift(config, workers, increments, ticker.tick)[0].mean(axis=1))
        for t, values in enumerate(np.array(runs).T, start=1):
            formulas = float(theory.drift_between(p, step=t)), float(theory.drift_paper(p, step=t))
            measured = Measured.over(values)
            rows.append(Row("time to steady state", "between receivers", p, workers, t, measured, *formulas))
    return rows


def all_ages(workers: int, steps: int, seed: int, ticker: Ticker) -> list[Row]:
    """How old replicas are, and the oldest of many."""
    rows = []
    for burst, units, p in [(None, 1, p) for p in AGE_RATES] + [(BURST, 1, 0.1)] + [(None, 16, p) for p in AGE_RATES]:
        config = LossyConfig(p_param=p, loss_seed=seed, **bursts_of(burst))
        ticker.start(f"ages, p = {p}, {units} units a link{', bursts' if burst else ''}", BURN_IN + steps)
        counts, of_worker, of_all = simulate.ages(config, workers, steps, units, BURN_IN, ticker.tick)
        name = "" if burst is None else f", bursts of {burst:g}"
        if units == 1:
            tail = theory.age_exceeds(p, np.arange(40), burst)
            exactly = -np.diff(tail, prepend=1.0)
            for age in np.flatnonzero(counts.sum(axis=0) >= 20 * BLOCKS)[:12]:
                measured = Measured.over(counts[:, age] / counts[0].sum(), BLOCKS)
                rows.append(Row(f"age{name}", "share of links", p, workers, int(age), measured, float(exactly[age])))
        for links, values in (((workers - 1) * units, of_worker), (workers * (workers - 1) * units, of_all)):
            measured, formula = Measured.over(values, BLOCKS), float(theory.age_max(p, links, burst))
            rows.append(Row(f"largest age{name}", "mean over steps", p, workers, links, measured, formula))
    return rows


def lags(workers: int, steps: int, seed: int, ticker: Ticker) -> list[Row]:
    """How late the mean replica is, plain and compensated, and the learning rates that this leaves stable."""
    rows = []
    for burst, p in itertools.product((None, BURST), LAG_RATES):
        config = LossyConfig(p_param=p, loss_seed=seed, **bursts_of(burst))
        lag = theory.Lag.of(p, burst)
        spread = float(theory.age_variance(p, burst))
        for name, sent in (("plain", theory.Lead()), ("compensated", lag.lead)):
            part = f"lag, {name}" + ("" if burst is None else f", bursts of {burst:g}")
            ticker.start(f"{part}, p = {p}", BURN_IN + steps)
            mean, square = simulate.lags(config, workers, steps, sent, BURN_IN, ticker.tick)
            late = theory.mean_lag(lag, sent)
            for quantity, values, formula in (
                ("updates", mean, late),
                ("mean square", square, spread + late**2),
            ):
                rows.append(Row(part, quantity, p, workers, p, Measured.over(values, BLOCKS), float(formula)))
    for beta1, p in itertools.product(LAG_MOMENTA, LAG_RATES):
        lag = theory.Lag.of(p)
        ticker.start(f"largest stable learning rate, beta1 = {beta1}, p = {p}", 2 * LAG_RUNS)
        for name, sent in (("plain", theory.Lead()), ("compensated", lag.lead)):
            limit, found = theory.stability_limit(beta1, lag, sent), []
            for k in range(LAG_RUNS):
                config = LossyConfig(p_param=p, loss_seed=seed + k)
                found.append(simulate.largest_stable(config, beta1, sent, LAG_RECEIVERS, limit))
                ticker.tick()
            part = f"{STABILITY}, beta1 {beta1:g}, {name}"
            rows.append(Row(part, "learning rate", p, LAG_RECEIVERS + 1, p, Measured.over(np.array(found)), limit))
    return rows


def bursts_of(burst: float | None) -> dict[str, tuple]:
    """Settings of losses in bursts of that mean length, or of independent ones."""
    return {} if burst is None else {"loss_model": (f"gilbert-elliott:{burst}",)}


def recovery(seed: int, ticker: Ticker) -> list[Row]:
    """Weights and variance of every rule; x is N."""
    rows = []
    seeds = itertools.count(seed)
    for rule, lossy_self in RULES:
        name = rule + (", lossy-self" if lossy_self else "")
        ticker.start(f"recovery: {name}", len(RECOVERY_WORKERS) * len(RECOVERY_RATES))
        burn_in = PREVIOUS_BURN_IN if rule == "previous" else 0
        for workers in RECOVERY_WORKERS:
            for p in RECOVERY_RATES:
                values = simulate.estimates(rule, p, workers, lossy_self, 12_800 // workers, 4, burn_in, next(seeds))
                measured, weights = simulate.one_step(values), theory.weights(rule, p, workers, lossy_self)
                variance = float(weights.noise + weights.total_variance)
                for quantity, result, formula in (
                    ("expectation", measured["total"], weights.total),
                    ("own weight x N", scaled(measured["own"], workers), workers * weights.own),
                    ("variance x N", scaled(measured["variance"], workers), workers * variance),
                ):
                    rows.append(Row(f"recovery: {name}", quantity, p, workers, workers, result, float(formula)))
                ticker.tick()
    return rows


def long_run(workers: int, seed: int, ticker: Ticker) -> list[Row]:
    """Variance that adds up over many steps: previous substitutes the same gradient again and again."""
    rules, rates = ("renormalize", "renormalize-remote", "previous", "zero"), RECOVERY_RATES[:-1]
    ticker.start("recovery: sums over many steps", len(rules) * len(rates))
    rows = []
    seeds = itertools.count(seed)
    for rule in rules:
        for p in rates:
            values = simulate.estimates(rule, p, workers, False, 400, 150, PREVIOUS_BURN_IN, next(seeds))
            measured = simulate.long_run(values, 20)
            weights = theory.weights(rule, p, workers)
            formula = weights.noise + weights.total_variance
            if rule == "previous":
                formula = (1 + (workers - 1) * theory.previous_long_run(p)) / workers**2
            part = f"sums over steps: {rule}"
            rows.append(Row(part, "variance x N", p, workers, p, scaled(measured, workers), float(workers * formula)))
            ticker.tick()
    return rows


def scaled(measured: Measured, factor: float) -> Measured:
    """``factor`` times it."""
    return Measured(factor * measured.mean, factor * measured.error)


def real_runs(iterations: int, ticker: Ticker) -> tuple[list[Row], list]:
    """The drift in training runs of configs/tiny/llama_1m.yaml, over what the increments of the same run predict."""
    from megatron_lossy.lab.train.process import quiet_imports

    quiet_imports()
    from megatron_lossy.lab.theory import real_run
    from megatron_lossy.lab.train.arguments import configurations, make_parser, read_arguments

    rows, runs = [], []
    for p in REAL_RATES:
        flags = f"--train-iters {iterations} --p-grad {p} --p-param {p} {REAL_FLAGS}"
        arguments = ["--config", str(ROOT / "configs" / "tiny" / "llama_1m.yaml"), *flags.split()]
        config, lossy_config = configurations(read_arguments(make_parser("scripts/theory.py", ""), arguments))
        ticker.start(f"real run, p = {p}", iterations)
        run = real_run.train(config, lossy_config, REAL_COORDINATES, ticker.tick)
        runs.append(run)
        for quantity, measured, formula in (
            ("between receivers", run.between, theory.drift_between),
            ("to the owner", run.to_owner, theory.drift_to_owner),
        ):
            result = real_run.predict(run, measured, formula, iterations // 2, REAL_LAGS)
            paper = float(theory.drift_paper(p)) if quantity == "between receivers" else None
            values = result.measured, result.predicted, paper, float(formula(p))
            rows.append(Row("real run", quantity, p, config.virtual_workers, p, *values))
    return rows, runs


def main() -> None:
    """Simulate, train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the results; never overwrites any")
    parser.add_argument("--workers", type=int, default=64, metavar="N", help="workers in simulations (default 64)")
    parser.add_argument("--steps", type=int, default=4000, metavar="N", help="steps of simulations (default 4000)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], metavar="P",
        help="loss rates of the table of drift",
    )  # fmt: skip
    parser.add_argument(
        "--real-iters", type=int, default=240, metavar="N",
        help="iterations of the two training runs; 0 leaves them out (default 240)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1234, metavar="SEED", help="of losses and of random walks")
    flags = parser.parse_args()
    with usage_errors("scripts/theory.py"):
        run(flags)


def run(flags: argparse.Namespace) -> None:
    """All parts for checked ``flags``. Raises :class:`UsageError`."""
    if flags.workers < 3:
        raise refuse("--workers", flags.workers, "must be at least 3: two receivers and an owner")
    if flags.steps < 10 * BLOCKS:
        raise refuse("--steps", flags.steps, f"must be at least {10 * BLOCKS}")
    for p in flags.rates:
        if not 0 < p < 1:
            raise refuse("--rates", p, "must be above 0 and below 1")
    if flags.real_iters and flags.real_iters < 4 * REAL_LAGS:
        raise refuse("--real-iters", flags.real_iters, f"must be 0, or at least {4 * REAL_LAGS}")
    started, today = time.monotonic(), datetime.date.today().isoformat()
    folder, stem = Path(flags.out), f"theory_{today}"
    for suffix in (".md", ".csv", ".png"):
        if (folder / (stem + suffix)).exists():
            raise refuse("--out", flags.out, f"has {stem}{suffix} already; choose another folder, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refuse("--out", flags.out, f"cannot be written: {error.strerror}") from None
    ticker = Ticker()
    rows = drifts(flags.workers, flags.steps, flags.rates, flags.seed, ticker)
    rows += settling(flags.workers, flags.seed, ticker)
    rows += all_ages(flags.workers, max(400, flags.steps // 4), flags.seed, ticker)
    rows += lags(flags.workers, max(400, flags.steps // 4), flags.seed, ticker)
    rows += recovery(flags.seed, ticker) + long_run(8, flags.seed, ticker)
    runs = []
    if flags.real_iters:
        real_rows, runs = real_runs(flags.real_iters, ticker)
        rows += real_rows
    minutes = (time.monotonic() - started) / 60
    command = shlex.join(["python", "scripts/theory.py", *sys.argv[1:]])
    version_list = ", ".join(f"{name} {version}" for name, version in versions().items())
    header = [
        f"# Theory, measured, {today}",
        "",
        f"`{command}`: {minutes:.1f} minutes on {processor()}. {version_list}. Seed {flags.seed}.",
        f"Numbers: [{stem}.csv]({stem}.csv). Formulas: `docs/theory.md`.",
        "",
        f"![Simulation, closed form and the paper's formula]({stem}.png)",
        "",
        agreement(rows),
    ]
    text = "\n".join(header) + "\n\n" + markdown(rows)
    print(text)
    replace_file(folder / f"{stem}.csv", lambda path: write_csv(rows, path))
    replace_file(folder / f"{stem}.png", lambda path: draw(rows, runs, path))
    write_text(folder / f"{stem}.md", text)
    print("wrote " + ", ".join(str(folder / (stem + suffix)) for suffix in (".md", ".csv", ".png")), file=sys.stderr)


if __name__ == "__main__":
    main()
