"""Write into the documentation what is made elsewhere; --check only says whether it is current.

Between ``<!-- flags: loss -->`` and ``<!-- end -->``: the loss flags, from megatron_lossy/config; between
``<!-- flags: training -->`` and ``<!-- end -->``: those of our own trainer, from megatron_lossy/train/config.py; between
``<!-- flags: islands -->`` and ``<!-- end -->``: those of islands among the loss flags, and ``<!-- flags: pipeline -->``
those of the asynchronous pipeline; between ``<!-- refusals: all -->`` and ``<!-- end -->``: the table of refusals, from
megatron_lossy/refusals; between
``<!-- table: FILE -->`` and ``<!-- end -->``: the Markdown table FILE of benchmarks/results; between ``<!-- list: studies -->``
and ``<!-- end -->``: the questions of configs/studies.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

from megatron_lossy.config import LossyConfig
from megatron_lossy.config.islands import IslandFlags
from megatron_lossy.config.pipeline import PipelineFlags
from megatron_lossy.files import write_text
from megatron_lossy.flags import flag_groups, flag_table, flag_tables
from megatron_lossy.refusals import listing
from megatron_lossy.train.config import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FLAGS = {"loss": LossyConfig, "training": TrainConfig, "islands": IslandFlags, "pipeline": PipelineFlags}
_MARKS = re.compile(r"(<!-- (flags|table|list|refusals): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def current(text: str) -> str:
    """``text`` of a page with everything between marks as it is now."""
    return _MARKS.sub(lambda match: match[1] + _content(match[2], match[3]) + match[4], text)


def _content(kind: str, name: str) -> str:
    if kind == "flags":
        cls = _FLAGS[name]
        return (flag_tables(cls) if len(flag_groups(cls)) > 1 else flag_table(cls)) + "\n"
    if kind == "refusals":
        return listing.pages() + "\n"
    if kind == "list":
        return _questions(ROOT / "configs" / name)
    return (ROOT / "benchmarks/results" / name).read_text(encoding="utf-8")


def _questions(folder: Path) -> str:
    rows = ["| file | question |", "| --- | --- |"]
    for path in sorted(folder.glob("*.yaml")):
        question = yaml.safe_load(path.read_text(encoding="utf-8"))["question"]
        rows.append(f"| [{path.name}](../{path.relative_to(ROOT)}) | {question} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Update the pages, or check them."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if text == current(text):
            continue
        if "--check" in sys.argv:
            sys.exit(f"{page}: is not current; run make docs")
        write_text(page, current(text))


if __name__ == "__main__":
    main()
