#!/usr/bin/env bash
# mpirun, as in Habana's containers; started once, on the first node of --hostfile (lines "ADDRESS slots=8"):
#   launch/gaudi/mpirun.sh --config configs/llama2_7b/gaudi3_dp64.yaml --program /path/to/Megatron-LM/pretrain_gpt.py \
#       --out /shared/runs --rate 0.1 --hostfile hosts --data-path … --valid-data-path … [--dry-run] [flags]
# docs/cluster.md#on-gaudi
exec python -m megatron_lossy.launch --launcher mpirun "$@"
