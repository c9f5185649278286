"""Where in the prompt of its request a key belongs, where the server knows that.

Some servers name keys in another order than that of the prompt: a sliding window
is looked for from its end, and several KV cache groups come one after the
other. Granted in that order, a request would get all of one group and little of
another, which nobody can use, and policies would take the head of a prompt for
its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

__all__ = ["MOST_REQUESTS", "Positions"]

MOST_REQUESTS = 2**16
"""Most requests that are remembered, if a server never tells their end."""


class Positions:
    """The order of the keys of each request whose server tells it."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Callable[[bytes], int], bool]] = {}

    def __bool__(self) -> bool:
        """Whether anything is known of any request."""
        return bool(self._of)

    def tell(
        self, request_id: str, position: Callable[[bytes], int], *, one_group: bool = False
    ) -> None:
        """From now on `position` says where a key of the request belongs, in tokens.

        Args:
            one_group: all keys of the request are of one group. What it names is then in
                the order of the prompt, but for lookups, which may come from its end.
        """
        self._of[request_id] = position, one_group
        if len(self._of) > MOST_REQUESTS:
            del self._of[next(iter(self._of))]

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._of.pop(request_id, None)

    def known(self, request_id: str) -> bool:
        """Whether the keys of the request have positions, and are of several groups."""
        return request_id in self._of and not self._of[request_id][1]

    def ordered(self, request_id: str, keys: Collection[bytes]) -> Collection[bytes]:
        """`keys` as they are to be used: in prompt order over all groups, where that is known."""
        return self.sorted(request_id, keys) if self.known(request_id) else keys

    def sorted(self, request_id: str, keys: Iterable[bytes]) -> list[bytes]:
        """`keys`, in whatever order they were named, in that of the prompt."""
        position, _ = self._of[request_id]
        return sorted(keys, key=position)

    def turned(self, request_id: str, keys: list[bytes]) -> bool:
        """Whether `keys`, which were looked up, may be in another order than that of the prompt."""
        if request_id not in self._of:
            return False
        position, one_group = self._of[request_id]
        return not one_group or position(keys[0]) > position(keys[-1])
