"""Errors in reduced gradients: what they are by value, when they happen, and that nothing but their key matters."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.channel.corruption import make_corruption
from megatron_lossy.channel.corruption.applied import Errors, apply, digest
from megatron_lossy.channel.corruption.bit_flip import check_bits
from megatron_lossy.channel.draws import _exchange_word
from megatron_lossy.config import LossyConfig

pytestmark = pytest.mark.shows("errors in gradients by value: noise, flips, bursts")

SIZES = (100, 7, 3000)
TYPES = {16: torch.bfloat16, 32: torch.float32}


def model(**flags):
    return make_corruption(LossyConfig(**flags))


def exchange(step=0, **stream):
    return Exchange("grad", Stream(**stream), step)


def buffers(dtype=torch.float32, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=drawn).to(dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize("unit", [1.0, 1024.0])
def test_gaussian_noise_is_what_the_seed_says(dtype, unit):
    """In the dtype of the buffer, rounded once, in units of the gradient that the optimizer sees."""
    hit = model(grad_error="gaussian:0.25").events(exchange(), 1, SIZES, 32)
    assert [event.bucket for event in hit] == [0, 1, 2] and len({event.seed for event in hit}) == 3
    for event, buffer in zip(hit, buffers(dtype)):
        generator = torch.Generator().manual_seed(event.seed - 2**64 if event.seed >= 2**63 else event.seed)
        noise = torch.randn(len(buffer), generator=generator)
        expected = (buffer.float() + 0.25 * unit * noise).to(dtype)
        assert apply(buffer, event, unit) == event
        assert torch.allclose(
            buffer.float(), expected.float(), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
        )


def test_the_seed_of_noise_is_a_word_of_philox():
    hit = model(grad_error="gaussian:1.0", loss_seed=77).events(exchange(5, stage=2), 3, SIZES, 32)
    link = 3 << 32 | 3
    philox = np.random.Philox(key=[77, 2 * 17], counter=[0, 5, link, _exchange_word(exchange(5, stage=2))])
    assert [event.seed for event in hit] == philox.random_raw(3).tolist()


@given(std=st.floats(1e-3, 1e3), unit=st.sampled_from([1.0, 3.0, 1 / 7, 65536.0]), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_relative_noise_is_as_long_as_it_says_and_can_be_made_again(std, unit, seed):
    """The record, applied again, gives the same bits."""
    [*_, event] = model(grad_error=f"gaussian:{std}rms").events(exchange(), 0, SIZES, 32)
    buffer = unit * buffers(seed=seed)[2]
    before, again = buffer.clone(), buffer.clone()
    happened = apply(buffer, event, unit)
    rms = float(before.double().square().mean().sqrt())
    assert not happened.relative and happened.std * unit == pytest.approx(std * rms, rel=1e-5)
    # 3000 squares: six standard errors are 6 sqrt(2/3000) = 15 % of the variance.
    noise = (buffer.double() - before.double()).square().mean()
    assert float(noise) == pytest.approx((std * rms) ** 2, rel=0.16)
    assert apply(again, happened, unit) == happened and torch.equal(again, buffer)


def test_nothing_is_relative_to_no_gradient_or_to_an_infinite_one():
    event = model(grad_error="gaussian:1rms").events(exchange(), 0, SIZES, 32)[0]
    for value in (0.0, float("inf"), float("nan")):
        buffer = torch.full((100,), value)
        before = buffer.clone()
        assert apply(buffer, event) is None and torch.equal(buffer.isnan(), before.isnan())
        assert digest(buffer) == digest(before)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
def test_noise_of_any_allowed_size_can_be_added(dtype):
    for noise, unit in (("gaussian:3e38", 65536.0), ("gaussian:3e38rms", 1.0)):
        [event] = model(grad_error=noise).events(exchange(), 0, [100], 32)
        buffer = torch.full((100,), 1e3, dtype=dtype)
        happened = apply(buffer, event, unit)
        assert not torch.isfinite(buffer).all() and (buffer != 1e3).any() and happened.std > 1e38


def test_bursts_replace_the_noise_of_every_nth_iteration():
    base = model(grad_error="gaussian:0.5,5,9.0")
    assert [base.events(exchange(t), 0, SIZES, 32)[0].std for t in range(11)] == [0.5] * 4 + [9] + [0.5] * 4 + [9, 0.5]
    alone = model(grad_error="gaussian:0rms,5,9.0")
    hit = [alone.events(exchange(t), 0, SIZES, 32) for t in range(10)]
    assert [len(events) for events in hit] == [0, 0, 0, 0, 3] * 2 and all(event.relative for event in hit[4])
    assert not model(grad_error="gaussian:0,5,9.0").events(exchange(4), 0, SIZES, 32)[0].relative


@pytest.mark.parametrize("width", TYPES)
def test_flips_are_exact(width):
    """Flipped again, everything is as before; each flip changes the bit it names and no other."""
    flips = model(grad_error="bit-flip:50")
    hit = flips.events(exchange(), 0, SIZES, width)
    assert sum(len(event.elements) for event in hit) == 50
    data = buffers(TYPES[width])
    before = [buffer.clone() for buffer in data]
    for event in hit:
        assert len(set(event.elements)) == len(event.elements) == len(event.bits)
        assert apply(data[event.bucket], event) == event
    kind = {16: np.uint16, 32: np.uint32}[width]
    changed = 0
    for event in hit:
        now, then = (
            one[event.bucket].view({16: torch.int16, 32: torch.int32}[width]).numpy().view(kind)
            for one in (data, before)
        )
        expected = np.zeros_like(now)
        expected[list(event.elements)] = [1 << bit for bit in event.bits]
        assert np.array_equal(now ^ then, expected)
        changed += len(event.elements)
    for event in hit:
        apply(data[event.bucket], event)
    assert changed == 50 and all(digest(a) == digest(b) for a, b in zip(data, before))


def test_flips_are_uniform_over_elements_and_bits():
    """1e5 flips of 16 bits and of three buckets: each count within five standard errors (6e-7 a bit by chance)."""
    flips = model(grad_error="bit-flip:1000,4,19")
    hit = [event for t in range(100) for event in flips.events(exchange(t), 0, (10000, 5000, 25000), 32)]
    bits = np.bincount([bit for event in hit for bit in event.bits], minlength=20)
    assert not bits[:4].any() and len(bits) == 20
    assert abs(bits[4:] / 1e5 - 1 / 16).max() < 5 * np.sqrt(1 / 16 * 15 / 16 / 1e5)
    buckets = np.bincount([event.bucket for event in hit], [len(event.elements) for event in hit]) / 1e5
    assert abs(buckets - np.array([10, 5, 25]) / 40).max() < 5 * np.sqrt(0.25 / 1e5)


def test_more_flips_than_elements_hit_all():
    [event] = model(grad_error="bit-flip:100").events(exchange(), 0, (7,), 32)
    assert sorted(event.elements) == list(range(7))


def test_the_rate_and_the_ranks_are_those_of_the_flags():
    """Four ranks, 5000 iterations: within five standard errors, and independent between ranks."""
    flips = model(grad_error="bit-flip", grad_error_rate=0.2, grad_error_ranks=(0, 2, 3))
    happened = np.array([[bool(flips.events(exchange(t), rank, SIZES, 32)) for rank in range(4)] for t in range(5000)])
    assert not happened[:, 1].any()
    assert abs(happened[:, [0, 2, 3]].mean(axis=0) - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / 5000)
    assert abs(np.corrcoef(happened[:, 0], happened[:, 2])[0, 1]) < 5 / np.sqrt(5000)
    none = model(grad_error="bit-flip", grad_error_rate=0.0)
    assert not any(none.events(exchange(t), 0, SIZES, 32) for t in range(100)) and none.config.inert


def test_only_the_key_matters():
    """Another object, another order, another process: the same. Another rank, step, stream, seed: something else."""
    flags = dict(grad_error="bit-flip:20")
    keys = [(exchange(t, stage=stage), rank) for t in range(3) for stage in range(2) for rank in range(3)]
    forwards = {key: model(**flags).events(*key, SIZES, 32) for key in keys}
    one = model(**flags)
    assert all(one.events(*key, SIZES, 32) == forwards[key] for key in reversed(keys))
    places = {tuple((event.bucket, event.elements) for event in events) for events in forwards.values()}
    assert len(places) == len(keys)
    assert model(loss_seed=1, **flags).events(*keys[0], SIZES, 32) != forwards[keys[0]]


def test_tensor_parallel_peers_and_tied_embeddings_are_hit_alike():
    noise = model(grad_error="gaussian:1.0")

    def seeds(**stream):
        return [event.seed for event in noise.events(exchange(2, **stream), 1, SIZES, 32)]

    assert seeds(tensor=0) == seeds(tensor=1) == seeds()
    assert seeds(kind="embedding") == seeds(kind="embedding", stage=3) != seeds()


@pytest.mark.parametrize("flags", [dict(grad_error="gaussian:2rms"), dict(grad_error="bit-flip:90")])
def test_padding_is_never_hit(flags):
    ranges = [(0, 30), (40, 41), (50, 100)]
    [event] = model(**flags).events(exchange(), 0, (81,), 32)
    buffer = torch.ones(100)
    apply(buffer, event, ranges=ranges)
    padding = np.ones(100, dtype=bool)
    for first, last in ranges:
        padding[first:last] = False
    assert (buffer.numpy()[padding] == 1).all() and (buffer.numpy()[~padding] != 1).all()


def test_what_happened_is_told_once():
    """Also that nothing did, and that an error in units of no gradient was nothing."""
    ranges = [np.array([[0, size]]) for size in SIZES]
    errors = Errors(model(grad_error="gaussian:1rms", grad_error_rate=0.5), 1, ranges, 32)
    hits = []
    for t in range(20):
        for bucket, buffer in enumerate(buffers()):
            errors.hit(exchange(t), bucket, buffer * (bucket != 1))
        assert errors.take(t + 1) == []
        [reduction] = errors.take(t)
        assert errors.take(t) == [] and (reduction.sizes, reduction.width, reduction.rank) == (tuple(SIZES), 32, 1)
        hits.append(([hit.event.bucket for hit in reduction.hits], list(reduction.spared)))
    assert hits.count(([0, 2], [1])) + hits.count(([], [])) == 20 and {len(one) for one, _ in hits} == {0, 2}


def test_bits_of_short_gradients():
    config = LossyConfig(grad_error="bit-flip:1,10,16")
    with pytest.raises(UsageError, match="--grad-error bit-flip:1,10,16: needs 0 <= LOW <= HIGH <= 15"):
        check_bits(config, 16)
    assert LossyConfig(grad_error="bit-flip", grad_error_at="reduce", p_param=0.1).errs
