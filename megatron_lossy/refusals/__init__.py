"""The table of refusals: which loss flags do not go with what, a file for each mechanism (docs/refusals.md).

:mod:`megatron_lossy.config.refusal` goes through it. A configuration goes through it when it is made, with no fact known.
A run goes through it again for each source of facts: arguments, our trainer's configuration, a model.
"""
