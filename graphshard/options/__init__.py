"""User-facing options: frozen dataclasses whose values are checked when they are created."""
