"""A request of the engine, as the scheduler and the connector see it."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Request", "State"]


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Request:
    """A prompt, and what was generated for it.

    Attributes:
        tokens: those of the prompt, then those generated.
        max_new_tokens: how many are generated.
        block_ids: for each KV cache group its blocks; 0 for one that the window has left.
        num_computed_tokens: leading tokens whose KV cache is in its blocks.
        loaded_tokens: tokens that were not computed, as they came from the offload.
    """

    request_id: str
    tokens: list[int]
    max_new_tokens: int
    block_tokens: int
    state: State = State.WAITING
    block_ids: list[list[int]] = field(default_factory=list)
    num_computed_tokens: int = 0
    loaded_tokens: int = 0
    num_prompt_tokens: int = field(init=False)
    _hashes: list[bytes] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def output(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """A hash for each whole block of its tokens and all before it."""
        size = self.block_tokens
        while (len(self._hashes) + 1) * size <= len(self.tokens):
            begin = len(self._hashes) * size
            before = self._hashes[-1] if self._hashes else b""
            its = ",".join(map(str, self.tokens[begin : begin + size]))
            self._hashes.append(hashlib.blake2b(before + its.encode(), digest_size=16).digest())
        return self._hashes

    def is_finished(self) -> bool:
        return self.state is State.FINISHED
