"""Making checkpoints smaller, in torch."""
