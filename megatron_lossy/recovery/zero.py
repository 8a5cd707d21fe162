"""``zero``: a lost unit counts as zero, the naive baseline. Expectation (g_own + (1-p) sum of others) / N."""

from __future__ import annotations

from .base import GradRecovery


class Zero(GradRecovery):
    """Removes lost units and corrects nothing."""

    name = "zero"
    minds_spared = True
