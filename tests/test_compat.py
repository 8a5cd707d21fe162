"""``scripts/compat.py``: which rows the matrix of Megatrons has."""

import pytest

from scripts.compat import CONTRACT, HEADER, _table, merged

pytestmark = pytest.mark.shows("rows of the matrix of Megatrons", device=False)

EMPTY = f"<!-- compat -->\n{_table([])}<!-- end compat -->\n"


ALL = ("yes (1)",) * len(CONTRACT)


def row(name, torch, contract=ALL, pretrain="", note=""):
    assert len(contract) == len(CONTRACT)
    return [name, name if torch else "", "3.11.7" if torch else "", torch, *contract, pretrain, note, "2026-11-21"]


def names(text):
    return [tuple(line.split(" | ")[index].strip("| ") for index in (0, 3)) for line in text.splitlines()[3:-1]]


def test_the_same_megatron_on_two_versions_of_torch_is_two_rows():
    text = merged(EMPTY, [row("0.16.1", "2.13.0+cpu"), row("0.16.1", "2.8.0+cu128"), row("0.12.3", "2.6.0+cu124")])
    assert names(text) == [("0.12.3", "2.6.0+cu124"), ("0.16.1", "2.8.0+cu128"), ("0.16.1", "2.13.0+cpu")]
    # Another build of the same torch is the same row.
    assert names(merged(text, [row("0.16.1", "2.8.0+cpu")]))[1] == ("0.16.1", "2.8.0+cpu")


def test_what_did_not_run_replaces_nothing():
    text = merged(EMPTY, [row("0.16.1", "2.13.0")])
    assert merged(text, [row("0.16.1", "", [""] * len(CONTRACT), "skipped: needs Python 3.12 (--python)")]) == text
    skipped = merged(EMPTY, [row("0.17.1", "", [""] * len(CONTRACT), note="skipped: needs Python 3.12 (--python)")])
    assert names(skipped) == [("0.17.1", "")]
    assert names(merged(skipped, [row("0.17.1", "2.13.0")])) == [("0.17.1", "2.13.0")]


@pytest.mark.parametrize("first", [0, 1])
def test_contract_and_pretrain_meet_in_one_row(first):
    rows = [row("core", "2.13.0"), row("core", "2.13.0", [""] * len(CONTRACT), "yes (6)")]
    text = merged(merged(EMPTY, [rows[first]]), [rows[1 - first]])
    assert names(text) == [("core", "2.13.0")] and text.count("yes (1)") == len(HEADER) - 7 and "yes (6)" in text


def test_one_column_keeps_the_others():
    text = merged(EMPTY, [row("0.19.2", "2.13.0", note="b; c")])
    cells = ["" if column != "full replicas" else "yes (9)" for column in CONTRACT]
    [line] = merged(text, [row("0.19.2", "2.13.0", cells, note="a; c")]).splitlines()[3:-1]
    assert line.count("yes (1)") == len(CONTRACT) - 1 and line.count("yes (9)") == 1 and "| a; b; c |" in line
