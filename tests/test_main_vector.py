"""The weights of an island as one vector, against one array."""

import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.mechanisms.islands import main_vector
from megatron_lossy.mechanisms.islands.main_vector import Segment, Vector, shard_vector
from megatron_lossy.mechanisms.islands.places import Places

pytestmark = pytest.mark.shows("the weights of an island as one vector")

CPU = torch.device("cpu")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=5), st.integers(1, 12), st.data()
)
def test_blocks_are_read_and_written_wherever_segments_end(lengths, block, data):
    size = sum(padding + length for padding, length in lengths)
    expected = np.zeros(size, dtype=np.float32)
    rounded_too = data.draw(st.booleans())
    segments, inside, start = [], np.zeros(size, dtype=bool), 0
    for padding, length in lengths:
        start += padding
        main = torch.randn(length)
        segments.append(Segment(start, main, main.bfloat16() if rounded_too else None))
        expected[start : start + length] = main.numpy()
        inside[start : start + length] = True
        start += length
    vector = Vector(segments, size, CPU)
    np.testing.assert_array_equal(vector.read(None), expected)
    for _ in range(3):
        blocks = data.draw(st.sets(st.integers(0, (size - 1) // block), min_size=1))
        elements = np.array([one for number in sorted(blocks) for one in range(number * block, (number + 1) * block)])
        elements = elements[elements < size]
        places = Places(np.array(sorted(blocks)), block, size, CPU)
        np.testing.assert_array_equal(vector.read(places), expected[elements])
        values = torch.randn(len(places))
        vector.write(places, values)
        expected[elements] = np.where(inside[elements], values.numpy(), 0)
        np.testing.assert_array_equal(vector.read(None), expected)
        plain = torch.arange(size)
        np.testing.assert_array_equal(places.read(plain), elements)
        places.write(plain, -plain[elements])
        np.testing.assert_array_equal(plain, np.where(np.isin(np.arange(size), elements), -1, 1) * np.arange(size))
    if rounded_too:
        for one in segments:
            assert torch.equal(one.rounded, one.main.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_has_its_part_of_weights_that_lie_across_its_ends(dtype, monkeypatch):
    """Two buckets of three shards; in the first one weight lies in all of them, and the last elements are padding."""
    sizes, starts, weights, mains = (12, 6), ([(0, 2), (2, 9)], [(0, 3), (3, 3)]), [], []
    for size, own in zip(sizes, starts, strict=True):
        main = torch.randn(size)
        main[sum(own[-1]) :] = 0
        mains.append(main)
        weights.append(main.clone() if dtype == torch.float32 else main.bfloat16())
    buckets = [types.SimpleNamespace(param_data=kept, number=number) for number, kept in enumerate(weights)]

    def pieces(optimizers, bucket, own, flag):
        found = [(start, mains[bucket.number][start : start + length]) for start, length in starts[bucket.number]]
        return found[::-1]

    monkeypatch.setattr(main_vector, "main_pieces", pieces)
    before = [main.clone() for main in mains]
    for shard in range(3):
        vector = shard_vector([], buckets, weights, shard, 3)
        expected = torch.cat([main.view(3, -1)[shard] for main in before])
        assert torch.equal(vector.read(None), expected)
        vector.write(None, expected + 1)
    written = weights if dtype == torch.float32 else mains
    for kept, after, main, own in zip(weights, written, before, starts, strict=True):
        end = sum(own[-1])
        assert torch.equal(after[:end], main[:end] + 1)
        assert torch.equal(kept[:end], after[:end].to(dtype))
