"""What a lossy step asks of a device beyond Megatron's own: the rows, their committed budget, and their measurement."""
