"""Write into the documentation what is made elsewhere; --check only says whether it is current.

Between ``<!-- KIND: NAME -->`` and ``<!-- end -->`` of a page stands:

``flags: loss``, ``training``
    the loss flags, from megatron_lossy/config; those of our own trainer
``refusals: all``
    the table of refusals, from megatron_lossy/config/refusals
``table: FILE``, ``table: FILE#heading``
    the Markdown table FILE of benchmarks/results, or its section
``list: studies``, ``presets``, ``features``, ``machines``
    the questions of configs/studies; the files of configs/presets; what tests show, and where they ran (scripts/verified.py)
``made: TABLE``
    a table that a script next to this one makes, or :mod:`benchmarks.study_sizes`; costs of the plan, which are no page

The tables of a study are made from its record.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from benchmarks import study_sizes
from megatron_lossy.base.files import write_text
from megatron_lossy.base.flags import as_text, flag_groups, flag_name, options_of
from megatron_lossy.base.registry import MECHANISMS
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.loss_flags import presets, title
from megatron_lossy.config.refusal import HEAD, Section, sections
from megatron_lossy.lab.report import LossTable
from megatron_lossy.lab.report.scalars import AXES
from megatron_lossy.lab.studies.commands import recorded
from megatron_lossy.lab.studies.folder import tables
from megatron_lossy.lab.train.config import TrainConfig
from megatron_lossy.run.exporter import prometheus_name
from scripts import ways
from scripts.verified import feature_table, machine_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "megatron_lossy/lab/plan/measured.yaml"]
_FLAGS = {"loss": LossyConfig, "training": TrainConfig}
_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")
#: Flags of mechanisms of other packages that happen to be installed.
_STRANGE = {
    flag.name
    for mechanism in MECHANISMS.all()
    if mechanism not in MECHANISMS.ours()
    for flag in dataclasses.fields(mechanism.Flags)
}
#: The meaning of each value that ``--metrics-port`` serves, by its name in records.
METRICS = {name: axis.label for name, axis in AXES.items()} | {
    "iteration": "the iteration of the last record",
    "validation loss": "language-model loss (nats per token), by `weights`: replica, owner or consensus",
}
_MADE = {
    "metrics": lambda: _metrics(),
    "plan_costs": ways.costs,
    "size_cost": lambda: _of_sizes()["cost"].markdown(),
    "ways": ways.table,
    "size_measured": lambda: _of_sizes()["measured"].markdown(),
}
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
_MARKS = re.compile(r"(<!-- (flags|table|list|made|refusals): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def current(text: str) -> str:
    """Return ``text`` of a page with everything between marks as it is now."""
    return _MARKS.sub(lambda match: match[1] + _content(match[2], match[3]) + match[4], text)


def _content(kind: str, name: str) -> str:
    if kind == "flags":
        return flag_tables(_FLAGS[name], " \\*") + "\n"
    if kind == "refusals":
        return "\n\n".join(f"## {part.about}\n\n{refusal_table(part)}" for part in sections(ours=True)) + "\n"
    if kind == "made":
        return _MADE[name]()
    if kind == "list":
        return _LISTS[name]()
    file, _, heading = name.partition("#")
    return section(table(RESULTS / file), heading) if heading else table(RESULTS / file)


def table(file: Path) -> str:
    """Return the Markdown table ``file`` below benchmarks/results."""
    if file.parent.parent != RESULTS / "studies":
        return file.read_text(encoding="utf-8")
    return _tables(file.parent)[file.stem].markdown()


def section(text: str, heading: str) -> str:
    """Return the part of a Markdown ``text`` under a second-level ``heading`` of one word, in lower case."""
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    return sections[heading.capitalize()].strip() + "\n"


@functools.cache
def _tables(study: Path) -> Mapping[str, LossTable]:
    return tables(recorded(study))


@functools.cache
def _of_sizes() -> Mapping[str, LossTable]:
    return study_sizes.tables(study_sizes.read(sorted((RESULTS / "studies").glob("size_*"))))


def links(page: Path) -> set[Path]:
    """Return the files and folders of the repository that ``page`` shows as pictures or links."""
    found = {(page.parent / target).resolve() for target in _LINK.findall(page.read_text(encoding="utf-8"))}
    return {path for path in found if path.is_relative_to(ROOT)}


def _metrics() -> str:
    rows = [f"| `{prometheus_name(name)}` | {meaning} |" for name, meaning in METRICS.items()]
    return "\n".join(["| metric | meaning, unit |", "| --- | --- |", *rows]) + "\n"


def _questions() -> str:
    rows = ["| study | question |", "| --- | --- |"]
    for path in sorted((ROOT / "configs/studies").glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name, study in content.get("studies", {None: content}).items():
            link = f"[{path.name}](../../{path.relative_to(ROOT)}){f' `{name}`' if name else ''}"
            rows.append(f"| {link} | {study['question']} |")
    return "\n".join(rows) + "\n"


def _presets() -> str:
    rows = ["| preset | |", "| --- | --- |"]
    rows += [f"| [{name}](../configs/presets/{name}.yaml) | {title(name)} |" for name in presets()]
    return "\n".join(rows) + "\n"


_LISTS = {"studies": _questions, "presets": _presets, "features": feature_table, "machines": machine_table}


def flag_tables(cls: type, mark: str = "") -> str:
    """Return the flags of ``cls`` as Markdown, a table for each heading; ``mark`` stands behind the basic ones."""
    return "\n\n".join(
        f"### {heading[:1].upper()}{heading[1:]}\n\n{flag_table(cls, heading, mark)}"
        for heading, fields in flag_groups(cls).items()
        if any(f.name not in _STRANGE for f in fields)
    )


def flag_table(cls: type, heading: str | None = None, mark: str = "") -> str:
    """Return the flags of ``cls``, or those under ``heading``, as a Markdown table: flag, default, meaning."""
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for f in (field for name, own in flag_groups(cls).items() if heading in (None, name) for field in own):
        if f.name in _STRANGE:
            continue
        options = options_of(f)
        value = ""
        if options.get("choices"):
            ours = getattr(options["choices"], "built_in", options["choices"])  # without other installed packages
            value = " {" + ",".join(map(str, ours)) + "}"
        elif options.get("action") != "store_true":
            metavar = options.get("metavar") or f.name.upper()
            value = " " + (metavar if isinstance(metavar, str) else " ".join(metavar))
        default = "" if f.default is None else as_text(f.default)
        if isinstance(f.default, bool):
            default = "on" if f.default else "off"
        cells = (
            f"`{flag_name(cls, f.name)}{value}`{mark if f.metadata['basic'] else ''}",
            default,
            options["help"].replace("%%", "%"),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def refusal_table(section: Section) -> str:
    """Return ``section`` as a Markdown table."""
    marked = (tuple(_FLAG.sub(r"`\g<0>`", cell).replace("|", "\\|") for cell in row.cells()) for row in section.rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEAD, ("---",) * len(HEAD), *marked))


def main() -> None:
    """Update the pages, or check them."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (text := current(before)) == before:
            continue
        if "--check" in sys.argv:
            sys.exit(f"{page}: is not current; run make docs")
        write_text(page, text)


if __name__ == "__main__":
    main()
