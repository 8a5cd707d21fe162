"""Codes of messages: parity, which brings lost packets back, and codes in blocks, which take fewer bytes."""

from .parity import AdaptiveCode, Layout, failure
