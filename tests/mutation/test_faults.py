"""The table of faults fits the product as it is, and its page tells of each of them."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter

import pytest

from tests.copied import ROOT
from tests.mutation.__main__ import ALL, LATE, META, NEVER, OWN, near
from tests.mutation.faults import FAULTS, Fault

PAGE = (ROOT / "docs" / "mutation.md").read_text()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_put_in(fault: Fault) -> None:
    text = (ROOT / fault.path).read_text()
    ast.parse(fault.applied(text))
    assert fault.applied(text) != text


def test_there_are_many_faults_in_every_room_and_no_two_have_one_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 100
    assert min(Counter(fault.room for fault in FAULTS).values()) >= 15


def test_the_tests_that_are_named_are_there() -> None:
    for path in {fault.path for fault in FAULTS}:
        assert [file for file in near(path) if not (ROOT / file).is_file()] == []
        assert near(path)
    for place in (*ALL, *LATE, *NEVER, *itertools.chain(*OWN.values())):
        assert (ROOT / place).exists(), place
    for test in META:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


def test_the_page_tells_which_test_finds_each_and_at_most_five_percent_are_not_found() -> None:
    rows = re.findall(r"^\| (.+) \| `(\S+)` \| (.+) \| \d+ \|$", PAGE, re.MULTILINE)
    told = {f"{path}: {what}": by for what, path, by in rows}
    assert told.keys() == {fault.name for fault in FAULTS}
    for by in told.values():
        file = re.match(r"`(tests/[\w/]+\.py)", by)
        assert by.startswith("**nothing**") or (file and (ROOT / file[1]).is_file()), by
    unfound = [by for by in told.values() if by.startswith("**nothing**")]
    assert len(unfound) <= len(FAULTS) // 20
    assert all(len(by) > len("**nothing**: ") for by in unfound)
    assert f"**{len(FAULTS) - len(unfound)} of {len(FAULTS)}**" in PAGE
