"""The one source of every loss flag: its name, default, help, allowed values. A module for the flags of each mechanism."""

from .lossy_config import LossyConfig, given
from .phases import PHASES, PhaseLoss, Schedule

__all__ = ["PHASES", "LossyConfig", "PhaseLoss", "Schedule", "given"]
