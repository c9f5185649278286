"""kvstore's log lines in the server's log."""

from __future__ import annotations

import logging

__all__ = ["join_server_log"]


def join_server_log() -> None:
    """Let kvstore's log lines appear in the server's log."""
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
