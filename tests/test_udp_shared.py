"""The rate beside others: the engine's rule against its model, and what it does to a bottleneck."""

import ctypes
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.transport.udp.engine import RULES, load
from tests.udp_shared import MS, SECOND, Shared

pytestmark = pytest.mark.shows("rates beside other flows: the rule, its model, and a bottleneck", device=False)

PHASES = ("starts", "grows", "dips")


def follow(seed, seconds, capacity, loss, queue, trip, share=0.0):
    """Drive the engine's rule and the model by one link, and compare them at each step; the model in the end.

    ``capacity``: bytes/s; ``queue``, ``trip``: seconds; pauses come at random.
    """
    lib = load()
    lib_rate = lib.ml_rate_new(4e6, 1.25e9, RULES["shared"], 1500)
    model, random_ = Shared(1.25e9, 1500), random.Random(seed)
    lib.ml_rate_share(lib_rate, share)
    model.share = share
    now, free, number, came, top, link, sent_at, clock = SECOND, 0, 0, 0, 0, 0, {}, 3
    reports, seen = [], set()
    report_at = 0
    while now < (1 + seconds) * SECOND:
        idle = now - free
        lib.ml_rate_clock(lib_rate, now, now + clock, idle, number)
        if idle > 5 * MS:
            model.resume(number)
        model.clock(now, now + clock, number)
        for _ in range(max(int(model.rate / 4000 / 1500), 1)):
            sent_at[number] = now
            if max(link - now, 0) <= queue * SECOND:
                link = max(link, now) + int(1500 * SECOND / capacity)
                if random_.random() >= loss:
                    came, top = came + 1, number + 1
                    if link >= report_at:
                        report_at = link + 2 * MS
                        reports.append((link + int(trip * SECOND / 2), came, top, link))
            number += 1
        free = now + int(max(int(model.rate / 4000 / 1500), 1) * 1500 * SECOND / model.rate)
        now = free + (random_.randrange(300) * MS if random_.random() < 0.0005 else 0)
        while reports and reports[0][0] <= now:
            at, arrived, highest, landed = reports.pop(0)
            rtt = at - sent_at[highest - 1] + int(trip * SECOND / 2)
            micros = landed // 1000
            lib.ml_rate_sample(lib_rate, at, rtt)
            lib.ml_rate_report(
                lib_rate, at, arrived, 1500 * arrived, highest, micros % 2**32, sent_at[highest - 1], number
            )
            model.sample(at, rtt)
            model.report(at, arrived, highest, sent_at[highest - 1], micros * 1000, number)
            out = (ctypes.c_double * 5)()
            lib.ml_rate_shared(lib_rate, out)
            expected = (model.rate, model.proven, model.credit, PHASES.index(model.phase), model.competes)
            assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(out, expected)), (list(out), expected)
            seen |= {model.phase, "competes" if model.competes else "alone", "credit" if model.credit else "none"}
    lib.ml_rate_free(lib_rate)
    return model, seen


@given(
    seed=st.integers(0, 10**6),
    capacity=st.sampled_from([1e6, 3e6]),
    loss=st.sampled_from([0.0, 0.01, 0.1]),
    queue=st.sampled_from([0.002, 0.05]),
    trip=st.sampled_from([0.001, 0.02, 0.1]),
    share=st.sampled_from([0.0, 1e6]),
)
@settings(max_examples=15, deadline=None)
def test_the_rule_is_the_models(**link):
    follow(seconds=5, **link)


def test_long_histories_come_to_every_phase():
    seen = set()
    for loss, queue in ((0.1, 0.002), (0.0, 0.1)):
        seen |= follow(1, 12, 3e6, loss, queue, 0.02)[1]
    assert seen == {*PHASES, "competes", "alone", "credit", "none"}
