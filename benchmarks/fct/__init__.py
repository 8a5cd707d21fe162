"""Completion times of messages between two data centers with packet loss: schemes of recovery in a packet model.

No torch, no network: NumPy, and times in microseconds (docs/fct.md).
"""
