"""Real models and the training loops of other frameworks, sharded by graphshard."""
