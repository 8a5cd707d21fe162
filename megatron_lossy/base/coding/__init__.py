"""Codes of messages: parity, which brings lost packets back, and codes in blocks, which take fewer bytes."""

from .parity import AdaptiveCode, Layout, failure

#: Bytes of the scale of a block of codes.
SCALE = 2


def block_bytes(bits: int, block: int) -> int:
    """Return the bytes of a block of ``block`` elements of ``bits``, with its scale."""
    return block * bits // 8 + SCALE
