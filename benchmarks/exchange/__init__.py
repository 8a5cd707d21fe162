"""What ``python -m benchmarks.udp_exchange`` is made of: rows, contestants, and what comes out."""
