"""Callbacks of Dynamo (torch/_dynamo/callback.py), with the same names in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable

import torch


def on_compile_end(act: Callable[[object], None]) -> None:
    """Call ``act`` after any compilation, also if it fails; see `dynamo.on_compile_start`."""
    handler = torch._dynamo.callback_handler
    if act not in handler.end_callbacks:
        handler.register_end_callback(act)
