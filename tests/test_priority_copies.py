"""Copies on tensor-parallel ranks stay equal where senders choose, from what they send, what arrives (docs/smart.md)."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lossy.config import LossyConfig
from tests.ranks import run_ranks
from tests.test_hooks import OVERLAPS
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows("copies on tensor-parallel ranks stay equal where senders choose")

PACKETS = {"loss_unit": "packet", "packet_bytes": 256}
CHOSEN = {"grad_priority": "packet-mean:0.1"}
FEEDBACK = {"grad_recovery": "error-feedback", **CHOSEN}
WINDOWS = {"udp_memory": 2**16}


def apart(rank, cases, steps, dropped=0.0):
    """Return the distance of copies after ``steps`` of each case (settings, config); ``dropped``: share of units."""
    from megatron.core import parallel_state

    from megatron_lossy import hooks

    if dropped:
        drop(rank, dropped)
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


def drop(rank, share):
    """Lose a share of units, each of which is sent once."""
    from megatron_lossy.transport.udp import Channel
    from tests.udp_world import send_only

    random, send = np.random.default_rng(rank), Channel.send

    def sent(self, phase, step, bucket, *rest):
        send_only(self, phase, bucket, random.random(self._units[phase][bucket]) >= share)
        return send(self, phase, step, bucket, *rest)

    Channel.send, Channel.copies = sent, lambda *_: None


DRAWN = {"p_grad": 0.4, **PACKETS}
UDP = {"transport": "udp", "packet_bytes": 256, "udp_key_file": "none"}
CASES = {
    "drawn losses": (
        ({}, LossyConfig(grad_recovery="zero", **CHOSEN, **DRAWN)),
        ({}, LossyConfig(**FEEDBACK, **DRAWN)),
        ({}, LossyConfig(transport="pieces", **FEEDBACK, **DRAWN)),
    ),
    "losses of a network": (
        ({}, LossyConfig(**FEEDBACK, **UDP)),
        ({}, LossyConfig(grad_recovery="zero", **CHOSEN, **UDP)),
        *((model, LossyConfig(**UDP, **flags)) for model in ({}, OVERLAPS["both"]) for flags in ({}, WINDOWS)),
    ),
}


@pytest.mark.parametrize(("losses", "dropped"), [("drawn losses", 0.0), ("losses of a network", 0.3)])
def test_copies_stay_equal_with(losses, dropped):
    for found in run_ranks(apart, 4, CASES[losses], 6, dropped):
        assert all(worst == 0 and moved > 1e-3 and lost["grad"] > 0 for worst, moved, lost in found), found
