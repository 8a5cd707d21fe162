"""FSDP2 with loss on a pretended CUDA device: the CPU's bits, no race, and no wait of the host that plain FSDP2 has not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from tests.fsdp import Tiny, Training
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.shows("FSDP2 on a pretended device's streams: the CPU's bits, no race", device=False),
    pytest.mark.slow,
    pytest.mark.usefixtures("pretended"),
]

PACKETS = LossyConfig(p_grad=0.3, p_param=0.3, loss_unit="packet", packet_bytes=64)
CASES: dict[str, tuple[Tiny, Any]] = {
    "plain": (Tiny(reshard=True), None),
    "rate 0": (Tiny(reshard=True), LossyConfig()),
    "packets": (Tiny(reshard=True), PACKETS),
    "shards, prefetching": (Tiny(reshard=True, prefetches=True), LossyConfig(p_grad=0.3, p_param=0.3)),
    "handles": (Tiny(reshard=True, asynchronous=True, prefetches=True), PACKETS),
    "accumulation": (Tiny(reshard=False, accumulation=2, synchronises=True), PACKETS),
    "bf16": (Tiny(dtype="bf16", reshard=True), PACKETS),
    "lead": (Tiny(dtype="bf16", reshard=True), dataclasses.replace(PACKETS, param_send="compensated")),
    "previous": (Tiny(reshard=True), dataclasses.replace(PACKETS, grad_recovery="previous")),
    "pieces": (Tiny(reshard=True), dataclasses.replace(PACKETS, transport="pieces")),
}


def train(case: str, device: str) -> list[Any]:
    """Return losses, owners' weights and replicas after a few steps."""
    import torch

    tiny, config = CASES[case]
    run = Training(dataclasses.replace(tiny, device=device), config)
    losses = [run.step(step) for step in range(4)]
    weights = run.weights()
    replicas = []
    if run.lossy is not None:
        with run.lossy.owner_weights(), torch.no_grad():
            losses.append(run.loss(9).item())
        run.lossy.settle()
        replicas = run.replicas()
        run.lossy.close()
    return [np.array(losses), *weights.values(), *replicas]


def compared(rank: int, cases: list[str]) -> tuple[list[str], list[str]]:
    """Return cases that differ from the CPU, and faults of the device."""
    import torch
    import torch.distributed as dist

    from tests.impostor import device

    tracker = device.tracked("cpu:gloo,cuda:nccl")
    differ = []
    for case in cases:
        on_cpu, on_cuda = train(case, "cpu"), train(case, "cuda")
        if not all(np.array_equal(one, other) for one, other in zip(on_cpu, on_cuda, strict=True)):
            differ.append(case)
    torch.zeros(1, device="cuda")  # it also reports the blocks freed last
    faults = tracker.findings().faults
    dist.destroy_process_group()
    return differ, faults


def test_it_gives_the_bits_of_the_cpu_and_adds_no_race():
    """FSDP2 itself frees reduced gradients in the stream of their reduction, after an optimizer has read them."""
    [(_, own), *_] = run_ranks(compared, 2, ["plain"], grouped=False, timeout=280)
    torchs = {one.partition(", last used by ")[2] for one in own}
    for differ, faults in run_ranks(compared, 2, list(CASES), grouped=False, timeout=280):
        assert differ == []
        assert {one.partition(", last used by ")[2] for one in faults} <= torchs
