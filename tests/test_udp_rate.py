"""Reports of a destination that come late, twice or after others, and what the rate makes of them."""

import pytest

from tests.udp_rate_model import MS, SECOND, Rate

pytestmark = pytest.mark.shows("codec, cipher, completion and rate against their models in every order", device=False)


def reported(reports):
    """The model of the rate after reports (milliseconds, datagrams, top), each of datagrams of 1,000 bytes."""
    rate = Rate(1e6, 1e9)
    rate.sample(SECOND, 10 * MS)
    for passed, datagrams, top in reports:
        now = SECOND + passed * MS
        rate.report(now, datagrams, datagrams * 1000, top, now // 1000)
    return rate


def test_a_report_that_was_overtaken_says_nothing():
    steady = [(3 * step, 150 * step, 150 * step) for step in range(1, 20)]
    expected = vars(reported(steady))
    assert expected["greatest"] == pytest.approx(150_000 / 3e-3)
    for place in range(2, 19):
        now, count = 3 * place + 1, 150 * place
        older, same = (now, count - 50, count - 50), (now, count, count)
        # More of fewer numbers cannot be of one moment.
        crossed = (now, count + 1, count - 1)
        for late in (older, same, crossed):
            assert vars(reported([*steady[:place], late, *steady[place:]])) == expected
