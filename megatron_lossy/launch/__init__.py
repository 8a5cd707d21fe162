"""From a configuration file to a running job: ``python -m megatron_lossy.launch --help``.

Everything here runs before training, on one process per node or job, without torch and without a process group:
what is wrong is said in one line before anything starts. docs/cluster.md shows its use.
"""
