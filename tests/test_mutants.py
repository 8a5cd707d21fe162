"""What ``scripts/mutants.py`` changes, and how it runs tests on that."""

import itertools
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import mutants_draw
from mutants_summary import interval

pytestmark = pytest.mark.shows("what `make mutants` changes", device=False)

MODULE = '''
"""Adds 1 to 2."""

from __future__ import annotations

from abc import abstractmethod


class Thing:
    size: int | None = None

    @abstractmethod
    def __repr__(self) -> str:
        return f"{1 + 1}"

    def grow(self, by: float | None, ä: int = 0) -> int | None:
        if not by:
            raise ValueError(f"{by + 1} is wrong")
        print("grown by", by * 100)
        return ä + by
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "megatron_lossy" / "coding").mkdir(parents=True)
    (tmp_path / "megatron_lossy" / "coding" / "thing.py").write_text(MODULE)
    return tmp_path


def test_each_place_is_drawn_once_and_words_are_left_out(root):
    drawn = list(mutants_draw.draw(root, 1, ("coding",)))
    assert {mutant.diff(root)[0] for mutant in drawn} == {
        "def grow(self, by: float | None, ä: int = 0) -> int | None:",
        "if not by:",
        "return ä + by",
    }
    places = [(mutants_draw.family(mutant.operator), mutant.place) for mutant in drawn]
    assert len(set(places)) == len(places)
    assert [mutant.number for mutant in drawn] == list(range(1, len(drawn) + 1))


def test_a_seed_gives_the_same_draw_and_another_does_not(root):
    def first(seed):
        return [mutant.diff(root) for mutant in itertools.islice(mutants_draw.draw(root, seed, ("coding",)), 4)]

    assert first(1) == first(1)
    assert len({str(first(seed)) for seed in range(8)}) > 1


def test_lines_are_those_of_the_statement(root):
    by_line = {m.diff(root)[0]: m for m in mutants_draw.draw(root, 1, ("coding",))}
    lines = MODULE.splitlines()
    condition = by_line["if not by:"]
    assert [lines[number - 1].strip() for number in condition.lines] == ["if not by:"] and condition.in_function
    head = by_line["def grow(self, by: float | None, ä: int = 0) -> int | None:"]  # runs at import, its body later
    assert lines[head.lines[0] - 1].strip() == "if not by:" and head.in_function


def test_the_interval_holds_the_share():
    low, high = interval(170, 200)
    assert low == pytest.approx(0.794, abs=1e-3) and high == pytest.approx(0.893, abs=1e-3)
    assert interval(5, 5)[1] == pytest.approx(1)
