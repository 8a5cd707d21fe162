"""Parts of the documentation that are made from the code must be current."""

import dataclasses
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lossy.base.errors import ArgumentParser
from megatron_lossy.base.flags import add_flags, from_namespace
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.facts import Facts
from megatron_lossy.config.loss_flags import with_preset
from megatron_lossy.config.refusal import RefusalError, check_refusals
from megatron_lossy.lab.studies.design import Design
from megatron_lossy.lab.studies.folder import RECORD
from megatron_lossy.lab.train.arguments import configurations, make_parser, read_arguments
from megatron_lossy.lab.train.facts import of_trainer
from scripts.update_docs import PAGES, RESULTS, ROOT, current, links
from tests.trainer import TINY, as_flags

pytestmark = pytest.mark.shows("pages are current, their links and headings exist", device=False)


#: Tables that are made from the records of studies take seconds each.
OF_STUDIES = re.compile("<!-- (table|list|made): (?!presets)")
CURRENT = [
    pytest.param(
        page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] * bool(OF_STUDIES.search(page.read_text()))
    )
    for page in PAGES
]


@pytest.mark.parametrize("page", CURRENT)
def test_what_is_made_elsewhere_is_current(page):
    text = page.read_text()
    assert text == current(text), "run make docs"
    assert text.count("<!-- end -->") == sum(
        text.count(f"<!-- {kind}: ") for kind in ("flags", "table", "list", "made", "refusals")
    )


#: Pages whose commands and flags are read.
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Yield the module, the number of ranks and the arguments of each command of ``page`` that takes loss flags."""
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.sub(r"(^|\s)#.*|--config …|[…'\"]", " ", line).split()
            for place, word in enumerate(words[:-1]):
                if word == "-m" and words[place + 1] in ("megatron_lossy", "megatron_lossy.train"):
                    yield words[place + 1], ranks_of(" ".join(words[:place])), words[place + 2 :]


def ranks_of(before: str) -> int:
    """Return the ranks that the words before a program start, or say that there are."""
    before = before.replace("{nodes}", "2")
    return math.prod(map(int, re.findall(r"(?:--nproc-per-node |--nnodes |WORLD_SIZE=)(\d+)", before)))


def combinations(page: Path) -> Iterator[list[str]]:
    """Yield flags with values in the text of ``page``, several at once; where one reads what to type, one as well.

    Names in the place of values, as in a table of flags, are left out.
    """
    text = re.sub(r"<!-- (flags|refusals):.*?<!-- end -->", "", BLOCK.sub("", page.read_text()), flags=re.DOTALL)
    for code in re.findall(r"`(--[^`]+)`", text):
        words = code.replace("…", "").split()
        flags = [word for word in words if word.startswith("--")]
        several = len(flags) > 1 or (page.name == "README.md" and len(words) > 1)
        if several and words[-1] != "--udp-deadline" and not any(re.fullmatch("[A-Z]", word) for word in words):
            yield words


def _taken(words, *more):
    """The loss flags among ``words``, which the flags by themselves do not refuse."""
    parser = add_flags(ArgumentParser(allow_abbrev=False), LossyConfig, "loss")
    return from_namespace(LossyConfig, parser.parse_known_args([*more, *with_preset(words)])[0])


@pytest.mark.parametrize("page", [page for page in SHOWN if any(commands(page))], ids=lambda page: page.stem)
def test_commands_of_pages_are_not_refused(page):
    for module, ranks, words in commands(page):
        if module == "megatron_lossy":
            loss = _taken(words)
            facts = Facts(workers=ranks * loss.jobs().launches, virtual=False, flushes=True, distributed_optimizer=True)
            check_refusals(loss, facts if ranks > 1 else Facts(flushes=True))
            continue
        needed = as_flags(TINY | {"data": "stdlib"}) if "--config" not in words else []
        train, loss = configurations(read_arguments(make_parser("page", ""), [*needed, *words]))
        ranks *= loss.jobs().launches
        if needed:  # the page shows a part of the command
            check_refusals(loss, Facts(virtual=train.virtual_workers is not None, workers=ranks if ranks > 1 else None))
        else:
            train.check_world(ranks)
            check_refusals(loss, of_trainer(train, ranks))


@pytest.mark.parametrize("page", [page for page in SHOWN if any(combinations(page))], ids=lambda page: page.stem)
def test_combinations_of_flags_of_pages_are_not_refused(page):
    """README's on real ranks; others may be of virtual workers."""
    for words in combinations(page):
        try:
            check_refusals(_taken(words), Facts(workers=8, virtual=False, train_iters=10**4))
        except RefusalError:
            if page.name == "README.md":
                raise
            check_refusals(_taken(words), Facts(virtual=True, train_iters=10**4))


def test_links_in_the_documentation_exist():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_of_studies_git_has_the_record_and_what_pages_show():
    """``make docs`` makes all else from it, and git ignores it."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git lists no files here: {error}")
    tracked = {ROOT / name for name in listed if (ROOT / name).is_file()}
    if Path(__file__).resolve() not in tracked:
        pytest.skip("this is no checkout: git does not track this test")
    pages = [path for path in tracked if path.suffix == ".md" and not path.is_relative_to(RESULTS)]
    shown = set().union(*map(links, pages))
    of_results = {path for path in shown if path.is_relative_to(RESULTS) and not path.is_dir()}
    shown |= set().union(*(links(path) for path in of_results & tracked if path.suffix == ".md"))
    assert not of_results - tracked, "git add -f them"
    studies = {path for path in tracked if path.is_relative_to(RESULTS / "studies")}
    assert studies
    assert not {path for path in studies if path.name != RECORD} - shown, "git rm them"
    assert {path.parent / RECORD for path in studies} <= studies


def test_headings_that_are_linked_exist():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            text = ((page.parent / target) if target else page).read_text()
            headings = re.findall(
                r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
            )
            # As GitHub names them.
            names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in names, (page.name, target, anchor)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks" / "README.md", ROOT / "patches" / "README.md"], ids=str)
def test_code_blocks_fit_without_scrolling(page):
    for block in re.findall(r"^```.*?^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            assert len(line) <= 100, line


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.stem
)
def test_pythons_of_pages_compile(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        compile(block, page.name, "exec")


def test_the_index_links_every_page():
    text = (ROOT / "docs/index.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.name == "index.md" or f"({page.relative_to(ROOT / 'docs')})" in text, page


def test_the_pages_that_are_read_first_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
    assert len((ROOT / "docs/results.md").read_text().splitlines()) <= 400


def test_every_key_of_a_study_file_is_explained():
    page = (ROOT / "docs" / "study.md").read_text()
    table = page.partition("## What a study file can have")[2].partition("## ")[0]
    for field in dataclasses.fields(Design):
        assert f"`{field.name.replace('_', '-')}`" in table
