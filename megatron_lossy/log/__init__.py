"""The former name of :mod:`megatron_lossy.delivery_log`."""
