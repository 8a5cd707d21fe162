"""Copies of an island's state: bit for bit, found when damaged, of the next sender if one fails."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.copying import (
    PART,
    DamagedCopy,
    HostCopy,
    held_state,
    put_state,
    receive_copy,
    send_copy,
)
from megatron_lossy.mechanisms.islands.rules import NoCorrection, make_rule
from tests.vectors import vectors_of

pytestmark = pytest.mark.shows("islands that copy another one")


class Wire:
    """Two ends in memory. ``flip``: the byte that is damaged on the way, of all that is sent."""

    def __init__(self, flip=None):
        self._queue, self._flip, self._sent = SimpleQueue(), flip, 0

    def send(self, data):
        assert 0 < len(data) <= PART
        data = data.clone()
        if self._flip is not None and 0 <= self._flip - self._sent < len(data):
            data[self._flip - self._sent] ^= 1
        self._sent += len(data)
        self._queue.put(data)

    def receive(self, data):
        came = self._queue.get()
        assert len(came) == len(data)
        data.copy_(came)


def across(values, made=7, flip=None):
    wire = Wire(flip)
    digest = send_copy(wire.send, values, made)
    return receive_copy(wire.receive), digest


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=5),
    st.integers(0, 99),
)
def test_all_comes_bit_for_bit(kinds, seed):
    torch.manual_seed(seed)
    tensors = {f"t{n}": (100 * torch.randn(shape)).to(dtype) for n, (dtype, shape) in enumerate(kinds)}
    copy, digest = across({name: HostCopy(one) for name, one in tensors.items()} | {"step": 3, "rate": 0.5}, made=12)
    assert copy.made == 12 and copy.digest == digest
    assert copy.values["step"] == 3 and copy.values["rate"] == 0.5
    for name, one in tensors.items():
        assert copy.values[name].dtype == one.dtype and copy.values[name].shape == one.shape
        assert torch.equal(copy.values[name], one)


@pytest.mark.parametrize("byte", [0, 1, 399, 400, 800])
def test_a_flipped_bit_is_found(byte):
    values = {"a": HostCopy(torch.randn(100)), "b": HostCopy(torch.randn(101))}
    wire = Wire()
    send_copy(wire.send, values, 7)
    header = wire._sent - 4 * 201
    with pytest.raises(DamagedCopy, match="[ab] is not what was sent"):
        across(values, flip=header + byte)


def test_a_copy_has_the_outer_weights_of_each_vector():
    config = LossyConfig(islands=2, sync_method="diloco")
    theirs, mine = ([make_rule(config, [torch.randn(5 + n)], None) for n in range(2)] for _ in range(2))
    theirs[1].buffer += 3
    nothing = [SimpleNamespace(held_state=lambda _: {"step": 3}, put_state=lambda *own: put.append(own)) for _ in mine]
    put, ends = [], [rounds_of(nothing, rules) for rules in (theirs, mine)]
    copy, _ = across(held_state(ends[0], "ab"))
    put_state(ends[1], "ab", copy.values)
    for here, there in zip(mine, theirs, strict=True):
        assert torch.equal(here.outer, there.outer) and torch.equal(here.buffer, there.buffer)
    put_state(ends[1], "ab", {})  # of a rank that exchanges nothing
    assert put == [("a", {"step": 3}), ("b", {"step": 3}), ("a", {}), ("b", {})]


def rounds_of(vectors, rules):
    return [SimpleNamespace(vectors=[one], rule=rule) for one, rule in zip(vectors, rules, strict=True)]


def test_what_is_held_is_the_state_at_that_time():
    values = torch.ones(10)
    held = HostCopy(values)
    values.zero_()
    copy, _ = across({"w": held})
    assert copy.values["w"].sum() == 10


def trained(seed, steps, **options):
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(n)) for n in (5, 3)]
    optimizers = [torch.optim.AdamW([one], lr=0.1 + seed, **options) for one in parameters]
    train(parameters, optimizers, steps)
    return parameters, optimizers


def train(parameters, optimizers, steps):
    for step in range(steps):
        for one, optimizer in zip(parameters, optimizers):
            one.grad = torch.full_like(one, 1.0 + step)
            optimizer.step()


@pytest.mark.parametrize("steps", [0, 4])
def test_a_copy_trains_on_as_its_source(steps):
    """From then on they are equal, at equal learning rates; these are not copied."""
    source, own = trained(0, 3, amsgrad=True), trained(1, steps, amsgrad=True)
    rules = [NoCorrection(), NoCorrection()]
    ends = [rounds_of(vectors_of([one.detach() for one in weights]), rules) for weights, _ in (source, own)]
    copy, _ = across(held_state(ends[0], source[1]))
    put_state(ends[1], own[1], copy.values)
    assert [one.param_groups[0]["lr"] for one in own[1]] == [1.1, 1.1]
    for optimizer in own[1]:
        optimizer.param_groups[0]["lr"] = 0.1
    train(*source, 2)
    assert not torch.equal(source[0][0], own[0][0])
    train(*own, 2)
    for theirs, mine in zip(source[0], own[0]):
        assert torch.equal(theirs, mine)
