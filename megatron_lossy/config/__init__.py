"""The one source of every loss flag: name, default, help, allowed values. Each mechanism has a module."""

from .lossy_config import RATES, SECTIONS, LossyConfig, given
from .phases import NUMBERS, PHASES, PhaseLoss, Schedule

__all__ = ["NUMBERS", "PHASES", "RATES", "SECTIONS", "LossyConfig", "PhaseLoss", "Schedule", "given"]
