"""Priority: what must arrive of gradients and parameters (docs/choosing.md)."""
