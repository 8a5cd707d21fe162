#!/usr/bin/env bash
# torchrun on one node, or the same command on every node of several with --rdzv-endpoint HOST:PORT:
#   launch/torchrun.sh --config configs/llama2_7b/cuda_dp64.yaml --program /path/to/Megatron-LM/pretrain_gpt.py \
#       --out /shared/runs --rate 0.1 --data-path … --valid-data-path … [--dry-run] [flags]
# What Gaudi needs (PT_HPU_GPU_MIGRATION=1, flags of HabanaAI's Megatron-LM) is in its configurations.
# docs/cluster.md; python -m megatron_lossy.launch --help
exec python -m megatron_lossy.launch --launcher torchrun "$@"
