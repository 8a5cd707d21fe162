"""The table of refusals: flags that do not go together, those of the core (docs/refusals.md).

:mod:`megatron_lossy.config.refusal` checks it. A new configuration is checked with no fact known. A run checks it again
for each source of facts: arguments, our trainer's configuration, a model.
"""
