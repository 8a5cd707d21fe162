"""The parts of ``python -m benchmarks.udp_exchange``: rows, contestants and results."""
