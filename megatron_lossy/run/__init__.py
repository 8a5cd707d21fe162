"""One run, real or virtual: its clock, groups, observers, metrics, saved state, and actions after an update.

A real run has one worker in each process, whose exchanges Megatron makes (:mod:`megatron_lossy.hooks`). A virtual run
has all of them in one (:mod:`megatron_lossy.lab.virtual`). Training, logs and checkpoints use both in the same way.
"""
