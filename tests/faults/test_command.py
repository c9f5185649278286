"""The `kvstore` command over a disk that fails."""

from __future__ import annotations

import pytest

from kvstore.tools.cli import main
from tests.faults.conftest import EIO, FaultyDisk
from tests.faults.support import SLOTS, calling

COMMANDS = [
    ["inspect"],
    ["verify"],
    ["compact", "--dry-run"],
    ["purge", "--all", "--dry-run"],
    ["compact"],
    ["purge", "--unused", "1000d"],
]

OPERATIONS = ["open", "read", "getattr", "readdir", "opendir", "statfs", "create", "write", "fsync"]


@pytest.mark.parametrize("op", OPERATIONS)
async def test_a_command_over_a_disk_that_fails_says_so_and_its_status_tells(
    faulty: FaultyDisk, capsys: pytest.CaptureFixture[str], op: str
) -> None:
    path = faulty.path / "cache"
    async with calling(path) as caller:
        assert await caller.save(range(SLOTS)) == set(range(SLOTS))
    parts = ["", "cache$", "lane-0", "segment-", "namespace.json", "lock"]
    for part in [*parts, "all"]:
        for arguments in COMMANDS if part != "all" else [["purge", "--all"]]:
            faulty.obey({"op": op, "path": part.replace("all", ""), **EIO})
            status = main([*arguments, str(path)])
            faulty.obey()
            told = "".join(capsys.readouterr())
            assert status in (0, 1, 2)
            assert status == 0 or "WRONG" in told or "FAILED" in told or "kvstore: " in told
            if arguments == ["compact"]:
                # What could not be read is not lost.
                assert main(["verify", str(path)]) == 0
                capsys.readouterr()
    async with calling(path) as caller:
        await caller.each(range(SLOTS))
