"""The line of requests whose turn it is not yet, where a step looks up only so many keys."""

from __future__ import annotations

__all__ = ["Line"]


class Line:
    """Requests that have asked in vain, longest first: the first has its turn in the next step.

    Attributes:
        unseen: those that shall ask again in the next step.
    """

    def __init__(self) -> None:
        self.unseen: set[str] = set()
        self._line: dict[str, None] = {}
        self._turn: str | None = None

    def begin_step(self) -> None:
        """However many ask before it, the first has its turn."""
        self.unseen.clear()
        if self._turn is not None:
            # It did not ask any more.
            del self._line[self._turn]
        self._turn = next(iter(self._line), None)

    def has(self, request_id: str) -> bool:
        """Whether it is this one's turn."""
        return request_id == self._turn

    def take(self, request_id: str) -> None:
        """The request is looked up: it has had its turn."""
        if request_id in self._line:
            del self._line[request_id]
            if request_id == self._turn:
                self._turn = None

    def put_off(self, request_id: str) -> None:
        """The request has asked in vain."""
        self.unseen.add(request_id)
        self._line.setdefault(request_id)

    def reset(self) -> None:
        """Nobody has asked."""
        self._line.clear()
        self._turn = None
