"""The documentation as a site: every link leads somewhere, every page is in the navigation."""

import re
import subprocess
import sys

import pytest
import typst

from scripts import report
from scripts.site import ROOT, WORK, Pages

pytestmark = pytest.mark.shows("the documentation builds as a site, without a broken link", device=False)


@pytest.mark.programs
@pytest.mark.slow
def test_the_site_builds_without_a_warning():
    done = subprocess.run([sys.executable, "-m", "scripts.site"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (WORK / "html" / "api" / "pytorch" / "index.html").read_text()
    assert "make_lossy" in api and ":func:" not in api


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r'"([\w/]+\.md)"', (ROOT / "zensical.toml").read_text()))
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == there | {"CONTRIBUTING.md", "CHANGELOG.md"}


def test_links_lead_to_pages_pictures_and_sources(tmp_path):
    """Records and pictures are copied; other files of the repository are at the address that was given."""
    Pages(tmp_path, "https://example.org/tree").write()
    text = (tmp_path / "wan.md").read_text()
    records = re.findall(r"\]\((benchmarks/results/[^)#]+\.md)", text)
    assert records and all((tmp_path / record).exists() for record in records)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (tmp_path / "results.md").read_text())
    assert pictures and all((tmp_path / picture).exists() for picture in pictures)
    everything = "".join(page.read_text() for page in tmp_path.rglob("*.md"))
    sources = set(re.findall(r"https://example.org/tree/([\w./-]+\.(?:yaml|py))", everything))
    assert sources and all((ROOT / source).exists() for source in sources)


def test_a_value_of_the_report_is_in_its_record():
    text = report.SOURCE.read_text()
    records = dict(re.findall(r'^#let (\w+) = "(.+)"$', text, re.MULTILINE))
    values = re.findall(r'#n\((\w+), "([^"]+)"\)', text)
    assert len(values) == text.count("#n(") and {name for name, _ in values} == records.keys()
    for name, value in values:
        assert value in (ROOT / records[name]).read_text(), (name, value)


def test_the_report_is_that_of_its_source_and_has_at_most_ten_pages():
    assert report.REPORT.read_bytes() == report.made(), "make report"
    assert len(typst.compile(report.SOURCE, root=ROOT, format="png", ppi=8)) <= 10
