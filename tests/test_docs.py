"""What is written in the documentation and made from the code must be current."""

import re
from pathlib import Path

from scripts.update_readme import with_flags

ROOT = Path(__file__).parent.parent


def test_the_table_of_flags_in_the_readme_is_current():
    text = (ROOT / "README.md").read_text()
    assert text == with_flags(text), "run make flags"


def test_links_in_the_documentation_exist():


    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
