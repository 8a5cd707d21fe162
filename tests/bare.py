"""Run a script with Megatron made usable on CPU and nothing else of ours: ``bare.py SCRIPT arguments…``."""

import os
import runpy
import sys

from megatron_lossy.base import device

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    device.prepare(megatron_training=True)
    runpy.run_path(sys.argv[0], run_name="__main__")
