"""Lossy boundaries between pipeline stages: packets that are lost for good become zeros (SMART, APNet 2026; docs/boundaries.md)."""
