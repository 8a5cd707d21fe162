"""``python -m megatron_lossy.train.sweep``: the former name of ``python -m megatron_lossy.study sweep``."""

from ..moved import run_as

if __name__ == "__main__":
    run_as("megatron_lossy.study.sweep", "megatron_lossy.train.sweep", "megatron_lossy.study sweep")
