"""Arguments that a wire gives to rules of recovery, for tests without a wire."""

import numpy as np

from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.mechanisms.priority.choosing import Priority, Protection
from megatron_lossy.mechanisms.priority.protected import RequiringRule, SparingRule
from megatron_lossy.recovery import Gradients

NONE = Protection()


def gradients(step=0, buffer=None, output=None, loss_scale=None, **options):
    """The record of an exchange of gradients in ``step``, whose buffers a test hands over by itself."""
    return Gradients(
        Exchange("grad", Stream(), step), 0, buffer, output, None, loss_scale=lambda: loss_scale, **options
    )


def reduce(group, bucket, buffer, output, step, *more, **options):
    """Begin the reduce-scatter of ``buffer`` through ``group``. ``more``, ``options``: fields of :class:`Gradients`."""
    return group.reduce_scatter(
        Gradients(Exchange("grad", group.stream, step), bucket, buffer, output, *more, **options)
    )


def spared(rule, protection=NONE):
    """``rule``, whose sender spares from drawn losses what ``protection`` says."""
    return SparingRule(rule, Priority(protection, rule.units, rule.rank))


def required(rule, protection=NONE):
    """``rule``, whose sender names the units that must arrive to the network."""
    return RequiringRule(rule, Priority(protection, rule.units, rule.rank))


def send(rule, buffer, delivery, x=None):
    """Let ``rule`` change ``buffer`` as a sender does over a collective; returns what the owner's verb is given."""
    x = gradients(delivery.exchange.step) if x is None else x
    return rule.before(buffer, delivery.lost_there(rule.units), delivery, x)


def assert_same(mine, theirs, place=""):
    """Nested mappings and sequences of arrays, numbers and texts, bit for bit. ``place``: named where they differ."""
    if isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(mine, theirs, place)
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), place
        for name, value in theirs.items():
            assert_same(mine[name], value, f"{place} {name}")
    elif isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs), place
        for number, value in enumerate(theirs):
            assert_same(mine[number], value, f"{place} {number}")
    else:
        assert mine == theirs, place


def assert_workers_are_ranks(virtual, real):
    """Losses and replicas of ``virtual_runs`` of tests/test_virtual.py are those of ranks, bit for bit."""
    for name, history in virtual.items():
        for step, (losses, _, replicas, _) in enumerate(history):
            for rank, ran in enumerate(real):
                loss, _, replica, _ = ran[name][step]
                assert losses[rank] == loss, (name, step, rank)
                assert_same(replicas[rank], replica, f"{name}, step {step}")


def delivered(channel, exchange, source, destination, units):
    """bool[units]: the units that arrive on one link of ``channel``, a channel or a network."""
    return channel.delivered_links(exchange, np.array([source]), np.array([destination]), units)[0]


def delivered_among(ranks, channel, exchange, units):
    """bool[N, N, units]: the units that arrive on each link between ``ranks``, senders first."""
    return np.array([[delivered(channel, exchange, a, b, units) for b in ranks] for a in ranks])
