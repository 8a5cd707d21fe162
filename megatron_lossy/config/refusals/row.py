"""Helpers for rows of the table of refusals."""

from __future__ import annotations

from .. import LossyConfig
from ..refusal import Refusal

#: A row about the loss flags.
Row = Refusal[LossyConfig]

OFF = "needs Megatron's distributed optimizer, and --use-distributed-optimizer is off"
#: Why flags about parameters do not go with gradients that are lost in an all-reduce.
NO_PARAMETERS = f"no parameters are sent, and the second half of an all-reduce is no place for it; {OFF}"
ONE_EMBEDDING = "give --untie-embeddings-and-output-weights, and no --mtp-num-layers"
IN_MEMORY = "needs real ranks: virtual workers exchange in memory; choose pieces"


def above(number: int | None, limit: int) -> bool:
    """Whether ``number`` is known and above ``limit``."""
    return number is not None and number > limit


def draws_losses(config: LossyConfig) -> bool:
    """Whether losses of gradients or parameters are drawn."""
    return not (config.phase("grad").lossless and config.phase("param").lossless)


def switch(flag: str, beside: str, why: str) -> Row:
    """The refusal of a switch of Megatron, unless the configuration is inert."""
    return Row(
        flag=flag, beside=beside, why=why, when=lambda config, facts: not config.inert and flag in facts.switches
    )
