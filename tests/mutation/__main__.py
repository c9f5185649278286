"""Put one wrong line after another into a copy of the project, and see which test finds it.

    python -m tests.mutation
    python -m tests.mutation --only "a chunk that is still arriving is a hit"
    python -m tests.mutation --table > docs/mutation.md

First the tests run over a copy without a fault: a test that fails there would find anything. What
was found is kept in a file, so that a run can be ended at any time and gone on with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.copied import ROOT, copy_project
from tests.mutation.faults import FAULTS, Fault

REMOTE = "tests/tiers/remote"

NEAR = {
    "kvstore/core/": {
        "residency/owned": "compactor recency devices flow cascade",
        "residency/slots": "extents compactor devices",
        "residency/breaker": "breaker",
        "residency/compactor": "compactor",
        "residency/index": "pool promotion pins chunk compactor",
        "residency/remote": "asked",
        "residency/remote_answers": "asked patience",
        "wait_queue": "deadline requests recompute unread",
        "cascade": "cascade asked reset",
        "promotion": "promotion_limit no_room pace",
        "tier_only": "jobs",
        "": "simulation",
    },
    "tiers/disk/": {
        "segment": "epoch world/power bad_input corruption trust",
        "format": "format",
        "index": "format erasing",
        "extents": "extents noted_uses corruption encryption",
        "relocation": "relocation world/power encryption",
        "tier": "epoch disk_contract",
        "volume": "epoch noted_uses space unowned corruption faults/files",
        "lane": "trust peers store/sync store/home",
        "epoch": "epoch world/power",
        "recovery": "corruption noted_uses bad_input",
        "peers": "peers codec",
        "threads": "threads",
        "unowned": "unowned",
    },
    "tiers/sealing": {"": "encryption"},
    "tiers/keys": {"": "keys encryption"},
    "kvstore/gate": {"": "codec"},
    "kvstore/maintenance/": {"": "upkeep gc"},
    "tiers/remote/": {
        "gate": "gate",
        "directory": "directory sweeper faults/shared_directory",
        "slices": "gate mooncake",
        "sweeper": "sweeper object",
        "tier": "gate directory tiers/codec object given_up",
        "": "gate directory object given_up",
    },
    "kvstore/connector/": {
        "manager": "manager_contract steps random_acts faults/pending",
        "": "scheduler scheduler_machine matching",
    },
}
"""By folder of the product and module: what tests it first of all, in the folder of its tests."""

TESTS = {
    "kvstore/core/": "core",
    "tiers/disk/": "tiers",
    "tiers/sealing": "tiers",
    "tiers/keys": "tiers",
    "kvstore/gate": "tiers",
    "kvstore/maintenance/": "tools",
    "tiers/remote/": "tiers/remote",
    "kvstore/connector/": "connector",
}
"""The folder of the tests of each folder of the product."""

OWN = {
    "core": ("tests/core", "tests/store", "tests/connector"),
    "disk": ("tests/tiers", "tests/test_compaction.py", "tests/test_sharing.py", "tests/tools"),
    "stores": tuple(
        f"{REMOTE}/test_{name}.py" for name in ("directory", "gate", "own_client", "redis")
    ),
    "connector": ("tests/connector", "tests/vllm/test_worker.py", "tests/vllm/test_whole.py"),
}
"""Tests of each room."""

LATE = (REMOTE, "tests/tools", "tests/test_commands.py", "tests/test_tutorials.py")
"""Tests that wait for others most of their time."""

NEVER = ("tests/mutation", "tests/test_distribution.py", "tests/test_site.py", "tests/test_docs.py")
"""A fault in a copy says nothing of those that read the whole project."""

META = (
    "tests/world/test_world.py::test_a_rule_that_is_taken_away_is_missed",
    "tests/core/test_simulation.py::test_the_simulation_notices_when_a_rule_is_broken",
)
"""Tests of tests: that they fail says nothing of the product."""

ALL = (
    *("tests/world", "tests/core", "tests/connector", "tests/store", "tests/tiers"),
    *("tests/faults", REMOTE, "tests"),
)
"""All others, in turn, without what has been run."""

TEST_SECONDS, SUITE_SECONDS = 120, 3600
"""How long one test, and one of the calls of pytest, may take: a fault may well hang."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a fault.

    Attributes:
        by: the test that failed first, or None.
        seconds: until then, from the start of the first test.
    """

    by: str | None
    seconds: float


class Copy:
    """A copy of the project that one fault after another is put into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_project(folder)

    def try_out(self, fault: Fault, suites: Sequence[Sequence[str]]) -> Found:
        """Put the fault in, run suites until a test fails, and take it out again."""
        file = self.folder / fault.path
        text = file.read_text()
        file.write_text(fault.applied(text))
        begun = time.monotonic()
        try:
            return Found(self.first_failing(suites), time.monotonic() - begun)
        finally:
            file.write_text(text)

    def first_failing(self, suites: Sequence[Sequence[str]]) -> str | None:
        """Run suites until a test fails: the test."""
        return next(filter(None, map(self._run, suites)), None)

    def _run(self, suite: Sequence[str]) -> str | None:
        """The first test of the suite that fails, if one does."""
        command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", "--disable-warnings"]
        command += ["-p", "no:cacheprovider", "-m", "not slow and not vllm"]
        command += ["--timeout", str(TEST_SECONDS), *(f"--deselect={each}" for each in META)]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryFile("w+") as told:
            process = subprocess.Popen(
                [*command, *suite],
                cwd=self.folder,
                env=environment,
                stdout=told,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(SUITE_SECONDS)
            except subprocess.TimeoutExpired:
                status = -1
            finally:
                # What its tests have started ends with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            told.seek(0)
            text = told.read()
        if status in (0, 5):
            return None
        # The parameters of a test may have spaces in them.
        found = re.search(r"^(?:FAILED|ERROR) ([^\s[]+)", text, re.MULTILINE)
        hung = re.search(r"^\+*\s*Timeout.*?(tests/\S+\.py)", text, re.MULTILINE | re.DOTALL)
        if found is not None:
            return found[1]
        return (
            f"{hung[1]} (hangs)" if hung is not None else f"{' '.join(suite)} (ends with {status})"
        )


def near(path: str) -> list[str]:
    """The tests that are nearest to a module."""
    start = next(each for each in NEAR if path.startswith(each))
    module = path.removeprefix(start).removesuffix(".py")
    names = NEAR[start].get(module) or NEAR[start][""]
    places = (name if "/" in name else f"{TESTS[start]}/{name}" for name in names.split())
    return ["/test_".join(f"tests/{place}.py".rsplit("/", 1)) for place in places]


def suites_for(fault: Fault) -> list[list[str]]:
    """The arguments of each call of pytest for a fault."""
    run: list[str] = []
    suites = []
    for suite in (near(fault.path), ALL[:1], OWN[fault.room], *((each,) for each in ALL)):
        fresh = [each for each in suite if each not in run]
        if fresh:
            later = () if suite == ("tests",) else LATE
            within = tuple(f"{each}/" for each in fresh)
            passed_over = [each for each in (*run, *NEVER, *later) if each.startswith(within)]
            suites.append([*fresh, *(f"--ignore={each}" for each in dict.fromkeys(passed_over))])
            run += fresh
    return suites


PASSES = (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, None))
"""Suites that every fault is tried with, then those for what these have not found, and so on."""


def run(faults: Sequence[Fault], results: Path, workers: int) -> int:
    """Try the faults that have no result yet; returns how many no test has found."""
    done: dict[str, dict[str, Any]] = {}
    if results.is_file():
        done = json.loads(results.read_text())
    results.parent.mkdir(parents=True, exist_ok=True)
    copies: SimpleQueue[Copy] = SimpleQueue()
    begun = time.monotonic()

    def tried(fault: Fault) -> int:
        """How many passes it needs no more."""
        return int(done.get(fault.name, {"passes": 0})["passes"])

    def one(fault: Fault, some: slice) -> tuple[Fault, Found]:
        copy = copies.get()
        try:
            return fault, copy.try_out(fault, suites_for(fault)[some])
        finally:
            copies.put(copy)

    def all_of(left: Sequence[Fault], some: slice) -> None:
        with ThreadPoolExecutor(workers) as pool:
            running = [pool.submit(one, fault, some) for fault in left]
            for count, each in enumerate(as_completed(running), 1):
                fault, found = each.result()
                before = done.get(fault.name, {"seconds": 0.0})["seconds"]
                last = found.by is not None or some.stop is None
                passes = len(PASSES) if last else PASSES.index(some) + 1
                seconds = found.seconds + before
                done[fault.name] = {"by": found.by, "seconds": seconds, "passes": passes}
                results.write_text(json.dumps(done, indent=1))
                spent = (time.monotonic() - begun) / 60
                by = found.by or ("NOTHING FINDS IT" if last else "not yet")
                print(f"{count} of {len(left)}, {spent:.0f} min: {fault.name}: {by}", flush=True)

    with tempfile.TemporaryDirectory(prefix="kvstore-mutation-") as scratch:
        for number in range(workers):
            copies.put(Copy(Path(scratch) / str(number)))
        for number, some in enumerate(PASSES):
            all_of([each for each in faults if tried(each) == number], some)
    return sum(done[fault.name]["by"] is None for fault in faults)


def sound(rooms: Sequence[str], workers: int) -> str | None:
    """The first test that fails over a copy without a fault, if there is one."""
    with tempfile.TemporaryDirectory(prefix="kvstore-mutation-") as scratch:
        suites = [[*OWN[room], f"--ignore={REMOTE}"] for room in rooms] + [["tests/world"]]
        copies = [Copy(Path(scratch) / str(number)) for number in range(min(workers, len(suites)))]
        with ThreadPoolExecutor(len(copies)) as pool:
            shares = [suites[number :: len(copies)] for number in range(len(copies))]
            return next(filter(None, pool.map(Copy.first_failing, copies, shares)), None)


def table(results: Path) -> str:
    """The page that tells which test finds which fault."""
    done = json.loads(results.read_text())
    rows = []
    unfound = 0
    for fault in FAULTS:
        found = done[fault.name]
        by = f"`{found['by']}`" if found["by"] else f"**nothing**: {fault.unfound}"
        unfound += found["by"] is None
        rows.append(f"| {fault.what} | `{fault.path}` | {by} | {found['seconds']:.0f} |")
    head = (ROOT / "docs" / "mutation.md").read_text().partition("| Fault |")[0]
    found_all = f"{len(FAULTS) - unfound} of {len(FAULTS)}"
    head = re.sub(r"\*\*\d+ of \d+\*\*", f"**{found_all}**", head)
    lines = [head + "| Fault | Module | Found by | Seconds |", "|---|---|---|---:|", *rows]
    return "\n".join(lines)


def main() -> int:
    """Do what the command line says; 1 if a fault is not found that should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("build/mutation.json"))
    parser.add_argument("--only", nargs="*", default=[], metavar="WHAT", help="these faults alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", action="store_true", help="print docs/mutation.md")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests first")
    parser.add_argument("--dry", action="store_true", help="only look whether all can be put in")
    options = parser.parse_args()
    if options.dry:
        for fault in FAULTS:
            fault.applied((ROOT / fault.path).read_text())
        return 0
    if options.table:
        print(table(options.results))
        return 0
    faults = [fault for fault in FAULTS if not options.only or fault.what in options.only]
    if not options.unchecked:
        failed = sound(sorted({fault.room for fault in faults}), options.workers)
        if failed is not None:
            print(f"without a fault {failed} fails", file=sys.stderr)
            return 1
    unfound = run(faults, options.results, options.workers)
    print(f"{len(faults) - unfound} of {len(faults)} found")
    return int(unfound > sum(bool(fault.unfound) for fault in faults))


if __name__ == "__main__":
    sys.exit(main())
