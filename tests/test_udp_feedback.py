"""Error feedback and priorities over UDP: senders get reports of lost units, and chosen units arrive."""

import dataclasses
import json
import re

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.transport.udp.repeats import Repeats
from tests import contract
from tests.in_lab import run_in_lab, telescopes
from tests.ranks import run_ranks
from tests.rules import assert_same
from tests.test_hooks import OVERLAPS
from tests.test_lab import needs_lab
from tests.test_recovery_feedback_ranks import unfinished
from tests.tiny_gpt import TinyGPT

pytestmark = pytest.mark.shows("error feedback over UDP: all is applied but the residual")

PRIORITY = {"grad_recovery": "error-feedback", "grad_priority": "packet-mean:0.1"}
FEEDBACK = LossyConfig(transport="udp", packet_bytes=256, udp_key_file="none", **PRIORITY)
#: Exchanges end before all has arrived, whatever the network does.
HURRIED = dataclasses.replace(FEEDBACK, udp_deadline="0.05")


def skips_some(step):
    return step % 4 != 2


@pytest.mark.parametrize("priority", ["packet-mean:0.1", "none"])
def test_all_that_was_sent_is_applied_but_for_what_is_kept(priority):
    """To the last bit, over integers; some steps do not count."""
    config = dataclasses.replace(HURRIED, grad_priority=priority)
    for told in run_ranks(telescopes, 3, config, 12, skips_some):
        assert told["difference"] == 0 and told["lost"] > 0, told


def test_the_public_collectives_need_nobody_who_finishes_a_step():
    """And nothing is left that somebody would have to ask for."""
    for difference, _, lost, unasked in run_ranks(unfinished, 3, HURRIED, 12):
        assert difference == unasked == 0 and lost > 0


@pytest.mark.shows("over a link that loses a tenth, gradients that matter arrive")
@needs_lab
@pytest.mark.parametrize(
    "fec", [("auto",), *(pytest.param(code, marks=pytest.mark.slow) for code in (("10", "0"), ("10", "5")))]
)
def test_over_a_link_that_loses_a_tenth_what_matters_arrives(fec):
    flags = PRIORITY | {"transport": "udp", "packet_bytes": 256, "udp_interface": "lab0"}
    flags["udp_fec"] = ("auto", "20") if fec == ("auto",) else fec
    output = run_in_lab("tests.in_lab", "telescopes", json.dumps(flags), "25", loss=0.1)
    told = [json.loads(found) for found in re.findall(r"\{\"rank\".*?\}", output)]
    assert len(told) == 2, output
    for one in told:
        assert one["difference"] == 0 and one["must"] == 0 and one["lost"] > 0 and one["high"] > 0, one
        if fec == ("10", "0"):
            assert one["resent"] > 0 and one["copies"] == 0, one
        else:  # it may be that nothing has to be asked for
            assert one["copies"] > 0, one


@pytest.mark.parametrize("recovery", ["error-feedback", "zero"])
def test_without_loss_it_is_megatron(recovery):
    tiny = TinyGPT(dtype="bf16", accumulation=2, **OVERLAPS["both"])
    config = dataclasses.replace(FEEDBACK, grad_recovery=recovery, grad_priority="packet-mean:0.1")
    mine, theirs = run_ranks(contract.plain, 2, tiny, config, 4), run_ranks(contract.plain, 2, tiny, None, 4)
    assert_same(mine, theirs)


def losses(rank, tiny, config, steps):
    """Loss of every step, and metrics, of a training that loses what comes too late."""
    with contract.made(tiny, config) as (run, lossy):
        overflows = {3: 0} if tiny.loss_scale else {}
        history = [run.step(step, overflow_on=overflows.get(step))["loss"] for step in range(steps)]
        return history, lossy.metrics()


@pytest.mark.parametrize(
    "tiny",
    [
        TinyGPT(**OVERLAPS["none"]),
        TinyGPT(loss_scale=8.0, **OVERLAPS["both"]),
        TinyGPT(dtype="bf16", **OVERLAPS["both"]),
    ],
    ids=["fp32", "loss scale, an overflow, overlap", "bf16, overlap"],
)
def test_a_model_is_trained_with_what_is_fed_back(tiny):
    for history, metrics in run_ranks(losses, 2, tiny, HURRIED, 8):
        assert np.isfinite(history).all()
        if tiny.loss_scale is None:  # else a rank has infinities, which all matter
            assert metrics["priority share"] == pytest.approx(0.1, abs=0.02)
        assert 0 < metrics["residual share"] <= 1 and metrics["oldest residual"] >= 1
        assert "recovered share" not in metrics  # not known


def test_copies_follow_the_loss_within_the_budget():
    must = np.zeros((3, 1000), dtype=bool)
    must[:, :10] = True
    once = Repeats(None, 0.01)
    assert once.of(must) == (100, 0)
    for _ in range(32):
        once.report(np.random.default_rng(0).random(must.shape) < 0.05, must)
    assert once.of(must) == (100, 100)
    generous = Repeats(None, 0.025)
    for _ in range(32):
        generous.report(np.random.default_rng(0).random(must.shape) < 0.05, must)
    assert 100 < generous.of(must)[1] <= 250  # some are sent three times
    assert Repeats(None, 0.0).of(must) == (100, 0)
    tight = Repeats(None, 0.001)
    tight.report(np.ones_like(must), must)
    assert tight.of(must) == (100, 0)  # nine of ten would have none
    assert Repeats((7, 3), 0.0).of(must) == (7, 3)
    short = np.zeros((3, 30), dtype=bool)
    short[:, 0] = True
    assert generous.of(short) == (100, 0)  # one copy would be 3.3 %
