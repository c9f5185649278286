"""The table in C does what `OrderedDict` does, keeps no reference, and is never built anew."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvstore
from kvstore.policies.table import COMPILED, OrderedTable

pytestmark = pytest.mark.skipif(
    not COMPILED, reason="kvstore.policies._table is not compiled: an OrderedDict stands in for it"
)

MISSING = object()

KEYS = st.integers(0, 40).map(lambda n: b"key %d" % n)
VALUES = st.integers(0, 5)


def outcome(act: Callable[[], object]) -> object:
    """What a call answers: a value, or the class of what it raises."""
    try:
        return act()
    except Exception as error:
        return type(error)


class Beside(RuleBasedStateMachine):
    """Every act is done to both, and both answer the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table: OrderedTable[Any, Any] = OrderedTable()
        self.model: OrderedDict[Any, Any] = OrderedDict()

    def both(self, act: Callable[[Any], object]) -> None:
        assert outcome(lambda: act(self.table)) == outcome(lambda: act(self.model))

    @rule(key=KEYS, value=VALUES)
    def put(self, key: bytes, value: int) -> None:
        self.table[key] = value
        self.model[key] = value

    @rule(first=st.integers(0, 3000), count=st.integers(1, 300))
    def put_many(self, first: int, count: int) -> None:
        pairs = [(b"many %d" % n, n) for n in range(first, first + count)]
        self.table.update(pairs)
        self.model.update(pairs)

    @rule(first=st.integers(0, 3000), count=st.integers(1, 300))
    def take_many(self, first: int, count: int) -> None:
        for n in range(first, first + count):
            self.both(methodcaller("pop", b"many %d" % n, None))

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        self.both(lambda table: table.__delitem__(key))

    @rule(key=KEYS, value=VALUES)
    def look(self, key: bytes, value: int) -> None:
        self.both(lambda table: table[key])
        self.both(lambda table: table.get(key))
        self.both(lambda table: table.get(key, value))
        self.both(lambda table: key in table)

    @rule(key=KEYS, value=VALUES)
    def pop(self, key: bytes, value: int) -> None:
        self.both(lambda table: table.pop(key, value))
        self.both(lambda table: table.pop(key))

    @rule(key=KEYS, value=VALUES)
    def setdefault(self, key: bytes, value: int) -> None:
        self.both(lambda table: table.setdefault(key, value))

    @rule(last=st.booleans())
    def popitem(self, last: bool) -> None:
        self.both(lambda table: table.popitem(last=last))

    @rule(key=KEYS, last=st.booleans())
    def move(self, key: bytes, last: bool) -> None:
        self.both(lambda table: table.move_to_end(key, last=last))

    @rule()
    def clear(self) -> None:
        self.both(lambda table: table.clear())

    @invariant()
    def equal(self) -> None:
        assert len(self.table) == len(self.model)
        assert list(self.table) == list(self.table.keys()) == list(self.model)
        assert list(self.table.values()) == list(self.model.values())
        assert list(self.table.items()) == list(self.model.items())
        assert bool(self.table) == bool(self.model)


TestBesideOrderedDict = Beside.TestCase
TestBesideOrderedDict.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Colliding:
    """A key whose hash many others have."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Colliding) and other.number == self.number


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=80))
@settings(deadline=None)
def test_keys_that_hash_alike_are_told_apart(acts: list[tuple[int, bool]]) -> None:
    table: OrderedTable[Any, int] = OrderedTable()
    model: OrderedDict[Any, int] = OrderedDict()
    for number, comes in acts:
        key = Colliding(number)
        if comes:
            table[key] = model[key] = number
        else:
            assert table.pop(key, None) == model.pop(key, None)
        assert list(table) == list(model)


class Placed:
    """A key that is looked for from a cell of its own choice on, as the table spreads hashes."""

    def __init__(self, cell: int, number: int) -> None:
        self.number = number
        back = pow(0x9E3779B97F4A7C15, -1, 2**64)
        hashes = (((cell << 32) + each) * back % 2**64 for each in count(number << 16))
        self.hash = next(each for each in hashes if each < 2**61 - 1)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("seed", range(40))
def test_keys_whose_cells_go_around_the_end_are_found_while_the_table_grows(seed: int) -> None:
    rng = random.Random(seed)
    # The last cells of the index before, of which many more have keys than there are cells.
    cells = [2 ** rng.choice((4, 5, 6)) - 1 - rng.randrange(3) for _ in range(3)]
    table: OrderedTable[Placed, int] = OrderedTable()
    model: OrderedDict[Placed, int] = OrderedDict()
    for number in range(140):
        key = Placed(rng.choice(cells), number)
        table[key] = model[key] = number
        if rng.random() < 0.2:
            gone = rng.choice(list(model))
            assert table.pop(gone) == model.pop(gone)
            assert gone not in table
        assert [table.get(each) for each in model] == list(model.values())
        assert len(table) == len(model)


def test_large_tables_stay_right_while_they_grow_and_churn() -> None:
    table: OrderedTable[int, int] = OrderedTable()
    model: OrderedDict[int, int] = OrderedDict()
    for n in range(50_000):
        table[n] = model[n] = n
        if n % 3 == 0:
            assert table.pop(n // 2, None) == model.pop(n // 2, None)
        if n % 5 == 0 and n // 4 in model:
            table.move_to_end(n // 4)
            model.move_to_end(n // 4)
    assert list(table.items()) == list(model.items())
    assert all(n in table for n in model)
    assert not any(n in table for n in range(50_000) if n not in model)


def test_churn_takes_no_more_memory() -> None:
    table: OrderedTable[int, None] = OrderedTable()
    for n in range(10_000):
        table[n] = None
    size = sys.getsizeof(table)
    for n in range(10_000, 300_000):
        del table[n - 10_000]
        table[n] = None
    assert sys.getsizeof(table) == size
    assert size < 70 * 10_000


def test_no_reference_is_kept_or_lost() -> None:
    key, value, other = b"a key of its own" + bytes(1), object(), object()
    before = [sys.getrefcount(each) for each in (key, value, other)]
    table: OrderedTable[bytes, object] = OrderedTable()
    for _ in range(3):
        table[key] = value
        table[key] = other
        assert table.setdefault(key, value) is other
        assert table.get(key) is table[key] is other
        table.move_to_end(key)
        assert list(table.items()) == [(key, other)]
        assert table.popitem() == (key, other)
        table.update({key: value})
        assert table.pop(key) is value
        table[key] = value
        del table[key]
        table[key] = value
        table.clear()
    table[key] = value
    walk = iter(table)
    del table
    assert next(walk) is key
    del walk
    gc.collect()
    assert [sys.getrefcount(each) for each in (key, value, other)] == before


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.__setitem__(b"new", 0),
        lambda table: table.__delitem__(b"2"),
        lambda table: table.move_to_end(b"1"),
        lambda table: table.popitem(),
        lambda table: table.clear(),
    ],
)
def test_a_walk_through_a_table_that_changes_is_refused(
    change: Callable[[OrderedTable[bytes, int]], None],
) -> None:
    table: OrderedTable[bytes, int] = OrderedTable()
    table.update([(b"%d" % n, n) for n in range(4)])
    walk = iter(table)
    next(walk)
    change(table)
    with pytest.raises(RuntimeError, match="changed"):
        next(walk)


def test_a_value_may_change_during_a_walk() -> None:
    table: OrderedTable[bytes, int] = OrderedTable()
    table.update([(b"%d" % n, n) for n in range(4)])
    for key in table:
        table[key] = 9
    assert list(table.values()) == [9] * 4


def test_a_key_that_changes_the_table_when_it_is_compared_is_refused() -> None:
    table: OrderedTable[Any, int] = OrderedTable()

    class Meddler(Colliding):
        def __eq__(self, other: object) -> bool:
            table.clear()
            return False

        __hash__ = Colliding.__hash__

    table[Colliding(1)] = 1
    with pytest.raises(RuntimeError, match="comparison"):
        table[Meddler(2)] = 2


def test_a_key_whose_hash_changes_is_refused_and_harms_nobody() -> None:
    class Restless:
        turn = 0

        def __hash__(self) -> int:
            return self.turn

    key = Restless()
    table: OrderedTable[Any, int] = OrderedTable()
    table[key] = 1
    key.turn = 1
    assert key not in table
    with pytest.raises(RuntimeError, match="hash"):
        table.popitem()
    key.turn = 0
    assert table.popitem() == (key, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda table: table[[]],
        lambda table: table.__setitem__([], 1),
        lambda table: [] in table,
        lambda table: table.get(),
        lambda table: table.get(1, 2, 3),
        lambda table: table.pop(),
        lambda table: table.setdefault(1),
        lambda table: table.move_to_end(),
        lambda table: table.move_to_end(last=True),
        lambda table: table.move_to_end(1, first=True),
        lambda table: table.popitem(True, False),
        lambda table: table.update(5),
        lambda table: table.update([5]),
        lambda table: table.update([(1, 2, 3)]),
        lambda table: type(table)(5),
        lambda table: hash(table),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(wrong: Callable[[Any], object]) -> None:
    table: OrderedTable[int, int] = OrderedTable()
    table[1] = 1
    with pytest.raises(TypeError):
        wrong(table)
    assert list(table.items()) == [(1, 1)]


def test_without_the_compiled_table_an_ordered_dict_stands_in() -> None:
    code = (
        "import sys; sys.modules['kvstore.policies._table'] = None; "
        "from kvstore.policies.table import COMPILED, OrderedTable; "
        "from kvstore.policies import create_policy; "
        "policy = create_policy('lru', 2); policy.insert(b'a'); policy.insert(b'b'); "
        "assert policy.evict(1, lambda key: False) == [b'a']; "
        "print(COMPILED, issubclass(OrderedTable, dict))"
    )
    root = Path(kvstore.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]
