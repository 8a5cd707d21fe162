"""What is written in the documentation and made from the code must be current."""

import dataclasses
import re
from pathlib import Path

import pytest

from scripts.update_docs import PAGES, current

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_what_is_made_elsewhere_is_current(page):
    text = page.read_text()
    assert text == current(text), "run make docs"
    assert text.count("<!-- end -->") == sum(
        text.count(f"<!-- {kind}: ") for kind in ("flags", "table", "list", "refusals")
    )


def test_links_in_the_documentation_exist():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_headings_that_are_linked_exist():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
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


def test_pythons_of_the_readme_compile():
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE):
        compile(block, "README.md", "exec")


def test_every_key_of_a_study_file_is_explained():
    from megatron_lossy.study.design import Design

    page = (ROOT / "docs" / "study.md").read_text()
    table = page.partition("## What a study file can have")[2].partition("## ")[0]
    for field in dataclasses.fields(Design):
        assert f"`{field.name.replace('_', '-')}`" in table
