"""Ranks in network namespaces with an emulated link between them, for tests (benchmarks/lab), and what some of them do there.

Without Megatron, so that they start quickly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup
from tests.rules import gradients, reduce

ROOT = Path(__file__).parents[1]
#: Of what ranks exchange.
SHARDS = (5000, 777)


def run_in_lab(module: str, *arguments: str, loss: float, sites: tuple[int, ...] = (), timeout: float = 200) -> str:
    """Return the output of ranks of ``python -m module arguments``, at 4 ms; ``sites``: ranks of each, by default 1."""
    where = ["--sites", *map(str, sites)] if sites else []
    command = [
        sys.executable, "-m", "benchmarks.lab", "--rtt", "4", "--loss", str(loss), *where, "--",
        "env", "GLOO_SOCKET_IFNAME=lab0", "RANK={node}", "WORLD_SIZE={nodes}", "LOCAL_RANK=0", "MASTER_ADDR={first}",
        "MASTER_PORT=29500", "OMP_NUM_THREADS=1", sys.executable, "-m", module, *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def telescopes(rank, config, steps, successful=lambda step: True):
    """Return the sum that owners applied and senders keep, minus the sum that was sent (0); and counts.

    Gradients are integers, so that sums are exact. ``must``: of what had to arrive, what did not.
    """
    size = dist.get_world_size()
    group = LossyGroup.create(config, [BucketSpec(shard) for shard in SHARDS])
    generator = torch.Generator().manual_seed(rank)
    given = [torch.zeros(size * shard) for shard in SHARDS]
    applied = [torch.zeros(shard) for shard in SHARDS]
    counts = {"lost": 0, "must": 0, "high": 0, "late": 0}
    for step in range(steps):
        outputs = []
        for bucket, shard in enumerate(SHARDS):
            gradient = torch.randint(-9, 10, (size * shard,), generator=generator).float()
            gradient[:: shard // 3] *= 100  # so that some packets matter
            output = torch.empty(shard)
            buffer = gradient.clone()
            reduce(group, bucket, buffer, output, step, lambda: None).wait()
            if successful(step):
                given[bucket] += gradient
            outputs.append((output, buffer))
        rules = group.grads
        musts = [rule.must.wait() for rule in rules]
        group.finish_step(step, successful(step))
        counts["late"] += sum(len(rule.late) for rule in rules)
        for bucket, (output, _) in enumerate(outputs):
            if successful(step):
                applied[bucket] += output
                counts["high"] += int(musts[bucket].sum())
                for lost, _ in rules[bucket].rule._residuals[-1:]:
                    counts["lost"] += int(lost.mask.sum())
                    counts["must"] += int((lost.mask & musts[bucket]).sum())
        dist.barrier()
    difference = 0.0
    for bucket, shard in enumerate(SHARDS):
        kept = torch.zeros(size * shard)
        group.grads[bucket].correct(kept, gradients())
        total = given[bucket] - kept  # what of this rank's has been applied
        dist.all_reduce(total)
        difference = max(difference, float((total[rank * shard : (rank + 1) * shard] - applied[bucket]).abs().max()))
    counters = group.wire.counters()[1 - rank] if size == 2 else {}
    group.close()
    return {"difference": difference, **counts, "resent": counters.get("resent"), "copies": counters.get("copies")}


def main():
    """``python -m tests.in_lab telescopes FLAGS STEPS``, with torch's environment; flags are JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, flags, steps = int(os.environ["RANK"]), json.loads(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({"rank": rank, **telescopes(rank, LossyConfig(**flags), steps)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
