"""The one source of every loss flag: name, default, help, allowed values. Each mechanism has a module."""

from .core import NUMBERS, PHASES, PhaseLoss, Schedule, split_model, value_of
from .lossy_config import RATES, SECTIONS, LossyConfig, given
