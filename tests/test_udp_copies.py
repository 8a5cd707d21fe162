"""Packets that are sent several times: their order, what is drawn, what a network loses, and what is recorded."""

import contextlib
import dataclasses
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.channel import make_channel
from megatron_lossy.config import LossyConfig
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from megatron_lossy.lab.delivery_log.verify import verify
from megatron_lossy.lab.virtual.in_memory import LossyWorkers
from megatron_lossy.run.monitor.drift import predicted
from megatron_lossy.transport import BucketSpec
from megatron_lossy.transport.udp import Channel
from tests.ranks import run_ranks
from tests.rules import assert_same, delivered
from tests.test_transport import exchange_grads, gather_params
from tests.trainer import TINY, recorded_losses, train_runs
from tests.udp_packet import DATA, END
from tests.udp_world import SECOND, Node, fields_of

pytestmark = pytest.mark.shows("packets sent several times: drawn as over UDP, and replayed")

UNIT = 64
PACKETS = {"loss_unit": "packet", "packet_bytes": 48}
STREAM = Stream()


@settings(deadline=None, max_examples=40)
@given(
    p=st.floats(0.01, 0.9),
    copies=st.integers(1, 4),
    model=st.sampled_from(["bernoulli", "gilbert-elliott:3"]),
    together=st.booleans(),
    step=st.integers(0, 5),
)
def test_a_unit_is_lost_if_all_its_copies_are(p, copies, model, together, step):
    """The first copy is that of a run that sends one, and more copies never lose more."""
    if model != "bernoulli":
        p = min(p, 0.7)  # a mean burst of 3 cannot have more
    config = LossyConfig(p_grad=p, loss_model=(model,), loss_correlation="source" if together else "independent")
    sources, destinations, exchange = np.array([0, 0, 1]), np.array([1, 2, 0]), Exchange("grad", STREAM, step)
    several = [
        make_channel(dataclasses.replace(config, packet_copies=(number,)), "grad").delivered_links(
            exchange, sources, destinations, 300
        )
        for number in range(1, copies + 1)
    ]
    for fewer, more in itertools.pairwise(several):
        assert (fewer <= more).all()
    if together:
        np.testing.assert_array_equal(several[-1][0], several[-1][1])
    link = delivered(make_channel(dataclasses.replace(config, packet_copies=(copies,)), "grad"), exchange, 1, 0, 300)
    np.testing.assert_array_equal(link, several[-1][2])


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_rate_is_that_of_all_copies_together(copies):
    """Independent copies, within five standard errors; parameters have their own number."""
    p, units = 0.4, 200_000
    config = LossyConfig(p_grad=p, p_param=p, packet_copies=(copies, 1))
    for phase, power in (("grad", copies), ("param", 1)):
        lost = ~delivered(make_channel(config, phase), Exchange(phase, STREAM, 0), 0, 1, units)
        expected = p**power
        assert abs(lost.mean() - expected) < 5 * (expected * (1 - expected) / units) ** 0.5


def test_no_closed_form_is_told_for_several_copies():
    config = LossyConfig(p_param=0.2)
    assert predicted(config, 0, 4, 1) is not None
    assert predicted(dataclasses.replace(config, packet_copies=(1, 2)), 0, 4, 1) is None
    assert make_channel(dataclasses.replace(config, packet_copies=(2,)), "param").lag(0, 0, np.array([1]), 1) is None


@pytest.mark.parametrize("copies", [(2,), (1, 3)])
def test_with_drawn_losses_it_is_pieces(copies, pool):
    config = LossyConfig(p_grad=0.5, p_param=0.5, transport="udp", packet_bytes=48, packet_copies=copies)
    pieces = LossyConfig(p_grad=0.5, p_param=0.5, transport="pieces", **PACKETS, packet_copies=copies)
    once = dataclasses.replace(pieces, packet_copies=(1,))
    for exchange in (exchange_grads, gather_params):
        mine, theirs, other = (pool.run(exchange, 3, 3, one, [500, 50], True) for one in (config, pieces, once))
        assert_same(mine, theirs)
        differ = copies != (1, 3) or exchange is gather_params
        with pytest.raises(AssertionError) if differ else contextlib.nullcontext():
            assert_same(mine, other)


def channel_of(node, units):
    """A channel over ``node`` for :meth:`Channel.copies`."""
    channel = Channel.__new__(Channel)
    channel.phases, channel._units, channel.name = ("grad", "param"), {"grad": [units]}, "x"
    channel._lib, channel._channel, channel._users, channel._ends = node.lib, node.channel, 0, False
    channel._lock = threading.Condition()
    return channel


@pytest.mark.parametrize(("passes", "chosen"), [(2, []), (2, [1, 7]), (3, [4]), (4, [])])
def test_all_units_leave_before_one_leaves_again(passes, chosen):
    """So that no burst takes both; the end comes last. Units with copies of parameters are sent three times at least."""
    node = Node(0, 2, {"grad": [(10 * UNIT - 7, UNIT)]})
    mask = np.zeros(10, bool)
    mask[chosen] = True
    channel_of(node, 10).copies("grad", 0, mask, passes)
    node.send("grad", 0, 0, np.zeros((2, 10 * UNIT - 7), np.uint8))
    said = [fields_of(datagram) for _, datagram in node.produce_all(SECOND)]
    units = [fields["index"] for kind, fields in said if kind == DATA]
    assert units == [*range(10)] * passes + chosen * (3 - passes)
    assert all(fields["tag"] == 1 for kind, fields in said if kind == DATA)
    kinds = [kind for kind, _ in said if kind in (DATA, END)]
    assert END in kinds and DATA not in kinds[kinds.index(END) :]
    node.close()


def test_units_with_copies_are_sent_three_times_with_their_tag():
    """Spread over the message: the loss of any third of it loses none of them."""
    node, mask = Node(0, 2, {"grad": [(10 * UNIT, UNIT)]}), np.zeros(10, bool)
    mask[[0, 4]] = True
    channel_of(node, 10).copies("grad", 0, mask)
    node.send("grad", 0, 0, np.zeros((2, 10 * UNIT), np.uint8))
    said = [fields for kind, fields in (fields_of(one) for _, one in node.produce_all(SECOND)) if kind == DATA]
    units = [fields["index"] for fields in said]
    assert sorted(units) == sorted([*range(10), 0, 0, 4, 4])
    assert all(fields["tag"] == (fields["index"] in (0, 4)) for fields in said)
    for unit in (0, 4):
        assert min(np.diff([place for place, other in enumerate(units) if other == unit])) >= 3
    node.close()


def test_bytes_that_cross_are_counted_with_all_copies():
    config = LossyConfig(**PACKETS, packet_copies=(2, 3))
    [group, _] = LossyWorkers(config, [BucketSpec(500)], 2).groups
    assert group.wire.shard_bytes == {"grad": 2 * 500 * 4, "param": 3 * 500 * 4}


def test_what_came_in_the_end_is_recorded_and_replayed(data, tmp_path):
    """Digests are drawn again with all copies; a replay sends none of its own."""
    base = TINY | data | {"train_iters": 4, "log_interval": 1, "virtual_workers": 3, "global_batch_size": 6}
    loss = {"loss_unit": "packet", "packet_bytes": 256, "packet_copies": (2, 3)}
    log = str(tmp_path / "log")
    first = (base | {"save": str(tmp_path / "a")}, loss | {"p_grad": 0.6, "p_param": 0.6, "delivery_log": log})
    run_ranks(train_runs, 1, first)
    verdict = verify(DeliveryLogFolder(tmp_path / "log"))
    assert not verdict.problems, verdict.problems
    run_ranks(train_runs, 1, (base | {"save": str(tmp_path / "b")}, loss | {"loss_model": ("trace",), "trace": log}))
    first, again = (recorded_losses(tmp_path / name) for name in "ab")
    assert first == again
    rates = dict(first[-1]) if "loss rate grad" in dict(first[-1]) else dict(first[0])
    assert rates["loss rate grad"] == pytest.approx(0.36, abs=0.03)
    assert rates["loss rate param"] == pytest.approx(0.216, abs=0.03)


@pytest.mark.parametrize("copies", [(0,), (5,), (1, 2, 3), ()])
def test_refused(copies):
    with pytest.raises(UsageError, match=r"^--packet-copies .*: must be one or two numbers in \[1, 4\]"):
        LossyConfig(packet_copies=copies)
