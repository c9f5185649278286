"""Every command line that a document names runs, in its smallest form.

A command counts as another when it has other options; their values are made small. What needs
root, packages of the system or a block device skips with a reason.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kvstore
from benchmarks.server_process import free_port
from tests.commands import ROOT, commands_of, documents, flags_of
from tests.store.support import keys_of, payloads, small
from tests.tools.support import command
from tests.tools.test_top import served

SECONDS = 280

THREE_SERVERS = "examples.http_server.timing"
"""`make figures` runs it; what it starts is tested in `tests/examples/test_http_server.py`."""

PAGED = "--prompts 1 --tokens 64 --layers 1 --width 64 --device cpu --window 16"
TIMED = "--prompts 1 --tokens 100 --max-tokens 2 --layers 1 --hidden 64"
SMALLEST = {
    "examples.paged_engine": PAGED.split(),
    THREE_SERVERS: TIMED.split(),
    "benchmarks/flapping.py": ["--minutes", "0.05"],
}
"""Instead of `--dry`, where there is none or it is larger: options whose later values count."""

LESS_WAITING = "import neighbour; neighbour.QUIET_STEPS, neighbour.ROUND_SECONDS = 30, 0.5; "
UNDER = f"import runpy, sys; sys.path.insert(0, 'benchmarks'); {LESS_WAITING}"
UNDER += "runpy.run_path('benchmarks/step.py', run_name='__main__')"
"""How `step.py --neighbour` is run: its steps come by the clock, a thousand in each phase."""

RUN_ELSEWHERE = {
    "benchmarks/turmoil.py": "tests/vllm/test_turmoil.py",
    "benchmarks/reset_engine.py": "tests/vllm/test_reset.py",
    "benchmarks/turns.py": "tests/vllm/test_hybrid.py",
}
"""Programs that tests of their own run: here their options are checked."""

NEEDS_VLLM = {"benchmarks/disk.py", "benchmarks/secondary.py", "benchmarks/lookup.py"}

SLOW = {
    "benchmarks/first_token.py",
    "benchmarks/queued.py",
    "benchmarks/control.py",
    "benchmarks/hybrid.py",
    "benchmarks/kill_engine.py",
    "benchmarks/trained_model.py",
    "examples/demo.py",
}
SLOW |= {"benchmarks.serving", "benchmarks.dashboard", "benchmarks.vllm_clients"}
"""Programs that start several engines of vLLM: `make figures` runs them. Else they only start."""

ONCE = {"benchmarks.hosts", "benchmarks/opening.py", "examples.paged_engine", *NEEDS_VLLM, *SLOW}
"""Programs that are run once: their options are looked up."""

REFUSALS = ("lies on no block device", "cannot be watched", "not permitted", "not a git repository")
"""Of machines on which a benchmark cannot be had."""


@cache
def made_of(target: str) -> list[list[str]]:
    """What make would run for a target; fails where there is no such one."""
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/.ready", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"make {target}: {done.stderr}"
    for path, test in re.findall(r"(tests/[\w/]+(?:\.py)?)(?:::(\w+))?", done.stdout):
        assert (ROOT / path).exists(), f"make {target}: there is no {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"make {target}: {test}"
    for path, word in re.findall(r"(tests/\S+\.py) -k (\w+)", done.stdout):
        chosen = re.search(rf"def test_\w*{word}", (ROOT / path).read_text())
        assert chosen, f"make {target}: no test of {path} is called {word}"
    for module in re.findall(r"-m (tests[\w.]*)", done.stdout):
        assert importlib.util.find_spec(module), f"make {target}: there is no {module}"
    programs = re.findall(r"\S*/python ((?:benchmarks|examples)/\S+\.py.*)", done.stdout)
    return [["python", *line.split()] for line in programs]


def program(words: list[str]) -> tuple[list[str], str, list[str]]:
    """How it is started, its name, and its arguments."""
    if words[0] == "kvstore":
        return ["-m", "kvstore.tools"], words[0], words[1:]
    if words[1] == "-m":
        return words[1:3], words[2], words[3:]
    return words[1:2], words[1], words[2:]


def source_of(name: str) -> Path:
    source = ROOT / (f"{name.replace('.', '/')}.py" if "/" not in name else name)
    source = source if source.exists() else source.with_suffix("") / "__main__.py"
    assert source.exists(), f"{name}: there is no such program"
    return source


def every() -> Iterator[list[str]]:
    """The commands of all documents, and those that make's targets run."""
    for document in documents():
        for words in commands_of(document):
            yield words
            if words[0] == "make":
                yield from made_of_known(words[1])


def unlike() -> list[list[str]]:
    """Of commands that differ in values only the first."""
    found: dict[tuple[str, ...], list[str]] = {}
    for words in every():
        if words[0] == "make":
            alike: tuple[str, ...] = ("make", words[1])
        else:
            _, name, arguments = program(words)
            choices = arguments[:1] if name in ("kvstore", "benchmarks/eviction.py") else []
            if choices in (["ctl"], ["config"]):
                choices = [word for word in arguments if not word.startswith(("-", "/"))]
            alike = (name, *choices, *([] if name in ONCE else sorted(flags_of(arguments))))
        found.setdefault(alike, words)
    return list(found.values())


def made_of_known(target: str) -> list[list[str]]:
    try:
        return made_of(target)
    except AssertionError:
        return []  # The test of that target fails.


def marked(words: list[str]) -> object:
    name = program(words)[1] if words[0] == "python" else ""
    marks = [pytest.mark.vllm] if name in NEEDS_VLLM | SLOW else []
    marks += [pytest.mark.slow] if name in SLOW | {THREE_SERVERS} else []
    return pytest.param(words, id=" ".join(words), marks=marks)


def test_documents_name_commands() -> None:
    assert len(unlike()) > 40


@pytest.mark.parametrize("words", [marked(words) for words in unlike()])
async def test_a_command_runs_in_its_smallest_form(words: list[str], tmp_path: Path) -> None:
    if words[0] == "make":
        made_of(words[1])
        return
    start, name, arguments = program(words)
    if name == "kvstore":
        await run_tool(arguments, tmp_path)
        return
    source = source_of(name)
    if "__main__" not in source.read_text():
        assert not arguments, f"{name} is no program"
        run(start)
        return
    if name in RUN_ELSEWHERE:
        assert source.name in (ROOT / RUN_ELSEWHERE[name]).read_text()
        return
    skip_what_is_missing(name)
    arguments = [_small(word, tmp_path) for word in arguments]
    if name == "examples.http_server":
        serve([*start, *arguments])
        return
    if name not in SMALLEST:
        if not arguments and re.search(r'"folder", type=Path\)', source.read_text()):
            arguments = [str(tmp_path)]  # Named without its folder, in prose.
        arguments = [*arguments, "--dry"]
    if "--neighbour" in arguments:
        start, arguments = ["-c", UNDER], [*arguments, "--one"]
    run([*start, *arguments, *SMALLEST.get(name, [])])


@pytest.mark.parametrize("name", sorted({*RUN_ELSEWHERE, *ONCE}))
def test_what_is_not_run_with_all_options_has_those_of_the_documents(
    name: str, tmp_path: Path
) -> None:
    if name == "examples/demo.py":
        pytest.skip("it has no options, and imports nothing but the standard library")
    commands = [program(words) for words in every() if words[0] == "python"]
    named = [(start, arguments) for start, its, arguments in commands if its == name]
    flags = {flag for _, arguments in named for flag in flags_of(arguments)}
    # What no test runs has to start at least.
    told = run([*named[0][0], "--help"]) if name in SLOW else source_of(name).read_text()
    assert [flag for flag in sorted(flags) if flag not in told] == []


def test_a_benchmark_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("from kvstore.types import NoSuchThing\n")
    with pytest.raises(AssertionError, match="ImportError"):
        run([str(script)])


def run(arguments: list[str]) -> str:
    """What a program says; it has to end well."""
    # Those of pytest have names too long for the sockets that vLLM makes there.
    with tempfile.TemporaryDirectory(prefix="kvstore-") as scratch:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    if done.returncode and any(refusal in done.stdout for refusal in REFUSALS):
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def serve(arguments: list[str]) -> None:
    """Start a server, and end it when it listens."""
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        listening = any("listening" in line for line in server.stdout)
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    assert listening
    assert status in (0, -signal.SIGTERM)


def skip_what_is_missing(name: str) -> None:
    """Skip what a machine without root, servers or packages cannot run."""
    if Path(name).name in NEEDS_VLLM and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    needed = {
        "benchmarks/store.py": "redis-server",
        "benchmarks/flapping.py": "redis-server",
        "benchmarks.hosts": "redis-server",
        "benchmarks.dashboard": "prometheus",
    }
    program = needed.get(name)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    if name == "benchmarks.hosts":
        if os.geteuid():
            pytest.skip("network namespaces need root")
        tried = subprocess.run(["ip", "netns", "add", "kvstore-try"], capture_output=True)
        if tried.returncode:
            pytest.skip(f"no network namespaces: {tried.stderr.decode().strip()}")
        subprocess.run(["ip", "netns", "delete", "kvstore-try"], check=True)


def _small(word: str, folder: Path) -> str:
    """A word of a document as one that this machine has."""
    if word in ("FOLDER", "DIR", "/nvme"):
        return str(folder)
    if word == "REV" or re.fullmatch(r"HEAD~\d+|(?=.*[a-f])[0-9a-f]{7}", word):
        return "HEAD"
    if word.startswith("/tmp/") or word.endswith(".json"):
        return str(folder / Path(word).name)
    # A port, and a link in Mbit/s.
    return {"8000": "0", "1000": "20000"}.get(word, word)


async def tool(*arguments: str) -> None:
    """Run `kvstore` beside the stores of this process; it has to end well."""
    done = await asyncio.to_thread(command, *arguments)
    # The drives of this machine need not tell anything.
    bad = done.returncode and "tells of no drive" not in done.stderr
    assert not bad, done.stdout[-4000:] + done.stderr[-4000:]


async def run_tool(arguments: list[str], folder: Path) -> None:
    """Run `kvstore` over a small cache and a small trace."""
    if len(arguments) == 1:
        await tool(arguments[0], "--help")  # A word in prose.
        return
    where, trace = folder, folder / "trace.jsonl"
    if arguments[0] == "doctor":
        async with kvstore.open(small(folder, disk=32)) as store, served(store) as url:
            words = [url, *arguments[2:]]
            if "--metrics" in arguments:
                words = [str(folder), "--metrics", str(folder / "kvstore.prom")]
            await tool("doctor", *words)
        return
    if arguments[0] == "ctl":
        await run_ctl(arguments, folder)
        return
    if arguments[0] == "gate":
        # tests/vllm/test_gate.py runs it: three engines.
        await tool("gate", "--help")
        return
    if arguments[0] == "keys":
        keys_file = str(folder / "keys.toml")
        await tool("keys", keys_file, "--add", "alice")
        words = [keys_file if word in ("FILE", "keys.toml") else word for word in arguments]
        await tool(*words)
        return
    if arguments[0] == "config":
        toml, told = folder / "kvstore.toml", folder / "FILE.json"
        toml.write_text('cpu_bytes_to_use = "1MiB"\nchunk_bytes = 4096\n')
        told.write_text('{"host": "1GiB"}')
        files = {"FILE": str(toml), **{file.name: str(file) for file in (toml, told)}}
        words = [files.get(word, word) for word in arguments]
        if words == ["config", "check"]:
            words.append(str(toml))
        await tool(*words)
        return
    if arguments[0] in ("simulate", "advise"):
        requests = [[n % 7, 100 + n % 21, 200 + n] for n in range(200)]
        lines = (
            json.dumps({"timestamp": 1000 * n, "hash_ids": ids}) for n, ids in enumerate(requests)
        )
        trace.write_text("\n".join(lines))
    else:
        keys, config = keys_of("prompt", 6), small(folder, disk=32)
        where = Path(config["tiers"][0]["path"])
        async with kvstore.open(config) as store:
            await store.put(keys, payloads(keys))
            await store.flush()
    if arguments[0] == "advise":
        async with kvstore.open(small(folder, disk=32)) as store, served(store) as url:
            given = {"TRACE": str(trace), "FILE": str(trace), "URL": url, "TRACE|URL": str(trace)}
            given |= {"http://host:8000/metrics": url, "64GiB": "16MiB", "2TiB": "64MiB"}
            words = [given.get(word, word) for word in arguments]
            if "--chunk-bytes" not in words and str(trace) in words:
                words += ["--chunk-bytes", "2MiB"]  # Which a recording tells.
            await tool(*words)
        return
    namespace = next((each for each in where.iterdir() if each.is_dir()), where)
    if arguments[0] == "import" and arguments[1].endswith(".safetensors"):
        await tool("export", str(namespace), str(folder / arguments[1]))
    here = {
        "/nvme/kv/NAMESPACE": str(namespace),
        "NAMESPACE": namespace.name,
        "old.safetensors": str(folder / "old.safetensors"),
        "TRACE": str(trace),
        "PATH": str(where),
        "/nvme/kv": str(where),
        "URL|PATH": str(where),
        "http://host:8000/metrics": str(where),
        "curve.svg": str(folder / "curve.svg"),
        "64GiB": "16MiB",
        "0.15": "0.9",
        "N": "2",
        "...": "prefix",
        "SIZE": "10%",
    }
    words = [str(trace) if word.endswith(".xz") else here.get(word, word) for word in arguments]
    if arguments[0] == "top":
        words += ["--interval", "0.1", "--times", "1"]
    if arguments[0] == "purge" and "--all" not in arguments:
        words += ["--unused", "36h"]
    if arguments[0] in ("import", "show"):
        words = [str(folder / "FILE") if word == "FILE" else word for word in words]
        words = [keys_of("prompt", 1)[0].hex() if word == "KEY" else word for word in words]
    if arguments[0] == "import":
        await tool("export", str(where), str(folder / "FILE"))
    if arguments[0] == "export":
        words[2] = str(folder / "FILE")
    await tool(*words)


async def run_ctl(arguments: list[str], folder: Path) -> None:
    """Run `kvstore ctl` against a small store that serves."""
    keys, token = keys_of("prompt", 6), folder / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    where = str(folder / "ctl.sock")
    if arguments[1].startswith("http:"):
        where = f"127.0.0.1:{free_port()}"
    here = {
        "FILE": str(token),
        "KEY...": keys[0].hex(),
        "NUMBER": "1",
        "...": "status",
        "WHAT": "status",
    }
    values = {"bytes": "16KiB", "capacity_bytes": "1064960"}
    words = []
    for word in arguments[2:]:
        name, _, value = here.get(word, word).partition("=")
        small_value = values.get(name.rpartition(".")[2], value) if value else ""
        words.append(f"{name.partition('|')[0]}={small_value}" if value else name.partition("|")[0])
    config = small(folder, disk=32, control=where, control_token_file=token)
    if "reencrypt" in arguments:
        config["encryption_keys"] = str(folder / "keys.toml")
        await tool("keys", config["encryption_keys"], "--add", "*")
    async with kvstore.open(config) as store:
        await store.put(keys, payloads(keys))
        place = f"http://{where}" if ":" in where else where
        await tool("ctl", place, "--token-file", str(token), "prefetch", keys[0].hex())
        await tool("ctl", place, *words)
