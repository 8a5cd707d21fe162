"""Changes in other packages' modules: every patch is one record, and all are installed or none."""

from .ledger import Check, Ledger, Patch, check
from .signatures import Takes, signature_of

__all__ = ["Check", "Ledger", "Patch", "Takes", "check", "signature_of"]
