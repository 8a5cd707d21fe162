"""The scripts of a maintainer: ``compat.py``, ``same_results.py``, ``mutants.py``, ``gpu_day.py``, ``words.py``."""

import json
import sys
from types import SimpleNamespace

import pytest

from scripts import gpu_day, mutants, words
from scripts.compat import CONTRACT, HEADER, _table, merged

pytestmark = pytest.mark.shows(
    "rows of the matrix of Megatrons",
    "`same_results.py` prints the differences",
    "what `make mutants` changes",
    "`gpu_day.py` goes on after failures",
    "refused idioms are found in code, comments and pages",
    device=False,
)

# --- which rows the matrix of Megatrons has (compat.py) --------------------------------------------------------------


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


# --- what it says of two outcomes, and which questions it refuses (same_results.py) ----------------------------------


CASES = ("lossless/bf16", "seed")


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(gpu_day.ROOT / "scripts"))
    from same_results_cases import all_cases

    return {case.name: case for case in all_cases(pretrain=True)}


def outcome(**changes):
    """Return the results of a case, made by hand."""
    return {
        "statuses": [[0, 0]],
        "errors": "",
        "console": [" iteration 1/ 6 | lm loss: 5.9", "  saved checkpoint"],
        "records": {"metrics.jsonl: train 1/lm loss": "5.91", "metrics.jsonl: train 2/lm loss": "5.82"},
        "weights": {"iter_0000006: output_layer.weight": "float32[384, 64] c807 norm 3.49"},
        "replicas": {},
        "log": {"rank_0.parquet: row 1": "0 grad dense-e0-s0-c0 -1 1 0 4 1 - -"},
        "log metadata": {},
        "settings": {"run config/p_grad": "0.3"},
        "files": ["metrics.jsonl"],
    } | changes


def write(path, cases, outcomes, **machine):
    content = {
        "format": 1,
        "machine": {"processor": "a", "torch": "2.13.0"} | machine,
        "cases": {name: {"case": cases[name].spelled, "outcome": outcome} for name, outcome in outcomes.items()},
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def same_results(cases, monkeypatch, capsys):
    """Call the script; returns exit status, output and errors."""
    import same_results

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["same_results.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            same_results.main()
        return left.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def compare(cases, same_results, tmp_path):
    """Return the script's verdict on two outcomes of one case."""

    def call(old, new):
        files = [write(tmp_path / f"{name}.json", cases, {CASES[0]: it}) for name, it in (("old", old), ("new", new))]
        return same_results(*files, "--only", CASES[0])

    return call


def test_equal_outcomes_are_the_same(compare):
    more = outcome(settings={"run config/p_grad": "0.3", "run config/p_of_tomorrow": "0.0"})
    status, text, _ = compare(outcome(), more)
    assert status == 0 and "1 same" in text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weights": {"iter_0000006: output_layer.weight": "float32[384, 64] c808 norm 3.49"}}, "c807 norm 3.49 / "),
        ({"records": {"metrics.jsonl: train 1/lm loss": "5.91"}}, "train 2/lm loss: 5.82 / not there"),
        ({"settings": {}}, "settings: 1 of 1, first run config/p_grad: 0.3 / not there"),
        ({"log": {"rank_0.parquet: row 1": "0 grad dense-e0-s0-c0 -1 1 0 4 2 - -"}}, "log: 1 of 1"),
        ({"console": [" iteration 1/ 6 | lm loss: 6.0"]}, "console: line 1: lm loss: 5.9 / lm loss: 6.0\n"),
        ({"files": ["metrics.jsonl", "more"]}, "files: more"),
        ({"statuses": [[1, -9]], "errors": "a\nValueError: no\n"}, "NEW fails: exit status 1 instead of 0: ValueError"),
        ({"statuses": [[2]], "errors": "error: unrecognized arguments: --bf16"}, "not there in NEW: --bf16"),
    ],
)
def test_a_difference_is_told_and_gives_status_1(compare, changes, told):
    status, text, _ = compare(outcome(), outcome(**changes))
    assert status == 1 and told in text


def test_what_the_old_checkout_does_not_know_is_no_difference(compare):
    unknown = outcome(statuses=[[2]], errors="error: unrecognized arguments: --bf16")
    status, text, _ = compare(unknown, outcome())
    assert status == 0 and "not there in OLD: --bf16" in text


def test_a_case_that_was_not_recorded_is_not_the_same(cases, same_results, tmp_path):
    old = write(tmp_path / "old.json", cases, {CASES[0]: outcome()})
    new = write(tmp_path / "new.json", cases, {name: outcome() for name in CASES})
    status, text, _ = same_results(old, new, "--only", *CASES)
    assert status == 1 and "not recorded in OLD" in text and "1 same" in text
    content = json.loads(old.read_text())
    content["cases"][CASES[0]]["case"][0] = 7
    old.write_text(json.dumps(content))
    status, text, _ = same_results(old, new, "--only", CASES[0])
    assert status == 1 and "recorded with other flags in OLD" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "0 paths: needs OLD and NEW, or OLD and --record FILE"),
        (["{here}", "{here}/nowhere"], "nowhere: does not exist"),
        (["{here}", "{here}"], "has no megatron_lossy"),
        (["{old}", "{new}"], "made with torch 2.13.0, here it is 2.14.0"),
        (["{here}/broken", "{new}"], "must be a checkout, or a file that --record wrote"),
        (["{old}", "{new}", "--only", "nothing like it"], "no such case"),
        (["{old}", "{new}", "--megatron-lm", "{here}"], "has no pretrain_gpt.py"),
        (["{old}", "{new}", "--jobs", "0"], "must be at least 1"),
        (["{old}", "{new}", "--sideways"], "unrecognized arguments: --sideways"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(cases, same_results, tmp_path, arguments, told):
    (tmp_path / "broken").write_text("{")
    places = {
        "here": tmp_path,
        "old": write(tmp_path / "old.json", cases, {}),
        "new": write(tmp_path / "new.json", cases, {}, torch="2.14.0"),
    }
    status, _, errors = same_results(*(argument.format(**places) for argument in arguments))
    assert status == 2 and errors.count("\n") == 1 and told in errors


# --- what it changes (mutants.py) ------------------------------------------------------------------------------------


MODULE = '''
"""Adds 1 to 2."""


class Thing:
    size: int | None = None

    def __repr__(self) -> str:
        return f"{1 + 1}"

    def grow(self, by: float | None, ä: int = 0) -> int | None:
        if not by:
            raise ValueError(f"{by + 1} is wrong")
        return ä + (by) if self.size is None else True
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "megatron_lossy" / "base" / "coding").mkdir(parents=True)
    (tmp_path / "megatron_lossy" / "base" / "coding" / "thing.py").write_text(MODULE)
    return tmp_path


def test_slips_change_one_place_and_leave_words_alone(root):
    told = {one.told(root).partition(": ")[2] for one in mutants.draw(root, 1, ["base/coding"])}
    head, sum_ = (
        "def grow(self, by: float | None, ä: int = {}) -> int | None:",
        "return ä {} (by) if self.size {} None else {}",
    )
    assert told == {
        f"{head.format(0)}  ->  {head.format(1)}",
        "if not by:  ->  if by:",
        f"{sum_.format('+', 'is', True)}  ->  {sum_.format('-', 'is', True)}",
        f"{sum_.format('+', 'is', True)}  ->  {sum_.format('+', 'is not', True)}",
        f"{sum_.format('+', 'is', True)}  ->  {sum_.format('+', 'is', False)}",
    }


def test_a_seed_gives_the_same_draw_and_another_does_not(root):
    draws = [mutants.draw(root, seed, ["base/coding"]) for seed in (1, 1, *range(2, 8))]
    assert draws[0] == draws[1] and len({str(one) for one in draws}) > 1


# --- what a day with a GPU does (gpu_day.py) -------------------------------------------------------------------------


def options(folder, **given):
    how = dict(on="cpu", record=None, megatron_lm="x", second=False, minutes=8) | given
    return SimpleNamespace(out=folder, **how)


@pytest.mark.programs
@pytest.mark.parametrize(
    ("code", "limit", "status", "text"),
    [
        ("print('12 passed in 3 s'); print('noise')", 60, "passed", "12 passed in 3 s"),
        ("print('2 skipped in 1 s')", 60, "skipped", "2 skipped in 1 s"),
        ("raise SystemExit('no')", 60, "failed", "no"),
        ("input()", 0, "left", ""),
        ("import time; time.sleep(3600)", 3, "stopped", ""),
    ],
)
def test_a_step_ends_by_itself_or_at_its_limit(tmp_path, code, limit, status, text):
    step = gpu_day.Step("a step", 9, ["-c", code])
    gpu_day.run(step, limit, options(tmp_path), {})
    assert (step.status, step.text) == (status, text)


def test_the_lists_name_files_that_are_there(tmp_path):
    for second in (False, True):
        words = [word for step in gpu_day.steps(options(tmp_path, second=second)) for word in step.words]
        files = {gpu_day.ROOT / word for word in words if word.startswith("tests/")}
        assert files and all(file.exists() for file in files)
        assert sum(step.share for step in gpu_day.steps(options(tmp_path, second=second))) <= 480
    assert gpu_day.summary("warning: a: b\nok: c: d\nok: e: f\n{}") == "1 warning, 2 ok"


# --- idioms that make lint refuses (words.py) -------------------------------------------------------------------------


REFUSED = {
    "function.py": ('def f() -> int:\n    """The number."""\n    # Fine.\n    # What is lost is gone.\n', [2, 4]),
    "property.py": ('@property\ndef f() -> int:\n    """The number of ``told``. What now?"""\nx = "gave up"\n', []),
    "page.md": ("# What it is\n\n`told`\n\nA rank\ngives\nup. Who waits?\n", [7]),
    "code.c": ("int told; /* one\n * that hears */\n// Whoever waits.\n", [2, 3]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_idioms_are_refused_where_words_are(tmp_path, name):
    path, (text, lines) = tmp_path / name, REFUSED[name]
    path.write_text(text)
    assert [int(line.removeprefix(f"{path}:").partition(":")[0]) for line in words.refused(path)] == lines
