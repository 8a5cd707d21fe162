"""``python -m megatron_lossy.log``: the former name of ``python -m megatron_lossy.delivery_log``."""

from ..moved import run_as

if __name__ == "__main__":
    run_as("megatron_lossy.delivery_log", "megatron_lossy.log", "megatron_lossy.delivery_log")
