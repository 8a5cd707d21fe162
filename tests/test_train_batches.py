"""A micro-batch crosses to the device in one piece, and is the stack of its samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.lab.train.data import on_device

pytestmark = pytest.mark.shows("a micro-batch is the stack of its samples", device=False)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_a_batch_is_the_stack_of_its_samples(count, length, seed):
    """To the last bit, also of masks with other numbers than 0 and 1, and for an odd number of them."""
    generator = torch.Generator().manual_seed(seed)
    samples = [
        {
            **{
                key: torch.randint(2**40, (length,), generator=generator)
                for key in ("tokens", "labels", "position_ids")
            },
            "loss_mask": torch.rand(length, generator=generator),
        }
        for _ in range(count)
    ]
    batch = on_device(samples, torch.device("cpu"))
    assert sorted(batch) == ["labels", "loss_mask", "position_ids", "tokens"]
    for key, values in batch.items():
        expected = torch.stack([sample[key] for sample in samples])
        assert torch.equal(values, expected) and values.dtype == expected.dtype and values.is_contiguous()
