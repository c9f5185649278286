"""Several groups of different chunk sizes: what the published scheduler finds, and ours."""

from __future__ import annotations

import random
from collections import Counter

from tests.connector.boundaries import Case, expected
from tests.connector.published_match import published, random_case
from tests.connector.test_matching import Asking

CASES = 9000


def test_answers_differ_only_below_the_largest_chunk() -> None:
    chance = random.Random("different chunk sizes")
    kinds: Counter[str] = Counter()
    for _ in range(CASES):
        case = random_case(chance)
        largest = max(case.chunk(group) for group in range(len(case.groups)))
        ours, theirs = Asking(case).ask(), published(case)
        assert ours == expected(case, case.hits)
        if ours == theirs:
            kinds["same"] += 1
            continue
        assert ours == 0
        assert 0 < theirs < largest, case
        kinds["less than a chunk"] += 1
    assert kinds["less than a chunk"] > CASES // 100
    assert kinds["same"] > CASES * 9 // 10


def test_the_published_answer_below_a_chunk_depends_on_the_order_of_groups() -> None:
    """Which is why ours is none for any order."""
    for sizes, theirs in [((3, 2), 2), ((2, 3), 0)]:
        groups = tuple((size, None) for size in sizes)
        case = Case(1, groups, 1, 3, 0, frozenset({(0, 0), (1, 0)}))
        assert published(case) == theirs
        assert Asking(case).ask() == 0
