"""How many tokens the published scheduler finds, in words of our own."""

from __future__ import annotations

import math
import random

from tests.connector.boundaries import Case

__all__ = ["published", "random_case"]


def random_case(chance: random.Random) -> Case:
    """Groups of different chunk sizes; some chunks are missing."""
    count = chance.randint(2, 3)
    sizes = chance.sample(range(1, 5), count)
    groups = tuple((size, chance.choice((None, chance.randint(1, 9)))) for size in sizes)
    tokens = chance.randint(1, 24)
    whole = math.lcm(*sizes)
    computed = chance.randint(0, max(0, (tokens - 1) // whole)) * whole
    bare = Case(1, groups, 1, tokens, computed, frozenset())
    share = chance.choice((0.5, 0.8, 0.95, 1.0))
    return Case(
        1,
        groups,
        1,
        tokens,
        computed,
        frozenset(place for place in bare.places() if chance.random() < share),
    )


def published(case: Case) -> int:
    """The published rule: groups with all tokens first, then windows, the widest first.

    Each cuts what those before it have left. Windows are asked once more if one of them that is
    not the first has cut it, and all else is left as it was.
    """
    windows = {
        group: max(
            math.ceil(window / case.chunk(group)), math.ceil((window - 1) / case.chunk(group))
        )
        for group, (_, window) in enumerate(case.groups)
        if window is not None
    }
    whole = [group for group in range(len(case.groups)) if group not in windows]
    wide = sorted(windows, key=lambda group: -windows[group])
    end, found = case.end, 0
    asked = [*whole, *wide]
    while asked:
        again: list[int] = []
        seen_window = False
        for group in asked:
            size = case.chunk(group)
            end = min(end, case.tokens // size * size)
            if end - case.computed < size:
                return 0
            first = case.computed // size
            chunks = range(first, min(math.ceil(end / size), case.tokens // size))
            hits = _hits(case, group, chunks, windows.get(group), end)
            if not hits:
                return 0
            end = min(end, (first + hits) * size)
            if end - case.computed < size:
                return 0
            if end - case.computed < found and seen_window and not again:
                again = wide
            seen_window |= group in windows
            found = end - case.computed
        asked = again
    return found


def _hits(case: Case, group: int, chunks: range, needs: int | None, end: int) -> int:
    there = [(group, chunk) in case.hits for chunk in chunks]
    if needs is None:
        return there.index(False) if False in there else len(there)
    size, window = case.chunk(group), case.groups[group][1]
    assert window is not None
    required = max(needs, math.ceil((window - 1 + -end % size) / size))
    run = 0
    for place in range(len(there) - 1, -1, -1):
        run = run + 1 if there[place] else 0
        required = required if there[place] else needs
        if run == required:
            return place + required
    return run
