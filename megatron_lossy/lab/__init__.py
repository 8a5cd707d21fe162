"""The lab: studies, completion times, and the experiments of the theory. It uses all other rooms; none uses it.

A study is the same training under several conditions, repeated over seeds: ``python -m megatron_lossy.lab FILE.yaml``
runs one and reports it (``docs/study.md``). ``fct`` computes completion times of messages (flow completion time,
``docs/fct.md``). ``theory`` counts the closed forms of :mod:`megatron_lossy.base.theory` with the real channels and rules.
"""
