"""One rank of a lab: the packets that ``--packet-bytes auto`` takes, and an exchange with them.

It prints JSON: the number, seconds that it took, and whether the exchange was whole.
"""

from __future__ import annotations

import json
import logging
import sys
import time

import torch
import torch.distributed as dist

from megatron_lossy.base import device
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup, settled


def main(interface: str) -> None:
    logging.basicConfig(format="%(message)s")
    began = time.monotonic()
    config = settled(LossyConfig(transport="udp", packet_bytes="auto", udp_interface=interface))
    took = time.monotonic() - began
    device.init_process_group()
    group = LossyGroup.create(config, [BucketSpec(10_000)])
    rank, size = dist.get_rank(), dist.get_world_size()
    replica = torch.full((size * 10_000,), -1.0)
    own = torch.full((10_000,), float(rank))
    delivery = group.all_gather(0, replica, own, 0, lambda: None).wait()
    whole = bool(delivery.arrived.all()) and bool((replica.view(size, -1) == torch.arange(size)[:, None]).all())
    print(json.dumps({"packet": config.packet_bytes, "seconds": took, "whole": whole}))
    dist.barrier()
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
