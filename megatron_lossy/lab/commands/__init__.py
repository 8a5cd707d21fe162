"""Modules that ``python -m megatron_lossy.NAME`` runs: the package looks for its modules here, too."""
