"""Real models and other people's training loops, sharded by graphshard."""
