"""An error class that Dynamo does not wrap."""

from __future__ import annotations

from ._torch.dynamo import ShortenTraceback


class BackendError(ShortenTraceback, ValueError):
    """An error that reaches the user directly, not wrapped in BackendCompilerFailed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)
