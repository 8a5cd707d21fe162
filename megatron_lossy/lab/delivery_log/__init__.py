"""The summary of a delivery log, and the check of all of its records."""
