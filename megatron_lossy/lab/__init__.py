"""The lab: our trainer, its data and launcher, virtual workers, studies and their reports. It uses all other rooms; none uses it.

A study is the same training under several conditions, repeated over seeds: ``python -m megatron_lossy.lab FILE.yaml``
runs one and reports it (``docs/study.md``). ``theory`` has the closed forms that no run uses.
"""
