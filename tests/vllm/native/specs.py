"""Our spec where a test has one of its own, as a package would add it."""

from __future__ import annotations

from typing import Any

from kvstore.vllm import KVStoreOffloadingSpec


class Specs:
    """Counts the specs that are built."""

    def __init__(self) -> None:
        self.built = 0
        parts = self

        class Counted(KVStoreOffloadingSpec):
            def __init__(self, config: Any) -> None:
                parts.built += 1
                super().__init__(config)

        self.spec = Counted

    def close(self) -> None:
        """Nothing is open: no manager and no worker is asked for."""
