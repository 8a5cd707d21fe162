"""``zero``: what is lost counts as zero, the naive baseline. Expectation (g_own + (1-p) sum of others) / N."""

from __future__ import annotations

from .base import GradRecovery


class Zero(GradRecovery):
    """Removes what is lost and corrects nothing."""

    name = "zero"
