"""The table of refusals: flags that do not go together, in a file for each mechanism (docs/refusals.md).

:mod:`megatron_lossy.config.refusal` checks it. A new configuration is checked with no fact known. A run checks it again
for each source of facts: arguments, our trainer's configuration, a model.
"""
