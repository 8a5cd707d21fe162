"""The page that ``scripts/mutants.py`` writes."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import os
import shlex
import subprocess
import sys

from mutants_draw import PACKAGE, ROOMS, family

from megatron_lossy.base.device.environment import processor, versions

Row = dict[str, str]


def interval(part: int, whole: int) -> tuple[float, float]:
    """Wilson's, of 95 %."""
    z, share = 1.96, part / whole
    middle, width = share + z**2 / (2 * whole), z * math.sqrt(share * (1 - share) / whole + z**2 / (4 * whole**2))
    return (middle - width) / (1 + z**2 / whole), (middle + width) / (1 + z**2 / whole)


def _share(rows: list[Row], noticed: list[Row]) -> str:
    if not rows:
        return "-"
    return f"{len(noticed)} of {len(rows)} ({100 * len(noticed) / len(rows):.0f} %)"


def _code(text: str) -> str:
    text = text if len(text) <= 110 else text[:107] + "…"
    return "`` " + (text.replace("|", "\\|") or "(nothing)") + " ``"


def _table(rows: list[Row], last: str, of: dict[str, str]) -> list[str]:
    lines = [f"| where | before | after | {last} |", "| --- | --- | --- | --- |"]
    for row in rows:
        place = row["file"].removeprefix("megatron_lossy/")
        lines.append(
            f"| {place}:{row['line']} | {_code(row['before'])} | {_code(row['after'])} | {of[row['number']]} |"
        )
    return lines


def summary(rows: list[Row], equivalents: dict[tuple[str, str, str], str], args: argparse.Namespace) -> str:
    """Shares by room and kind, what nobody noticed, and what changes nothing."""
    rows = sorted(rows, key=lambda row: int(row["number"]))
    # Where a run was interrupted, what took long is missing: only what comes before the first gap is a fair sample.
    rows = [row for number, row in enumerate(rows, start=1) if int(row["number"]) == number]
    same = [row for row in rows if (row["file"], row["before"], row["after"]) in equivalents]
    reasons = {row["number"]: equivalents[row["file"], row["before"], row["after"]] for row in same}
    real = [row for row in rows if row["number"] not in reasons]
    first = [row for row in real if row["outcome"] in ("noticed", "timeout")]
    now = [row for row in real if row in first or row["again"] in ("noticed", "timeout")]
    left = [row for row in real if row not in now]
    low, high = interval(len(first), len(real))
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", PACKAGE], capture_output=True, text=True
    ).stdout.strip()
    found = versions() | {"cosmic-ray": importlib.metadata.version("cosmic-ray")}
    used = ", ".join(f"{name} {version}" for name, version in found.items())
    words = [word for word in sys.argv[1:] if word not in ("--note", args.note)]
    command = shlex.join(["python", "scripts/mutants.py", *words])
    made = [
        f"Date: {datetime.date.today().isoformat()}",
        f"Command: `{command}`, seed {args.seed}; {PACKAGE} of commit {commit}",
        f"Hardware: {processor()}, Linux {os.uname().release}; load average at the end {os.getloadavg()[2]:.0f}",
        f"Versions: {used}",
    ]
    lines = [
        "# Slips that the tests notice",
        "",
        *[f"- {line}" for line in made],
        "",
        f"{len(rows)} changes of one place, drawn at random over {', '.join(f'`{room}`' for room in ROOMS)}.",
        f"{len(same)} of them change nothing that anybody could notice; they do not count, and are listed below.",
        "",
        f"- noticed when drawn: **{_share(real, first)}**; 95 % interval {100 * low:.0f} to {100 * high:.0f} %",
        f"- noticed with the tests that were added since, for what had slipped through: **{_share(real, now)}**. This is no",
        "  estimate for other slips: those tests were written for these.",
        f"- ended by a limit of time, which counts as noticed: {sum(row['outcome'] == 'timeout' for row in real)}",
        "",
        "What runs for a change: tests that execute the changed statement, of the files that import one of these rooms,",
        f"the quickest of each file first, up to {args.budget:.0f} seconds of them. More tests could notice more. All had passed",
        "without the change. Changes are those of cosmic-ray: numbers, operators, comparisons, conditions, loops, decorators,",
        "handlers. It neither leaves out a statement nor an argument. Not drawn: annotations, errors' words, `__repr__`.",
        "",
        *([args.note, ""] if args.note else []),
        "| room | noticed when drawn | now |",
        "| --- | --- | --- |",
    ]
    for room in ROOMS:
        those = [row for row in real if row["file"].split("/")[1] == room]
        lines.append(
            f"| {room} | {_share(those, [r for r in those if r in first])} | {_share(those, [r for r in those if r in now])} |"
        )
    lines += ["", "| change | noticed when drawn | now |", "| --- | --- | --- |"]
    for kind in sorted({family(row["operator"]) for row in real}):
        those = [row for row in real if family(row["operator"]) == kind]
        lines.append(
            f"| {kind} | {_share(those, [r for r in those if r in first])} | {_share(those, [r for r in those if r in now])} |"
        )
    lines += [
        "",
        "## Not noticed",
        "",
        *_table(left, "tests that ran it", {row["number"]: row["tests"] for row in left}),
    ]
    added = [row for row in now if row not in first]
    lines += ["", "## Noticed since by a test that was added", ""]
    lines += _table(added, "by", {row["number"]: row["again_by"].removeprefix("tests/") for row in added})
    lines += ["", "## Change nothing", "", *_table(same, "why", reasons)]
    return "\n".join(lines) + "\n"
