"""Experiments on the closed forms of :mod:`megatron_lossy.theory`, with real channels and rules, and a real run."""
