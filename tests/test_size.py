"""The project stays small. A change that adds lines takes some away first, or says why and raises a limit."""

import pytest

from scripts.size import sizes

pytestmark = pytest.mark.shows("lines by storey, files, flags and help stay within limits", device=False)

LIMITS = {
    "entries of megatron_lossy": 14,
    "lines outside lab": 29_973,
    "lines of the package": 43_872,
    "lines of C": 3_498,
    "lines of tests": 38_242,
    "lines of scripts and benchmarks": 9_650,
    "files of islands": 25,
    "lines of islands": 6_769,
    "files under 40 lines": 10,
    "files over 450 lines": 0,
    "words of pages": 35_000,
    "loss flags": 70,
    "lines of train --help": 90,
}


@pytest.fixture(scope="module")
def measured():
    return sizes()


def test_every_number_has_a_limit(measured):
    assert measured.keys() == LIMITS.keys()


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit(measured, name):
    assert 0 <= measured[name] <= LIMITS[name]
