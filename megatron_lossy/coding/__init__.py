"""Forward error correction: parity sent beside data, so that some of the data can be lost. Pure: NumPy only."""
