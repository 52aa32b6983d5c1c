"""User-facing options: frozen, and validated before anything changes."""
