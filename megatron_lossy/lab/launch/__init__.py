"""Makes a running job of a configuration file: ``python -m megatron_lossy.launch --help``.

Everything here runs before training, on one process per node or job, without torch and without a process group. Errors
are reported in one line before anything starts. docs/cluster.md shows its use.
"""
