"""Memory, threads and copies that ``--transport udp`` takes of a node, beside the memory of its devices: computed, not measured.

A process has one thread for the network. On an accelerator two more carry data between the device and page-locked
memory, of which there is as much as ``--udp-memory`` says; as much again may hold what arrives before it is asked for.
In a step each rank sends a piece of its gradients to every other rank and gets one of each; the same with its part of
the parameters. What a rank of another node is sent and sends crosses PCI Express; with ``--lossy-links inter-node`` ranks
of one node exchange without datagrams.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from ...base.errors import refuse
from .command import ranks_of_node
from .devices import GIB, PCIE
from .memory import StageMemory
from .plan import Plan

_GB = 1e9


@dataclass(frozen=True)
class NodeShare:
    """A rank's share of its node: bytes of host memory, threads, and bytes a step that cross PCI Express, down and up.

    ``staging``: bytes for copies, page-locked for CUDA. ``early``: bytes at most for what arrives too early. ``rate``:
    assumed bytes per second of PCI Express; ``None`` on a CPU.
    """

    staging: int
    early: int
    threads: int
    down: float
    up: float
    rate: float | None

    @property
    def host(self) -> int:
        """Bytes of host memory at most."""
        return self.staging + self.early

    @property
    def seconds(self) -> float:
        """Seconds a step at most that copies take: those of both directions, one after the other."""
        return 0.0 if self.rate is None else (self.down + self.up) / self.rate


def node_share(plan: Plan, memory: StageMemory) -> NodeShare | None:
    """The share of a rank of the stage with most ``memory``; ``None`` if no gradients cross as datagrams."""
    lossy, generation = plan.lossy, plan.device.pcie
    if lossy.transport != "udp" or plan.train.virtual_workers or memory.far == 0:
        return None
    limit = lossy.udp_memory
    if generation is None:
        return NodeShare(0, limit, lossy.udp_sockets, 0.0, 0.0, None)
    gradients, weights = memory.components["gradients"], memory.components["weights"]
    down = memory.far * gradients + weights / memory.shards
    up = memory.far * (gradients + weights)
    return NodeShare(limit, limit, lossy.udp_sockets + 2, down, up, PCIE[generation])


def describe_share(plan: Plan, memory: StageMemory) -> list[str]:
    """Lines of a dry run about datagrams."""
    share, ranks = node_share(plan, memory), ranks_of_node(plan)
    if share is None:
        return []
    lines = [
        (
            f"udp      {share.host / GIB:.2f} GiB of the host and {share.threads} thread{'s'[: share.threads != 1]} a rank; "
            f"{ranks * share.host / GIB:.1f} GiB and {ranks * share.threads} threads a node of {ranks}"
        )
    ]
    if share.rate is not None:
        pinned = " page-locked" if plan.device.kind == "cuda" else " for copies"
        lines += [
            f"         of these {share.staging / GIB:.2f} GiB{pinned} (--udp-memory)",
            f"pcie     {share.down / _GB:.1f} GB down, {share.up / _GB:.1f} GB up a step and rank: at most {share.seconds:.1f} s",
            f"         at {share.rate / _GB:.1f} GB/s (assumed: 0.8 of PCIe {plan.device.pcie}.0 x16)",
        ]
    return lines


def check_host_memory(plan: Plan, memory: StageMemory) -> None:
    """Raise :class:`UsageError` if the ranks of this node may take more memory for datagrams than it has."""
    share, ranks, has = node_share(plan, memory), ranks_of_node(plan), psutil.virtual_memory().total
    if share is not None and ranks * share.host > has:
        raise refuse(
            "--udp-memory",
            plan.lossy.udp_memory,
            f"takes up to {share.host / GIB:.1f} GiB of each of {ranks} ranks of a node, and this one has {has / GIB:.1f} "
            "GiB",
        )
