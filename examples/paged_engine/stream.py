"""Random requests that share prefixes, as users of a server send them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

__all__ = ["Stream"]


class Stream:
    """Prompts of one seed: new ones on some documents, conversations that go on, repetitions.

    Attributes:
        prompts: what is asked.
        lengths: how many tokens are wanted for each.
    """

    def __init__(self, seed: int, *, documents: int = 20, vocab: int = 256) -> None:
        self._random = random.Random(seed)
        self._vocab = vocab
        self._documents = [self._some(4, 60) for _ in range(documents)]
        self.prompts: list[list[int]] = []
        self.lengths: list[int] = []
        self.outputs: list[list[int]] = []

    def extend(
        self, count: int, answer: Callable[[Sequence[Sequence[int]]], list[list[int]]]
    ) -> None:
        """`count` more requests; `answer` generates 8 tokens for each of some prompts.

        Later requests go on from what was generated for those of earlier calls.
        """
        known = len(self.prompts)
        prompts = [self._prompt(known) for _ in range(count)]
        unique = list({tuple(prompt): prompt for prompt in prompts}.values())
        answers = dict(zip(map(tuple, unique), answer(unique), strict=True))
        for prompt in prompts:
            length = self._random.randint(1, 8)
            self.prompts.append(prompt)
            self.lengths.append(length)
            self.outputs.append(answers[tuple(prompt)][:length])

    def _prompt(self, known: int) -> list[int]:
        kind = self._random.random()
        if known and kind < 0.3:
            earlier = self._random.randrange(max(0, known - 50), known)
            longer = self.prompts[earlier] + self.outputs[earlier] + self._some(1, 12)
            if len(longer) <= 120:
                return longer
        if known and kind < 0.45:
            return self.prompts[self._random.randrange(known)]
        return self._random.choice(self._documents) + self._some(0, 20)

    def _some(self, least: int, most: int) -> list[int]:
        count = self._random.randint(least, most)
        return [self._random.randrange(self._vocab) for _ in range(count)]
