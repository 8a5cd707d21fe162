"""A training over islands that are killed, frozen, cut off, started again and added (``make run-churn``)."""
