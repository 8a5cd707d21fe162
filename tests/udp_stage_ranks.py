"""Pipeline stages that train over a link: run in the lab as a program, which keeps what crossed in a file."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lossy.config import LossyConfig
from megatron_lossy.transport.udp.process import close_engines
from tests.test_pipeline_boundaries import record
from tests.tiny_gpt import TinyGPT


def main():
    """``python -m tests.udp_stage_ranks FLAGS MODEL STEPS FOLDER``, with torch's environment; the first two are JSON."""
    flags, model, steps, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    recorded = record(dist.get_rank(), TinyGPT(**model), LossyConfig(**flags), steps)
    (folder / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(recorded))
    close_engines()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
