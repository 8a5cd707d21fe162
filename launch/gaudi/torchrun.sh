#!/usr/bin/env bash
# torchrun on Gaudi, on one node or on every node of several:
#   launch/gaudi/torchrun.sh --config configs/llama2_7b/gaudi3_dp64.yaml --program /path/to/Megatron-LM/pretrain_gpt.py \
#       --out /shared/runs --rate 0.1 --rdzv-endpoint node1:29400 --data-path … --valid-data-path … [--dry-run] [flags]
# What Gaudi needs (PT_HPU_GPU_MIGRATION=1, flags of HabanaAI's Megatron-LM) is in the configurations. docs/gaudi.md
exec python -m megatron_lossy.launch --launcher torchrun "$@"
