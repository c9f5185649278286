"""The contract of `policies.AdmissionFilter` as a test suite.

A filter's own tests inherit it and define how a filter is built:

    class TestMyFilter(FilterContract):
        def create(self, capacity, chunk_bytes):
            return MyFilter(capacity, chunk_bytes)

The suite needs pytest.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import pytest

from kvstore.policies import AdmissionFilter
from kvstore.testing.policy import keys_of

__all__ = ["FilterContract"]


class FilterContract(ABC):
    """Tests that every admission filter must pass. Inherit it in a class named ``Test...``."""

    @abstractmethod
    def create(self, capacity: int, chunk_bytes: int) -> AdmissionFilter:
        """Create a filter for a tier of `capacity` chunks of `chunk_bytes` each."""

    def test_it_has_a_name(self) -> None:
        assert isinstance(self.create(1, 1).name, str)
        assert self.create(1, 1).name

    @pytest.mark.parametrize(("capacity", "chunk_bytes"), [(0, 1), (-1, 1), (1, 0), (1, -5)])
    def test_a_tier_without_room_is_refused(self, capacity: int, chunk_bytes: int) -> None:
        with pytest.raises(ValueError, match=str(min(capacity, chunk_bytes))):
            self.create(capacity, chunk_bytes)

    def test_every_key_gets_an_answer(self) -> None:
        keys = keys_of(20)
        each = self.create(8, 1024)
        assert len(each.admit(keys, 0.0)) == 20
        each.asked(keys)
        for some in (keys, keys[:1], []):
            answers = each.admit(some, 1.0)
            assert len(answers) == len(some)
            assert set(answers) <= {True, False}

    def test_what_is_asked_for_again_and_again_enters_in_the_end(self) -> None:
        (key,) = keys_of(1)
        each = self.create(8, 1024)
        for day in range(20):
            each.asked([key])
            if each.admit([key], day * 86_400.0) == [True]:
                return
        pytest.fail("asked for on twenty days and never admitted")

    def test_an_empty_request_is_harmless(self) -> None:
        each = self.create(8, 1024)
        each.asked([])
        assert each.admit([], 0.0) == []

    def test_clear_forgets_what_was_asked(self) -> None:
        keys = keys_of(4)
        each, fresh = self.create(8, 1024), self.create(8, 1024)
        for _ in range(5):
            each.asked(keys)
        each.clear()
        later = 30 * 86_400.0
        assert each.admit(keys, later) == fresh.admit(keys, later)

    def test_equal_histories_get_equal_answers(self) -> None:
        known = keys_of(60)
        one, other = self.create(16, 1024), self.create(16, 1024)
        rng = random.Random(7)
        for step in range(200):
            some = rng.sample(known, rng.randrange(1, 12))
            for each in (one, other):
                each.asked(some)
            assert one.admit(some, step * 60.0) == other.admit(some, step * 60.0)
