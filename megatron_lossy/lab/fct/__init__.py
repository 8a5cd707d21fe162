"""How long a message takes between two data centers, if packets are lost: schemes of recovery in a packet model.

No torch, no network: NumPy, and times in microseconds (docs/fct.md).
"""
