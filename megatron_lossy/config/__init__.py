"""The one source of every loss flag: name, default, help, allowed values. Each mechanism has a module."""

from .lossy_config import LossyConfig, given
from .phases import PHASES, PhaseLoss, Schedule

__all__ = ["PHASES", "LossyConfig", "PhaseLoss", "Schedule", "given"]
