"""Priorities of parameters: what an owner chooses, and that all replicas have it (docs/smart.md)."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.config import LossyConfig
from megatron_lossy.errors import UsageError
from megatron_lossy.exchange import cut
from megatron_lossy.mechanisms.priority.choosing import ParamPriority
from megatron_lossy.transport import check_owners
from tests import contract
from tests.in_lab import run_in_lab
from tests.ranks import run_ranks
from tests.reference import pieces
from tests.test_hooks import OVERLAPS
from tests.test_lab import needs_lab
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows(
    "parameters that changed most: chosen by value, virtual replicas have them",
    "copies on tensor-parallel ranks stay equal where senders choose",
)

UDP = LossyConfig(transport="udp", packet_bytes=256, param_priority="change:0.1", udp_key_file="none")
VIRTUAL = LossyConfig(p_param=0.5, loss_unit="packet", packet_bytes=256, param_priority="change")


def units_of(shard, elements, itemsize=4):
    [units], _ = cut([shard], [itemsize], "packet", itemsize * elements)
    return units


# --- what is chosen --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 9), st.floats(0, 1), st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)  # fmt: skip
def test_what_has_changed_most_since_it_was_certain(shard, elements, fraction, dtype, seed):
    """Against NumPy, over six steps of a walk."""
    random, units = np.random.default_rng(seed), units_of(shard, elements)
    priority, cuts = ParamPriority(fraction, units), pieces(shard, elements)
    weights = torch.from_numpy(random.standard_normal(shard)).to(dtype)
    certain = weights.float().numpy()
    assert not priority.choose(weights, 0).any()
    for step in range(1, 6):
        weights = (weights.float() + torch.from_numpy(random.standard_normal(shard)).float()).to(dtype)
        now = weights.float().numpy()
        sizes = np.array([np.abs(now[piece] - certain[piece]).mean(dtype=np.float64) for piece in cuts])
        chosen = priority.choose(weights, step)
        assert chosen.sum() == int(fraction * len(cuts) + 0.5)
        if chosen.any() and not chosen.all():  # sums are rounded
            assert sizes[chosen].min() >= sizes[~chosen].max() * (1 - 1e-5)
        for piece, sure in zip(cuts, chosen, strict=True):
            certain[piece] = now[piece] if sure else certain[piece]


def test_sent_again_it_is_the_same():
    weights, units = torch.arange(12.0), units_of(12, 2)
    priority = ParamPriority(0.5, units)
    priority.choose(weights, 3)
    weights[4:8] += 1
    first = priority.choose(weights, 4).copy()
    assert first[[2, 3]].all() and first.sum() == 3
    np.testing.assert_array_equal(priority.choose(weights, 4), first)
    weights[[0, 2, 8]] += 0.1
    assert not priority.choose(weights, 5)[[2, 3]].any()


def test_every_packet_has_its_turn():
    """Where all change alike, in as many steps as it takes; the largest values would be the same ones in every step."""
    weights, priority = torch.arange(100.0), ParamPriority(0.1, units_of(100, 1))
    priority.choose(weights, 0)
    turns = np.zeros(100, dtype=int)
    for step in range(1, 31):
        weights += 1
        turns += priority.choose(weights, step)
    assert (turns == 3).all()


def test_values_that_are_none_are_always_chosen():
    weights, priority = torch.zeros(8), ParamPriority(0.0, units_of(8, 2))
    priority.choose(weights, 0)
    weights[5] = torch.nan
    assert priority.choose(weights, 1).tolist() == [False, False, True, False]


def test_after_a_checkpoint_it_goes_on_bit_for_bit():
    random = np.random.default_rng(0)
    steps = [torch.from_numpy(random.standard_normal(40)).float() for _ in range(8)]
    one, other = ParamPriority(0.3, units_of(40, 4)), ParamPriority(0.3, units_of(40, 4))
    for step in range(4):
        one.choose(steps[step], step)
    other.load_state_dict(one.state_dict(), torch.device("cpu"))
    one.choose(steps[0] * 9, 99)  # what was saved is not what goes on
    assert not np.array_equal(one.choose(steps[4], 4), other.choose(steps[4], 4))
    other.restart()
    assert not other.choose(steps[5], 5).any()


# --- in one process ----------------------------------------------------------------------------------------------------


def virtual(rank, config, workers, steps):
    """By step, what replicas have of the latest update, and what arrived and was chosen; the weights; metrics."""
    from megatron_lossy.virtual import VirtualCluster
    from tests.tiny_gpt import build

    cluster = VirtualCluster(config, workers, steps=steps)
    run = build(TinyGPT(loss_scale=8.0), cluster)
    history = []
    for step in range(steps):
        run.step(step, overflow_on=0 if step == 2 else None)
        [stream] = cluster.streams
        delivery = stream.delivery("param", step)
        chosen = [[rule.priority._chosen.copy() for rule in group.params] for group in stream.groups]
        history.append((stream.versions.held == stream.versions.current, delivery.arrived, delivery.final, chosen))
    replicas, owners = run.all_replica_buffers(), run.replica_buffers()
    metrics = cluster.metrics()
    cluster.uninstall()
    return history, replicas, owners, metrics


def test_virtual_replicas_have_what_was_chosen():
    """And of the rest what was drawn. A step that is skipped brings nothing."""
    config = dataclasses.replace(VIRTUAL, param_priority="change:0.2")
    [(history, *_)] = run_ranks(virtual, 1, config, 3, 6)
    spared = 0
    for step, (held, arrived, final, chosen) in enumerate(history):
        if step == 2:
            assert final is None
            continue
        for source in range(3):
            high = np.concatenate(chosen[source])
            assert high.any() == (step > 0) and abs(high.mean() - 0.2 * (step > 0)) < 0.05
            for receiver in range(3):
                expected = arrived[receiver, source] | high
                np.testing.assert_array_equal(final[receiver, source], expected)
                np.testing.assert_array_equal(held[receiver, source], expected)
            spared += int((high & ~arrived[:, source]).sum())
    assert spared > 0


def test_with_every_packet_of_high_priority_virtual_replicas_are_equal():
    [(_, replicas, owners, metrics)] = run_ranks(
        virtual, 1, dataclasses.replace(VIRTUAL, param_priority="change:1.0"), 3, 4
    )
    for replica in replicas:
        for name, owner in owners.items():
            np.testing.assert_array_equal(replica[name], owner)
    # The draws lose as much as ever; only the first update left anything stale, for a step.
    assert metrics["loss rate param"] == pytest.approx(0.5, abs=0.05) and metrics["stale age max"] == 1
    [(_, replicas, owners, _)] = run_ranks(virtual, 1, dataclasses.replace(VIRTUAL, param_priority="change:0.0"), 3, 4)
    assert any(not np.array_equal(replica[name], owner) for replica in replicas for name, owner in owners.items())


# --- over UDP ----------------------------------------------------------------------------------------------------------


@pytest.mark.shows("over a link that loses a tenth, what changed most arrives")
@needs_lab
@pytest.mark.parametrize("fec", [pytest.param(("auto",), marks=pytest.mark.slow), ("10", "0")])
def test_over_a_link_that_loses_a_tenth_what_has_changed_most_arrives(fec):
    flags = {
        "transport": "udp", "param_priority": "change:0.1", "packet_bytes": 256,
        "udp_interface": "lab0", "udp_fec": ("auto", "20") if fec == ("auto",) else fec,
    }  # fmt: skip
    output = run_in_lab("tests.in_lab", "gathered", json.dumps(flags), "25", loss=0.1)
    told = [json.loads(found) for found in re.findall(r"\{\"rank\".*?\}", output)]
    assert len(told) == 2, output
    for one in told:
        assert one["must"] == 0 and one["wrong"] == 0 and one["lost"] > 0 and one["high"] > 0, one
        # Senders hear of what was lost, and the code follows it.
        assert one["parities"] > 0 if fec == ("auto",) else one["resent"] > 0, one


def test_without_loss_it_is_megatron():
    tiny = TinyGPT(dtype="bf16", accumulation=2, **OVERLAPS["both"])
    both = dataclasses.replace(UDP, grad_recovery="error-feedback")
    mine, theirs = run_ranks(contract.plain, 2, tiny, both, 4), run_ranks(contract.plain, 2, tiny, None, 4)
    for (weights, reports), (expected, expected_reports) in zip(mine, theirs, strict=True):
        assert reports == expected_reports
        for name, value in expected.items():
            np.testing.assert_array_equal(weights[name], value, err_msg=name)


def hurried(rank, config, steps):
    """Trained with exchanges that end before all has arrived; what waits for reports in the end."""
    from megatron_lossy import hooks
    from tests.tiny_gpt import build

    lossy = hooks.install(config)
    run = build(TinyGPT(tensor=2, **OVERLAPS["both"]))
    losses = [run.step(step)["loss"] for step in range(steps)]
    waiting = max(len(group.wire._unreported) / len(group.params) for group in lossy.groups)
    lossy.uninstall()
    return losses, waiting


def test_with_tensor_parallel_copies_reports_are_forgotten():
    for losses, waiting in run_ranks(hurried, 4, dataclasses.replace(UDP, udp_deadline="200"), 5):
        assert np.isfinite(losses).all()
        assert waiting <= 2  # what was reported is asked for, and forgotten


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"param_priority": "value"}, "--param-priority value: must be one of none, change"),
        ({"param_priority": "change:1.1"}, "--param-priority change:1.1: must be one of none, change[:K]"),
        ({"param_priority": "change:nan"}, "--param-priority change:nan: must be one of"),
        ({"param_priority": "none:0.1"}, "--param-priority none:0.1: must be one of"),
        ({"param_send": "compensated"}, "--param-priority change:0.1 with --param-send compensated: cannot be"),
        ({"p_param": 0.1}, "--param-priority change:0.1 over UDP with parameters lost by drawing: cannot be"),
        ({"packet_bytes": 12}, "--packet-bytes 12: must be at least 16 with --param-priority over UDP"),
    ],
)
def test_bad_flags(flags, error):
    with pytest.raises(UsageError, match=re.escape(error)):
        dataclasses.replace(UDP, **flags)


def test_it_needs_packets():
    with pytest.raises(UsageError, match="--param-priority change: needs --loss-unit packet"):
        dataclasses.replace(VIRTUAL, loss_unit="shard")


@pytest.mark.parametrize("transport", ["torch", "pieces"])
def test_real_ranks_need_udp(transport):
    with pytest.raises(
        UsageError, match=f"--param-priority change with --transport {transport}: needs virtual workers"
    ):
        check_owners(dataclasses.replace(VIRTUAL, transport=transport))
    check_owners(UDP)


# --- copies on tensor-parallel ranks stay equal where senders choose, from what they send, what arrives --------------


PACKETS = {"loss_unit": "packet", "packet_bytes": 256}
CHOSEN = {"grad_priority": "packet-mean:0.1"}
FEEDBACK = {"grad_recovery": "error-feedback", **CHOSEN}
ALL_REDUCED = {"distributed_optimizer": False}


def apart(rank, cases, steps, dropped=0.0):
    """How far copies are apart after ``steps`` of each case (settings, config); ``dropped``: share of first arrivals."""
    from megatron.core import parallel_state

    from megatron_lossy import hooks

    if dropped:
        drop_arrivals(rank, dropped)
    found = []
    for model, config in cases:
        lossy = hooks.install(config)
        run = build(TinyGPT(tensor=2, **model))
        first = [parameter.detach().clone() for parameter in run.model[0].parameters()]
        for step in range(steps):
            run.step(step)
        group, worst = parallel_state.get_tensor_model_parallel_group(), 0.0
        for parameter in run.model[0].parameters():
            if not getattr(parameter, "tensor_model_parallel", False):
                copies = [torch.empty_like(parameter) for _ in range(2)]
                dist.all_gather(copies, parameter.detach().contiguous(), group=group)
                worst = max(worst, float((copies[0] - copies[1]).abs().max()))
        moved = max(float((a - b).abs().max()) for a, b in zip(first, run.model[0].parameters(), strict=True))
        lost = {}
        for phase, step in {"grad": steps - 1, "param": steps - 2}.items():  # the last gather may be still to come
            known = [group.delivery(phase, step) for group in lossy.groups if not group.lossless(phase)]
            lost[phase] = sum(int((~delivery.arrived).sum()) for delivery in known)
        found.append((worst, moved, lost))
        lossy.uninstall()
    return found


def drop_arrivals(rank, share):
    """Let units count as lost when they come for the first time, each of which is sent once."""
    from megatron_lossy.transport.udp.engine import Channel

    random, post = np.random.default_rng(rank), Channel.post

    def posted(self, phase, step, bucket, destinations, *rest, **options):
        options["dropped"] = random.random(self._units[phase][bucket]) < share
        return post(self, phase, step, bucket, destinations, *rest, **options)

    Channel.post, Channel.copies = posted, lambda *_: None


def test_copies_stay_equal_with_drawn_losses():
    lossy = {"p_grad": 0.4, **PACKETS}
    cases = [
        ({}, LossyConfig(grad_recovery="zero", **CHOSEN, **lossy)),
        ({}, LossyConfig(**FEEDBACK, **lossy)),
        ({}, LossyConfig(transport="pieces", **FEEDBACK, **lossy)),
        (ALL_REDUCED, LossyConfig(param_sync_interval=2, **FEEDBACK, **lossy)),
    ]
    for found in run_ranks(apart, 4, cases, 6):
        assert all(worst == 0 and moved > 1e-3 and lost["grad"] > 0 for worst, moved, lost in found), found


def test_copies_stay_equal_with_losses_of_a_network():
    udp = {"transport": "udp", "packet_bytes": 256, "udp_key_file": "none"}
    cases = [
        ({}, LossyConfig(**FEEDBACK, **udp)),
        ({}, LossyConfig(grad_recovery="zero", **CHOSEN, **udp)),
        ({}, LossyConfig(param_priority="change:0.1", **udp)),
    ]
    for found in run_ranks(apart, 4, cases, 6, 0.3):
        assert all(worst == 0 and moved > 1e-3 and min(lost.values()) > 0 for worst, moved, lost in found), found
