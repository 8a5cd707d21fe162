"""The lead: parameters that compensate the lag of their own broadcast (docs/lag.md)."""
