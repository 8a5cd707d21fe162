"""The one source of every loss flag: name, default, help, allowed values. Each mechanism has a module."""

from .lossy_config import RATES, LossyConfig, given
from .phases import NUMBERS, PHASES, PhaseLoss, Schedule

__all__ = ["NUMBERS", "PHASES", "RATES", "LossyConfig", "PhaseLoss", "Schedule", "given"]
