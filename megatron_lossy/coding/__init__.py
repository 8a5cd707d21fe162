"""Forward error correction: what is sent beside data so that some of it can be lost. Pure: NumPy only."""
