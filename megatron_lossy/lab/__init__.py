"""The lab: studies, completion times, and the experiments of the theory. It uses all other rooms; none uses it.

A study is the same training under several conditions, repeated over seeds: ``python -m megatron_lossy.lab FILE.yaml`` runs
one and reports it (``docs/study.md``). ``fct`` computes how long messages take (flow completion time, ``docs/fct.md``), and
``theory`` counts with the real channels and rules what :mod:`megatron_lossy.theory` says in closed form.
"""
