"""The table of refusals as readers see it: the command, and the page."""

import contextlib
from pathlib import Path

import pytest

from megatron_lossy import __main__ as command
from megatron_lossy.config.refusal import sections
from megatron_lossy.errors import UsageError
from megatron_lossy.refusals.listing import as_markdown

pytestmark = pytest.mark.shows("the list of refusals: command and page", device=False)

ROOT = Path(__file__).parents[1]


def test_each_section_is_in_the_page_and_in_the_command(capsys):
    page = (ROOT / "docs" / "refusals.md").read_text()
    command.main(["refusals"])
    told = capsys.readouterr().out
    at = -1
    for section in sections():
        assert as_markdown(section) in page
        assert told.index(f"{section.about} ({section.name})") > at
        at = told.index(f"{section.about} ({section.name})")
    command.main(["refusals", "lead"])
    one = capsys.readouterr().out
    assert one.count("--param-send, --param-lag") == 1 and "--islands" not in one


def test_an_unknown_section_is_refused(monkeypatch):
    monkeypatch.setattr(command, "running", contextlib.nullcontext)
    with pytest.raises(UsageError, match="^SECTION leads: must be one of core, transport"):
        command.main(["refusals", "leads"])
