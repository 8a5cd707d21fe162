"""SMART's section 4.2 with the package's own rules: an LSTM language model that loses gradients, with and without feedback.

    python scripts/lstm_language_model.py --out DIR
    python scripts/lstm_language_model.py --config configs/lstm/wikitext2.yaml --out DIR

The first, `--scale small`, trains on the source of Python's standard library, in bytes, for minutes on a CPU. The second is
the paper's protocol, for a GPU. Writes lstm.md, its tables, lstm.csv (every run) and lstm.png to DIR. Runs are kept in --cells by all
that makes them what they are: interrupted, the command goes on with the next one when it is given again.
docs/smart.md says what came of it.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from lstm_report import Results, draw, origin, tables, values
from lstm_training import ARMS, LOSSLESS, SCALES, Run, Text, check_text, read_text, train

from megatron_lossy.base.errors import ArgumentParser, UsageError, refuse, usage_errors
from megatron_lossy.base.files import check_folder, replace_file, write_text, writing
from megatron_lossy.config.settings import read_yaml
from megatron_lossy.config.shipped import find_config
from megatron_lossy.lab.data import build_tokenizer

PROGRAM = "scripts/lstm_language_model.py"


def parser() -> ArgumentParser:
    """The command line."""
    result = ArgumentParser(PROGRAM, description="An LSTM language model that loses gradients (docs/smart.md).")
    result.add_argument("--config", metavar="FILE.yaml", help="defaults of all flags below; the command line wins")
    result.add_argument("--out", required=True, metavar="DIR", help="for table, values and figure")
    result.add_argument(
        "--cells", default="runs/lstm", metavar="DIR", help="what is there is not run again (%(default)s)"
    )
    result.add_argument("--overwrite", action="store_true", help="replace results that are in --out")
    result.add_argument("--scale", choices=SCALES, default="small", help="the size of a training (%(default)s)")
    result.add_argument("--text", nargs="+", metavar="FILE", help="default: the source of Python's standard library")
    result.add_argument("--valid-text", nargs="+", metavar="FILE", help="default: a twentieth of --text")
    result.add_argument("--tokenizer", default="byte", metavar="NAME", help="byte, or hf:NAME_OR_FOLDER (%(default)s)")
    result.add_argument("--rates", type=float, nargs="+", default=[0.005, 0.01, 0.02, 0.05], metavar="P")
    result.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="SEED", help="of weights and data")
    result.add_argument("--loss-seeds", type=int, nargs="+", default=[1], metavar="SEED", help="with each of --seeds")
    result.add_argument(
        "--burst", type=float, default=0, metavar="N", help="mean packets lost in a row; 0: independent"
    )
    result.add_argument("--fraction", type=float, default=0.01, metavar="K", help="of high priority (%(default)s)")
    result.add_argument("--epochs", type=int, metavar="N", help="default that of the scale")
    result.add_argument("--epoch-tokens", type=int, metavar="N", help="default that of the scale")
    result.add_argument("--packet-bytes", type=int, metavar="N", help="default that of the scale")
    result.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (%(default)s)")
    return result


def read_arguments(arguments: Sequence[str]) -> Namespace:
    """``arguments`` over the ``--config`` file that they name. Raises :class:`UsageError`."""
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    file = first.parse_known_args(arguments)[0].config
    given: list[str] = []
    for key, value in read_yaml("--config", find_config(file)).items() if file is not None else ():
        given += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    if given:
        try:
            parser().parse_args([*given, "--out", "."])
        except UsageError as error:
            raise UsageError(f"--config {file}: {error}") from None
    return parser().parse_args([*given, *arguments])


def check(flags: Namespace) -> None:
    """Raise :class:`UsageError` for what can be seen in the flags alone."""
    check_folder("--out", flags.out)
    check_folder("--cells", flags.cells)
    if Path(flags.out, "lstm.csv").exists() and not flags.overwrite:
        raise refuse("--out", flags.out, "holds results already; --overwrite replaces them")
    for rate in flags.rates:
        if not 0 < rate < 1:
            raise refuse("--rates", rate, "must be above 0 and below 1")
    for name in ("rates", "seeds", "loss_seeds"):
        if len(set(getattr(flags, name))) < len(getattr(flags, name)):
            raise refuse(f"--{name.replace('_', '-')}", " ".join(map(str, getattr(flags, name))), "must differ")
    for name, least in {"epochs": 1, "epoch_tokens": 1, "packet_bytes": 4}.items():
        if getattr(flags, name) is not None and getattr(flags, name) < least:
            raise refuse(f"--{name.replace('_', '-')}", getattr(flags, name), f"must be at least {least}")
    if flags.burst and flags.burst < 1:
        raise refuse("--burst", flags.burst, "must be 0 or at least 1")
    if flags.device not in ("cpu", "cuda") or (flags.device == "cuda" and not torch.cuda.is_available()):
        raise refuse("--device", flags.device, "must be cpu, or cuda where there is one")


def plan(flags: Namespace, digest: str) -> list[Run]:
    """All runs, seed by seed. Raises :class:`UsageError`."""
    given = {name: getattr(flags, name) for name in ("epochs", "epoch_tokens", "packet_bytes")}
    scale = replace(SCALES[flags.scale], **{name: value for name, value in given.items() if value is not None})
    rest = {"scale": scale, "text": digest, "device": flags.device}
    runs = []
    for seed in flags.seeds:
        runs.append(Run(LOSSLESS, 0.0, seed, 0, 0.0, 0.0, **rest))
        runs += [
            Run(arm, rate, seed, loss_seed, flags.burst, flags.fraction, **rest)
            for rate in flags.rates
            for loss_seed in flags.loss_seeds
            for arm in ARMS
        ]
    for run in runs:
        _ = run.loss  # which refuses what the flags of a loss may not be
    return runs


class Progress:
    """A line on stderr: which run, how far it is, how long the rest will take."""

    def __init__(self, total: int) -> None:
        self._total, self._begun, self._shown = total, time.monotonic(), 0.0
        self._done = self._trained = 0

    def finished(self, trained: bool) -> None:
        """A run is over, or was there already."""
        self._done += 1
        self._trained += trained
        if self._done == self._total and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def ticker(self, run: Run) -> Callable[[int, int], None]:
        """What says after each step of ``run`` how far it is."""
        what = f"run {self._done + 1} of {self._total} ({run.arm}, {100 * run.rate:g} %, seed {run.seed})"

        def tick(step: int, steps: int) -> None:
            now, part = time.monotonic(), step / steps
            if now - self._shown < (0.5 if sys.stderr.isatty() else 30):
                return
            self._shown = now
            left = (now - self._begun) / (self._trained + part) * (self._total - self._done - part)
            text = f"{what}: step {step} of {steps}, about {left / 60:.0f} min left"
            shown, end = (f"\r{text}\x1b[K", "") if sys.stderr.isatty() else (text, "\n")
            print(shown, end=end, file=sys.stderr, flush=True)

        return tick


def run_all(runs: Sequence[Run], folder: Path, text: Text) -> Results:
    """Train what is not in ``folder`` yet. Raises :class:`UsageError`."""
    progress, results = Progress(len(runs)), {}
    with writing("--cells", folder):
        folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        file = folder / f"{run.name}.json"
        there = file.exists()
        if there:
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise refuse(
                    "--cells", file, f"cannot be read ({error}); without it the run is trained again"
                ) from None
        else:
            found = train(run, text, progress.ticker(run))
            write_text(file, json.dumps(found) + "\n")
        progress.finished(not there)
        results[run.arm, run.rate, run.seed, run.loss_seed] = found
    return results


def main(arguments: Sequence[str]) -> None:
    """Train, print, write. Raises :class:`UsageError`."""
    flags = read_arguments(arguments)
    check(flags)
    text = read_text(flags.text, flags.valid_text, build_tokenizer(flags.tokenizer))
    runs = plan(flags, text.digest)
    check_text(runs[0].scale, text)
    results = run_all(runs, Path(flags.cells), text)
    shown = tables(results, flags.rates, origin(results))
    print("\n\n".join(table.text() for table in shown.values()))
    out, command = Path(flags.out), shlex.join(["python", PROGRAM, *arguments])
    title = f"# An LSTM that loses gradients, {flags.scale} scale"
    body = "\n".join(f"## {name.capitalize()}\n\n{table.markdown()}" for name, table in shown.items())
    with writing("--out", out):
        out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "lstm.png", lambda aside: draw(results, flags.rates, aside))
    write_text(out / "lstm.md", f"{title}\n\n`{command}`: {runs[0].scale}.\n\n{body}")
    write_text(out / "lstm.csv", values(results))
    print(f"wrote {out}/lstm.csv, lstm.png and lstm.md", file=sys.stderr)


if __name__ == "__main__":
    with usage_errors(PROGRAM):
        main(sys.argv[1:])
