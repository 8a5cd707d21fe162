"""What we change in somebody else's module: every patch is one record, installed all or nothing."""

from .ledger import Check, Ledger, Patch, check
from .signatures import Takes, signature_of

__all__ = ["Check", "Ledger", "Patch", "Takes", "check", "signature_of"]
