"""Ranks that feed back over UDP what was lost: run by tests, as functions of a rank or in the lab as a program."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup
from tests.rules import gradients

SHARDS = (5000, 777)


def telescopes(rank, config, steps, successful=lambda step: True):
    """How far the sum of what owners applied and what senders keep is from the sum of what was sent: 0; and counts.

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
            group.reduce_scatter(bucket, buffer, output, step, lambda: None).wait()
            if successful(step):
                given[bucket] += gradient
            outputs.append((output, buffer))
        rules = group.grads
        musts = [rule.must for rule in rules]
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
    return {"difference": difference, **counts, "resent": counters.get("resent"), "repaired": counters.get("repaired")}


def main():
    """``python -m tests.udp_feedback_ranks FLAGS-AS-JSON``, with torch's environment."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    flags, steps = json.loads(sys.argv[1]), int(sys.argv[2])
    rank = int(os.environ["RANK"])
    print(json.dumps({"rank": rank, **telescopes(rank, LossyConfig(**flags), steps)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
