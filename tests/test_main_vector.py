"""The weights of an island as one vector, against one array."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.hooks.main_vector import Segment, Vector
from megatron_lossy.sync import Places

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
