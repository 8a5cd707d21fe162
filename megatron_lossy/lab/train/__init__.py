"""A small pretraining program on megatron.core alone.

The megatron-core wheel ships no training loop. This one trains a LLaMA-style ``GPTModel`` with Megatron's
distributed optimizer, under the names Megatron-LM gives its flags: ``python -m megatron_lossy.train --help``.
"""
