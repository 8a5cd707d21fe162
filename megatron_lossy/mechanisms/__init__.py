"""Mechanisms: parts of a run beside its exchanges. The core calls their verbs, and knows none of them by name."""

from .base import Mechanism

__all__ = ["Mechanism"]
