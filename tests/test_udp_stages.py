"""Messages between stages as datagrams, on the real megatron-core: without loss, with drawn losses, and over a link."""

import dataclasses

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from tests import contract
from tests.ranks import run_ranks
from tests.test_pipeline_boundaries import BOTH, DEEP, PLAIN, WAYS, check, record, same
from tests.tiny_gpt import TinyGPT

UDP = {"transport": "udp", "act_transport": "udp", "udp_cipher": "none"}
#: The losses of the drawn world: datagrams that come are dropped.
DRAWN = LossyConfig(**vars(BOTH) | UDP | {"loss_unit": "packet", "packet_bytes": 1408})
LOSSLESS = LossyConfig(**UDP, act_packet_bytes=200)


@pytest.mark.parametrize("name", WAYS)
def test_every_message_loses_what_is_drawn_for_it(name):
    """As over torch, though what is lost comes as a datagram, and is put together or sent again over the network."""
    world, tiny, model = WAYS[name]
    zeros = check(run_ranks(record, world, tiny, DRAWN, 2, model), tiny, DRAWN, itemsize=2 if "bf16" in name else 4)
    assert zeros["act"] and zeros["act-grad"]


@pytest.mark.parametrize(
    ("world", "tiny"),
    [(2, PLAIN), (2, DEEP), (4, TinyGPT(pipeline=2, accumulation=2, dtype="bf16"))],
    ids=["plain", "interleaved", "two replicas, bf16"],
)
def test_without_loss_it_is_megatron(world, tiny):
    same(run_ranks(contract.plain, world, tiny, LOSSLESS, 3), run_ranks(contract.plain, world, tiny, None, 3))
