"""The one source of every loss flag: name, default, help, allowed values. Each mechanism has a module."""

from .lossy_config import RATES, SECTIONS, STAGE_LOSSES, LossyConfig, given
from .phases import NUMBERS, PHASES, PhaseLoss, Schedule, split_model, value_of

__all__ = [
    "NUMBERS",
    "PHASES",
    "RATES",
    "SECTIONS",
    "STAGE_LOSSES",
    "LossyConfig",
    "PhaseLoss",
    "Schedule",
    "given",
    "split_model",
    "value_of",
]
