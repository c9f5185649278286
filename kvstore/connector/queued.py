"""Queued requests: the keys that a request will look up when its turn comes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["QueuedKeys", "usable_keys"]


@dataclass(frozen=True, slots=True)
class QueuedKeys:
    """The keys of a queued request in one KV cache group.

    Attributes:
        keys: keys of its whole chunks, in prompt order.
        tokens_per_chunk: tokens of a chunk.
        window_chunks: how many of the last chunks the next token needs; None: all of them.
    """

    keys: Sequence[bytes]
    tokens_per_chunk: int
    window_chunks: int | None = None


def usable_keys(
    groups: Sequence[QueuedKeys], known: Callable[[Sequence[bytes]], int]
) -> list[bytes]:
    """Return the keys that are needed to load the longest prefix that may be known.

    Args:
        groups: the keys of a prompt, for each KV cache group.
        known: counts the leading keys that are somewhere, or may be.

    Returns:
        Of groups that need every chunk the prefix, of those with a window the last chunks of it,
        in the order of the prompt.
    """
    whole = [group for group in groups if group.window_chunks is None]
    tokens = min(
        (known(group.keys) * group.tokens_per_chunk for group in whole),
        default=max((len(group.keys) * group.tokens_per_chunk for group in groups), default=0),
    )
    placed: list[tuple[int, bytes]] = []
    for group in groups:
        end = tokens // group.tokens_per_chunk
        first = 0 if group.window_chunks is None else max(0, end - group.window_chunks)
        placed += [
            (place * group.tokens_per_chunk, key)
            for place, key in enumerate(group.keys[first:end], first + 1)
        ]
    if len(groups) > 1:
        placed.sort(key=operator.itemgetter(0))
    return [key for _, key in placed]
