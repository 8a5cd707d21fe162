"""Mechanisms, a folder each. The core imports none of them; :data:`megatron_lossy.registry.MECHANISMS` names them."""
