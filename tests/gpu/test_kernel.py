"""The bytes that the kernel copies.

Without a GPU Triton's interpreter runs it, in a process of its own: the choice is made when Triton
is imported. `test_interpreter.py` begins that process. With a GPU these tests run there, too.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvstore.device.kernel import TILE, launch  # noqa: E402
from tests.gpu.bed import Bed  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WORDS = (16, 8, 4, 2, 1)
ROOM = 2**19
PROGRAMS = 5


@pytest.fixture(params=["interpreted", "cuda"])
def place(request: pytest.FixtureRequest) -> str:
    if request.param == "interpreted":
        if not INTERPRETED:
            pytest.skip("Triton compiles in this process: test_interpreter.py runs this")
        return "cpu"
    if INTERPRETED:
        pytest.skip("Triton interprets in this process")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device: the kernel was not run on one")
    return "cuda"


class Memory:
    """Host memory that the kernel reads, and memory of the device."""

    def __init__(self, place: str) -> None:
        cuda = place == "cuda"
        random_ = torch.randint(0, 256, (ROOM,), dtype=torch.uint8)
        self.host = random_.pin_memory() if cuda else random_
        self.device = torch.zeros(ROOM, dtype=torch.uint8, device=place)
        self._place = place

    def copy(self, pieces: list[tuple[int, int, int]], word: int, *, store: bool) -> None:
        """Copy (target, source, size), offsets in bytes, and check all bytes of the target."""
        target, source = (self.host, self.device) if store else (self.device, self.host)
        source.copy_(torch.randint(0, 256, (ROOM,), dtype=torch.uint8))
        target.fill_(77)
        wanted = target.cpu().numpy().copy()
        there = source.cpu().numpy()
        for to, from_, size in pieces:
            wanted[to : to + size] = there[from_ : from_ + size]
        columns = np.array(pieces, np.int64).reshape(-1, 3).T.copy()
        columns[0] += target.data_ptr()
        columns[1] += source.data_ptr()
        lists = torch.from_numpy(np.append(columns.ravel(), 0)).to(self._place)
        launch(lists, len(pieces), word, PROGRAMS)
        if self._place == "cuda":
            torch.cuda.synchronize()
        assert (target.cpu().numpy() == wanted).all()


def scattered(dice: random.Random, sizes: list[int], word: int) -> list[tuple[int, int, int]]:
    """Pieces of these sizes, apart on either side, at odd multiples of a word."""
    columns = []
    for _ in range(2):
        at, begins = word, {}
        for number in dice.sample(range(len(sizes)), len(sizes)):
            begins[number] = at
            at += sizes[number] + word * dice.randint(0, 2)
        assert at <= ROOM
        columns.append([begins[number] for number in range(len(sizes))])
    return list(zip(*columns, sizes, strict=True))


@pytest.mark.parametrize("store", [True, False], ids=["store", "load"])
@pytest.mark.parametrize("word", WORDS)
def test_every_width_copies_every_size(place: str, word: int, store: bool) -> None:
    tile = TILE * min(word, 8)
    sizes = [0, word, 3 * word, tile - word, tile, tile + word, 2 * tile + 5 * word]
    Memory(place).copy(scattered(random.Random(word), sizes, word), word, store=store)


@pytest.mark.parametrize("count", [0, 1, PROGRAMS - 1, PROGRAMS, 9 * PROGRAMS + 1])
def test_any_number_of_pieces_is_copied(place: str, count: int) -> None:
    dice = random.Random(count)
    sizes = [16 * dice.randint(1, 100) for _ in range(count)]
    Memory(place).copy(scattered(dice, sizes, 16), 16, store=False)


@given(st.sampled_from(WORDS), st.booleans(), st.data())
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_pieces_of_unequal_sizes_are_copied(
    place: str, word: int, store: bool, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 600) | st.integers(0, 9), max_size=30))
    sizes = [word * length for length in lengths]
    dice = random.Random(data.draw(st.integers(0, 99)))
    Memory(place).copy(scattered(dice, sizes, word), word, store=store)


@given(
    way=st.sampled_from(["kernel", "staged"]),
    page=st.sampled_from([6, 8, 48, 1024, 20_000]),
    per_chunk=st.integers(1, 3),
    groups=st.integers(1, 2),
    dice=st.randoms(use_true_random=False),
)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_transfers_are_those_of_the_host_copies(
    place: str, way: str, page: int, per_chunk: int, groups: int, dice: random.Random
) -> None:
    bed = Bed(place, way, page=page, per_chunk=per_chunk, groups=groups, runs=launch)
    try:
        for _ in range(3):
            blocks, rows = bed.places(dice)
            store = dice.random() < 0.5
            ticket = bed.copies.store(blocks, rows) if store else bed.copies.load(rows, blocks)
            ticket.wait()
            size = bed.host.store(blocks, rows) if store else bed.host.load(rows, blocks)
            assert (ticket.size, ticket.error) == (size, 0)
            assert bed.same()
    finally:
        bed.close()
