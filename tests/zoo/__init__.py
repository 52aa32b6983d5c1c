"""Models of `transformers`, built by config alone and unchanged, trained sharded."""
