"""One rank of two hosts that two cables join: it exchanges, and at the end prints counts as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading

import psutil
import torch
import torch.distributed as dist

from megatron_lossy.base import device
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup
from megatron_lossy.transport.udp.process import engine_counters

SHARD = 200_000
CABLES = ("lab0", "lab1")
#: Exchanges over which a rank looks what share of its bytes each cable carries.
WINDOW = 20


def sent() -> list[int]:
    counters = psutil.net_io_counters(pernic=True)
    return [counters[cable].bytes_sent for cable in CABLES]


def main() -> None:
    """Rank 0 prints the number of each exchange. Once it reads a line, it goes on until both cables carry data of both ranks."""
    config = LossyConfig(
        transport="udp",
        udp_interface=",".join(CABLES),
        udp_key_file="none" if sys.argv[1] == "none" else None,
        udp_rate="300mbit",
    )
    device.init_process_group()
    group = LossyGroup.create(config, [BucketSpec(SHARD)])
    rank, size = dist.get_rank(), dist.get_world_size()
    replica = torch.zeros(size * SHARD)
    counts = {"exchanges": 0, "incomplete": 0, "last": 0}
    repaired = threading.Event()
    if rank == 0:
        threading.Thread(target=lambda: sys.stdin.readline() and repaired.set(), daemon=True).start()
    before, balanced, end = sent(), False, 0
    while not end or counts["exchanges"] < end:
        # torch's own connections have only one cable: rank 0 sends the number of the last exchange, the other whether it is balanced.
        own = torch.full((SHARD,), float(end if rank == 0 else balanced))
        delivery = group.all_gather(0, replica, own, counts["exchanges"], lambda: None).wait()
        counts["exchanges"] += 1
        counts["last"] = int(not delivery.arrived.all())
        counts["incomplete"] += counts["last"]
        if rank == 0:
            print(counts["exchanges"], flush=True)
        if counts["exchanges"] % WINDOW == 0:
            bytes_sent = [now - then for now, then in zip(sent(), before, strict=True)]
            before, balanced = sent(), min(bytes_sent) > 0.2 * sum(bytes_sent)
            if rank == 0 and not end and repaired.is_set() and balanced and replica[SHARD:].min():
                end = counts["exchanges"] + WINDOW
        if rank:
            end = int(replica[:SHARD].max())
    print(json.dumps(counts | {"switched": engine_counters()["switched"]}), flush=True)
    dist.barrier()
    group.close()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
