"""Studies: many runs of one question, their tables and figures."""
