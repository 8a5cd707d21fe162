"""Mechanisms, a folder each. The core imports none of them; :data:`megatron_lossy.base.registry.MECHANISMS` names them."""
