"""``kvstore ctl``: inspect and change a store while it serves, by its control socket."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvstore.errors import MALFORMED, NOT_PARSED, KVStoreError
from kvstore.sizes import format_size
from kvstore.tools.output import asks, confirm, counted, shows_progress, whole_number

__all__ = ["add_ctl_arguments", "run_ctl"]

FORMAT = 1
"""The version of answers that is understood."""

ANSWER_SECONDS = 90.0
"""Longest time without an answer."""

WAIT_SECONDS = 1.0
"""How often progress is shown."""


SETTINGS = (
    "allowed are host.bytes, host.eviction_policy, tiers.N.capacity_bytes, "
    "tiers.N.eviction_policy, tiers.N.compaction_rate; tiers as status numbers them"
)


class Client:
    """Asks one control server.

    Args:
        where: the path of its socket, or ``http://HOST:PORT``.
        token: names changes on a port.
    """

    def __init__(self, where: str, token: str | None) -> None:
        self._where = where
        self._token = token

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            KVStoreError: if there is no answer, or the server refuses.
        """
        headers = {"Host": "localhost", "Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        connection = self._connect()
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            status, told = response.status, response.read()
        except ValueError as error:
            # What it says shows the token.
            raise KVStoreError("the token must be one line of printable characters") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or repr(error)
            if os.path.exists(self._where) and not Path(self._where).is_socket():
                reason = "it is no socket"
            raise KVStoreError(f"{self._where}: no answer: {reason}") from error
        finally:
            connection.close()
        try:
            answer = json.loads(told)
        except NOT_PARSED as error:
            raise KVStoreError(f"{self._where}: is no control socket of kvstore") from error
        if not isinstance(answer, dict) or answer.get("version") != FORMAT:
            raise KVStoreError(f"{self._where}: is no control socket of kvstore")
        if status >= 400:
            raise KVStoreError(f"{self._where}: {answer.get('error', status)}")
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        where = self._where
        if re.fullmatch(r"(localhost|[\d.]+|\[[\da-fA-F:]+\]):\d+", where):
            where = f"http://{where}"
        if not where.startswith("http://"):
            return _UnixConnection(where)
        try:
            place = urlsplit(where)
            host, port = place.hostname, place.port
        except ValueError:
            host = port = None
        if host is None or port is None:
            raise KVStoreError(f"{self._where}: must be http://HOST:PORT")
        # A server never listens at ::1 under this name: who does might take the token.
        host = "127.0.0.1" if host == "localhost" else host
        try:
            return http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
        except http.client.InvalidURL as error:
            raise KVStoreError(f"{self._where}: must be http://HOST:PORT") from error


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def add_ctl_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("where", metavar="PATH|URL", help="control socket, or http://HOST:PORT")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="token, for a port")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    commands = parser.add_subparsers(title="commands", required=True, metavar="WHAT", dest="what")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    add("status", "settings, chunks, and jobs")
    for name, text in (
        ("prefetch", "fetch chunks to host memory"),
        ("retain", "protect chunks from eviction"),
        ("release", "end the protection of chunks; they are the first to leave"),
        ("demote", "let chunks leave host memory once a tier has them"),
        ("remove", "remove chunks from host memory and all tiers of the process"),
    ):
        command = add(name, text)
        command.add_argument("keys", nargs="*", metavar="KEY", help="keys in hexadecimal")
        command.add_argument(
            "--file", metavar="FILE", help="JSON with keys, or with tokens and model; - for stdin"
        )
        if name == "retain":
            command.add_argument("--seconds", type=float, required=True)
        _add_common(command)
    reset = add("reset", "forget everything, on every tier")
    reset.add_argument("--yes", action="store_true", help="do not ask")
    _add_common(reset)
    _add_common(add("reencrypt", "encrypt with the newest keys what is encrypted with older ones"))
    command = add("set", "change sizes, policies and the rate of compaction")
    command.add_argument("settings", nargs="+", metavar="NAME=VALUE", help=SETTINGS)
    _add_common(command)
    for each in commands.choices.values():
        _add_json(each)
    for name, text in (("job", "show a job"), ("cancel", "cancel a job")):
        command = add(name, text)
        command.add_argument("number", type=whole_number)
        _add_json(command)


def _add_json(command: argparse.ArgumentParser) -> None:
    """Take it behind the command as well, where every other command has it."""
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS,
                         help="print JSON instead of text")  # fmt: skip


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dry-run", action="store_true", help="only report what would be done")
    command.add_argument("--detach", action="store_true", help="do not wait for the end")


def run_ctl(options: argparse.Namespace) -> int:
    """Do what is asked for; 1 if a job failed or was cancelled.

    Raises:
        KVStoreError: if the server does not answer, or refuses.
    """
    token = None
    if options.token_file is not None:
        token = _text_of(options.token_file, "ascii").strip()
    client = Client(options.where, token)
    if options.what == "status":
        return _print(client.ask("GET", "/v1/status"), options.json, _status_lines)
    if options.what in ("job", "cancel"):
        method = "GET" if options.what == "job" else "DELETE"
        return _print(client.ask(method, f"/v1/jobs/{options.number}"), options.json, _job_lines)
    if options.what == "reset" and asks(options):
        confirm(f"forget everything that {options.where} serves, on every tier?")
    command = "settings" if options.what == "set" else options.what
    told = client.ask("POST", f"/v1/{command}", _body(options))
    if "job" not in told:
        # A dry run: the body of a file may say so, too.
        return _print(told, options.json, _dry_lines)
    if not options.detach:
        told = _wait(client, told, quiet=options.json)
    return _print(told, options.json, _job_lines)


def _body(options: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if options.what == "set":
        body = _settings(options.settings)
    elif options.what not in ("reset", "reencrypt"):
        if bool(options.keys) == (options.file is not None):
            raise KVStoreError("name the chunks by KEY or by --file, one of them")
        body = {"keys": options.keys} if options.keys else _read(options.file)
    if options.what == "retain":
        body["seconds"] = options.seconds
    return body | ({"dry_run": True} if options.dry_run else {})


def _read(name: str) -> dict[str, Any]:
    try:
        if name == "-" and sys.stdin is None:
            raise KVStoreError("-: there is no standard input")
        text = sys.stdin.read() if name == "-" else _text_of(Path(name), "utf-8")
        found = json.loads(text)
    except NOT_PARSED as error:
        raise KVStoreError(f"{name}: is not JSON: {error}") from error
    if isinstance(found, list):
        return {"keys": found}
    if not isinstance(found, dict):
        raise KVStoreError(f"{name}: must be a list of keys, or an object with keys or tokens")
    return found


def _text_of(path: Path, encoding: str) -> str:
    try:
        return path.read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise KVStoreError(f"{path}: {reason}") from error


def _settings(words: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        place, _, field = name.rpartition(".")
        if place.partition(".")[0] not in ("", "host", "tiers"):
            raise KVStoreError(f"{word!r}: {SETTINGS}")
        if not equals or not place:
            raise KVStoreError(f"{word!r}: write NAME=VALUE, such as host.bytes=8GiB")
        table = settings
        for part in place.split(".", 1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise KVStoreError(f"{word!r}: {place} is a value, by another word")
        if field in table:
            raise KVStoreError(f"{word!r}: {name} is given twice")
        table[field] = value
    return settings


def _wait(client: Client, told: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Wait until a job has ended, and show its progress to a terminal."""
    shows = shows_progress() and not quiet
    while told["state"] == "running":
        told = client.ask("GET", f"/v1/jobs/{told['job']}?wait={WAIT_SECONDS}")
        if shows:
            line = f"{told['command']}: {told['done']} of {told['keys']}, {told['left']} to change"
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
    if shows:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return told


def _print(told: dict[str, Any], as_json: bool, lines: Any) -> int:
    try:
        text = json.dumps(told, indent=2) if as_json else "\n".join(lines(told))
    except MALFORMED as error:
        raise KVStoreError(f"the answer of the server cannot be read ({error!r:.100})") from error
    print(text)
    return int(told.get("state") in ("failed", "cancelled"))


def _job_lines(told: dict[str, Any]) -> list[str]:
    line = f"job {told['job']}, {told['command']}: {told['state']} after {told['seconds']:.2f} s"
    if told["keys"]:
        line += f"; {told['done']} of {counted(told['keys'], 'key')}, {told['affected']} affected"
    if told["left"]:
        line += f"; {told['left']} keys, rows and segments still to change"
    return [line, *([f"  {told['error']}"] if told["error"] else [])]


def _dry_lines(told: dict[str, Any]) -> list[str]:
    lines = [f"{told['command']}: nothing was done"]
    if "places" in told:
        lines[0] += f"; {told['keys']} keys"
        lines += [f"  {place}: {count}" for place, count in told["places"].items()]
    lines += [
        f"  {place}: {counted(count, 'chunk')}" for place, count in told.get("chunks", {}).items()
    ]
    lines += [
        f"  tier {tier}: {counted(count, 'segment')}"
        for tier, count in told.get("segments", {}).items()
    ]
    lines += [f"  would change {text}" for text in told.get("would_change", ())]
    return lines


def _status_lines(told: dict[str, Any]) -> list[str]:
    host, stats = told["host"], told["stats"]
    used = host["bytes"] * stats["chunks"] // max(1, stats["rows"])
    size = format_size(host["bytes"])
    if host["bytes"] < host["allocated_bytes"]:
        size += f" ({format_size(host['allocated_bytes'])} are allocated)"
    lines = [
        f"process {told['pid']}",
        f"host: {stats['chunks']} chunks, {format_size(used)} of {size} in use, "
        f"{host['eviction_policy']}",
    ]
    for tier, its in zip(told["tiers"], stats["tiers"], strict=True):
        line = f"tier {tier['tier']}, {tier['name']}: {its['chunks']} chunks"
        if tier["capacity_bytes"] is not None:
            line += f", at most {format_size(tier['capacity_bytes'])}"
        if tier["eviction_policy"] is not None:
            line += f", {tier['eviction_policy']}"
        if tier["compaction_rate"]:
            line += f", compaction of {format_size(tier['compaction_rate'])}/s"
        lines.append(line)
    if told["changing"]:
        lines.append(f"{told['changing']} keys, rows and segments still to change")
    # A server of an older version does not tell them.
    for command, reason in told.get("refused", {}).items():
        lines.append(f"takes no {command}: {reason}")
    for job in told["jobs"]:
        lines += _job_lines(job)
    return lines
