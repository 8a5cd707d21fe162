"""Cutting into units, and changing units in place, as properties."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.errors import UsageError
from megatron_lossy.exchange import Lost, cut
from megatron_lossy.recovery import IndexedRows, MaskedRows

pytestmark = pytest.mark.shows("units are cut, scaled, removed and put back in place")

shards = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(shards=shards, packet=st.integers(4, 70), itemsize=st.sampled_from([2, 4]))
def test_packets_cover_every_shard_once(shards, packet, itemsize):
    cuts, total = cut(shards, [itemsize] * len(shards), "packet", packet)
    assert cuts[0].first == 0
    for before, after in itertools.pairwise(cuts):
        assert after.first == before.first + before.count
    assert total == cuts[-1].first + cuts[-1].count
    for units, shard in zip(cuts, shards):
        assert units.elements * itemsize <= packet
        assert units.whole * units.elements + units.tail == shard
        assert units.count == units.whole + (units.tail > 0)
        assert units.count == -(-shard * itemsize // (packet // itemsize * itemsize))


def test_buckets_and_shards():
    assert [u.first for u in cut([5, 6], [4, 2], "bucket", 1)[0]] == [0, 1]
    assert [u.first for u in cut([5, 6], [4, 2], "shard", 1)[0]] == [0, 0]
    assert cut([5, 6], [4, 2], "bucket", 1)[1] == 2 and cut([5, 6], [4, 2], "shard", 1)[1] == 1
    with pytest.raises(UsageError, match="--packet-bytes 3: must hold at least one element of 4 bytes"):
        cut([5], [4], "packet", 3)


@st.composite
def buckets(draw):
    """A bucket inside a larger storage, how it is cut, and what of it is lost."""
    size, shard = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    unit = draw(st.sampled_from(["shard", "packet"]))
    [units], _ = cut([shard], [4], unit, 4 * draw(st.integers(1, 12)))
    lost = np.array(draw(st.lists(st.booleans(), min_size=size * units.count, max_size=size * units.count)))
    return size, units, lost.reshape(size, units.count)


def elements(size, units, lost):
    """bool[N * shard]: the elements of the lost units, the slow way."""
    mask = np.zeros((size, units.shard), dtype=bool)
    for shard in range(size):
        for unit in range(units.count):
            if lost[shard, unit]:
                mask[shard, unit * units.elements : (unit + 1) * units.elements] = True
    return mask.ravel()


@settings(deadline=None)
@given(buckets(), st.sampled_from([IndexedRows, MaskedRows]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows(bucket, rows, dtype):
    size, units, lost = bucket
    mask = torch.from_numpy(elements(size, units, lost))
    storage = torch.arange(1.0, size * units.shard + 8).to(dtype)
    storage[5] = float("inf")
    before = storage.clone()
    buffer = storage[3 : 3 + size * units.shard]
    saved = rows.take(buffer, units, Lost(lost))
    assert torch.equal(storage, before)
    rows.zero_(buffer, units, Lost(lost))
    assert torch.equal(buffer, torch.where(mask, torch.zeros((), dtype=dtype), before[3 : 3 + mask.numel()]))
    assert torch.equal(storage[:3], before[:3]) and torch.equal(storage[3 + mask.numel() :], before[3 + mask.numel() :])
    buffer.add_(1)
    changed = buffer.clone()
    rows.put_(buffer, units, Lost(lost), saved)
    assert torch.equal(buffer, torch.where(mask, before[3 : 3 + mask.numel()], changed))


@settings(deadline=None)
@given(buckets())
def test_indexed_rows_keep_only_what_was_lost(bucket):
    size, units, lost = bucket
    buffer = torch.ones(size * units.shard)
    saved = IndexedRows.take(buffer, units, Lost(lost))
    kept = sum(part.numel() for parts in saved for part in parts if part.is_floating_point())
    assert kept == elements(size, units, lost).sum()


@settings(deadline=None)
@given(buckets(), st.data(), st.sampled_from([IndexedRows, MaskedRows]))
def test_scale(bucket, data, rows):
    _, units, _ = bucket
    factors = np.array(
        data.draw(st.lists(st.sampled_from([1.0, 2.0, 4 / 3]), min_size=units.count, max_size=units.count))
    )
    shard = torch.arange(1.0, units.shard + 1)
    expected = shard.numpy() * np.repeat(factors.astype(np.float32), units.elements)[: units.shard]
    rows.scale_(shard, units, factors)
    np.testing.assert_array_equal(shard.numpy(), expected)


def test_what_is_taken_holds_no_more_memory_than_it_has_values():
    """Saving a tensor saves all of its storage."""
    [units], _ = cut([30], [4], "packet", 28)
    lost = Lost(np.arange(2 * units.count).reshape(2, -1) % 3 == 0)
    for parts in IndexedRows.take(torch.arange(60.0), units, lost):
        assert parts
        for part in parts:
            assert part.untyped_storage().nbytes() == part.numel() * part.itemsize
