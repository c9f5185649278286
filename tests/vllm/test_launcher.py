"""What the tests of engines rely on: a child of a launcher is as good as a process of its own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.vllm.engines import run_script


def run(
    folder: Path,
    script: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    launcher: int = 0,
    timeout: float = 60.0,
) -> tuple[int, list[str]]:
    """Its exit status and what it printed."""
    path, log = folder / "script.py", folder / "log.txt"
    path.write_text(script)
    status = run_script(
        path, list(arguments), folder, log, environment or {}, launcher=launcher, timeout=timeout
    )
    return status, log.read_text().splitlines()


def test_a_child_has_its_own_session_folder_environment_and_arguments(tmp_path: Path) -> None:
    script = """
import os, sys
print(os.getsid(0) == os.getpid(), os.getcwd(), os.environ["OWN"], sys.argv[1:], __name__)
print("told", file=sys.stderr)
"""
    status, said = run(tmp_path, script, "a", "b", environment={"OWN": "1"})
    assert status == 0
    assert said == [f"True {tmp_path} 1 ['a', 'b'] __main__", "told"]
    assert "OWN" not in os.environ


def test_what_one_script_does_is_not_seen_by_the_next(tmp_path: Path) -> None:
    mark = "import os, vllm; vllm.mark = 1; os.environ['MARK'] = '1'; os.chdir('/')"
    assert run(tmp_path, mark)[0] == 0
    look = "import os, vllm; print(hasattr(vllm, 'mark'), 'MARK' in os.environ, os.getcwd())"
    assert run(tmp_path, look) == (0, [f"False False {tmp_path}"])


def test_a_child_finds_vllm_imported_and_no_thread(tmp_path: Path) -> None:
    script = "import os, sys; print('vllm' in sys.modules, len(os.listdir('/proc/self/task')))"
    assert run(tmp_path, script) == (0, ["True 1"])


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no')", 1),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_a_child_ends_with_the_status_of_its_script(
    tmp_path: Path, script: str, status: int
) -> None:
    assert run(tmp_path, script)[0] == status


def test_what_is_registered_for_the_end_runs_once_threads_have_ended(tmp_path: Path) -> None:
    script = """
import atexit, threading, time
atexit.register(print, "end")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
"""
    assert run(tmp_path, script) == (0, ["thread", "end"])


def test_a_script_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    script = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
    with pytest.raises(subprocess.TimeoutExpired):
        run(tmp_path, script, timeout=3.0)
    child = int((tmp_path / "log.txt").read_text())
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < end, "its child still runs"
        time.sleep(0.01)
    assert run(tmp_path, "print('next')") == (0, ["next"])


def test_a_child_finds_packages_in_folders_that_its_launcher_does_not_know(tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "elsewhere-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "elsewhere_module.py").write_text("WHERE = 'elsewhere'")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[some.group]\nelsewhere = elsewhere_module:WHERE\n")
    script = """
from importlib.metadata import entry_points
print(*[each.load() for each in entry_points(group="some.group")])
"""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(site)]
    found = run(tmp_path, script, environment={"PYTHONPATH": os.pathsep.join(paths)})
    assert found == (0, ["elsewhere"])
    assert run(tmp_path, script) == (0, [""])


def test_what_the_launcher_has_imported_is_no_work_for_a_childs_collections(tmp_path: Path) -> None:
    script = """
import gc, weakref
class Ring: pass
ring = Ring()
ring.ring = ring
gone = weakref.ref(ring)
before = gc.get_freeze_count()
gc.freeze()
del ring
gc.unfreeze()
gc.collect()
print(before > 100_000, gc.get_freeze_count() == before, gone() is None)
"""
    assert run(tmp_path, script) == (0, ["True True True"])


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="one hash seed for all")
def test_the_two_launchers_have_different_hash_seeds(tmp_path: Path) -> None:
    first, again, other = (
        run(tmp_path, "print(hash('a'))", launcher=number) for number in (0, 0, 1)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "LD_PRELOAD"])
def test_an_environment_that_is_read_at_the_start_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError, match="let it have its own"):
        run(tmp_path, "", environment={name: "other"})
