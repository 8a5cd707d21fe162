"""The closed forms of :mod:`megatron_lossy.theory`, counted instead: with the real channels and rules, and in a real run."""
