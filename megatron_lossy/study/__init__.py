"""Studies: the same training under several conditions, repeated over seeds, and what they say.

``python -m megatron_lossy.report table1`` and ``… report study FILE`` run one; see ``docs/study.md``.
"""
