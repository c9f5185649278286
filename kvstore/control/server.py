"""Control server: the commands over HTTP, on a Unix socket or a loopback port.

    GET    /v1/status            settings, statistics, jobs
    POST   /v1/COMMAND           begins a command; the body is its JSON; answers 202 with its job
    GET    /v1/jobs/NUMBER       progress of a job; with ?wait=SECONDS as soon as it has ended
    DELETE /v1/jobs/NUMBER       cancels it

A Unix socket is for its owner alone. On a port, whoever changes something names a token. An error
is a JSON object with the field ``error``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hmac
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from kvstore.concurrency import given_up_in_children, open_at_once
from kvstore.control.commands import FORMAT, Commands
from kvstore.control.jobs import Job
from kvstore.errors import NOT_PARSED, ConfigError, KVStoreError
from kvstore.types import about

__all__ = ["ControlServer", "is_socket", "loopback", "token_of"]

logger = logging.getLogger("kvstore")

_unheard = logging.getLogger("kvstore.control.http")
"""What aiohttp says of requests that are none: anybody on this machine could fill the log."""

_unheard.setLevel(logging.CRITICAL)

MOST_BODY = 8 * 2**20
"""Most bytes of a command: enough for as many keys as it may name."""

MOST_NESTED = 1024
"""Most lists and tables in a command. To read millions of them takes seconds."""

MOST_CONNECTIONS = 128
"""Most connections; the oldest are closed beyond that. Each takes a descriptor of the server."""

LOCK_SECONDS = 5.0
"""Longest wait for other processes that begin to listen in the same folder."""

MOST_WAIT = 60.0
"""Most seconds that a request for a job is held."""

MOST_PATH = 107
"""Most bytes of the path of a socket on Linux."""

MOST_SOCKETS = 64
"""Most processes on one machine that may be controlled under one name."""

CHECK_SECONDS = 1.0
"""How often connections are counted."""

LEAST_TOKEN, MOST_TOKEN = 16, 4096
"""Least and most characters of a token."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def loopback(where: str) -> tuple[str, int] | None:
    """Return host and port if `where` names a port of this machine; None for a path.

    Raises:
        ValueError: if it is a port of another machine, or no port.
    """
    host, colon, port = where.rpartition(":")
    if not colon or "/" in where:
        return None
    host = host.strip("[]")
    if host not in LOOPBACK:
        raise ValueError(f"must be a path, or a port of {', '.join(LOOPBACK)}")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError("the port must be a number from 1 to 65535")
    return host, int(port)


class ControlServer:
    """Serves `commands` while `run` runs. The socket is there from the beginning.

    The first process listens at a path, others on the same machine at the first of ``NAME-1.EXT``,
    ``NAME-2.EXT`` and so on at which no process listens.

    Args:
        where: a path, or ``HOST:PORT`` of a loopback address.
        token_file: holds the token that changes name on a port; without one they are refused there.

    Raises:
        ConfigError: if that is not possible, with the reason.
    """

    def __init__(self, where: str, token_file: Path | None, commands: Commands) -> None:
        self._commands = commands
        self._token = None if token_file is None else token_of(token_file)
        self._path: Path | None = None
        self._made = (0, 0)
        self._stopped = asyncio.Event()
        try:
            place = loopback(where)
            self._socket = self._listen(Path(where)) if place is None else _listen_on(*place)
        except (OSError, ValueError) as error:
            told = getattr(error, "strerror", None) or error
            raise ConfigError(f"control = {where!r}: {told}") from error
        self.where = where if self._path is None else str(self._path)
        _open.add(self)

    async def run(self) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=MOST_BODY)
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/jobs/{number}", self._job)
        app.router.add_delete("/v1/jobs/{number}", self._cancel)
        app.router.add_post("/v1/{command}", self._command)
        # What is compressed would be unpacked before anybody asks whether it is allowed.
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_unheard,
            shutdown_timeout=0.5,
            auto_decompress=False,
            lingering_time=1.0,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket).start()
            logger.info(
                "kvstore: controlled at %s", self.where, extra=about("control.open", at=self.where)
            )
            while not self._stopped.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), CHECK_SECONDS)
                assert runner.server is not None
                for connection in runner.server.connections[:-MOST_CONNECTIONS]:
                    connection.force_close()
        finally:
            await self._commands.end()
            await runner.cleanup()
            self.abandon()

    def stop(self) -> None:
        self._stopped.set()

    def abandon(self) -> None:
        """Close the socket, if that was not done."""
        self._socket.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                # Somebody may have removed it, and another process listen there.
                if _place_of(self._path) == self._made:
                    self._path.unlink()
            self._path = None

    def abandon_in_child(self) -> None:
        """Let a forked child not listen: nobody would accept there, and the address stays taken."""
        self._path = None
        if self._socket.fileno() >= 0:
            # The loop of the parent has the descriptor, too, and may close it again.
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nothing, self._socket.fileno(), inheritable=False)
            os.close(nothing)

    # -- requests --------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_allowed(request)
            return await handler(request)
        except KVStoreError as error:
            return _refused(400, str(error))
        except web.HTTPException as error:
            return _refused(error.status, error.reason)
        except Exception as error:
            logger.exception("a control request failed", extra=about("control.failed"))
            return _refused(500, repr(error))

    def _check_allowed(self, request: web.Request) -> None:
        """Refuse who may not ask.

        Raises:
            HTTPForbidden: with the reason.
        """
        if self._path is not None:
            # The file system says who may.
            return
        # A page in a browser may send requests here, under another name of this machine.
        try:
            host = request.url.host
        except ValueError:
            # A header that names no host.
            host = None
        if host not in LOOPBACK:
            raise web.HTTPForbidden(reason="name this machine by a loopback address")
        if request.method == "GET":
            return
        if self._token is None:
            raise web.HTTPForbidden(reason="on a port, changes need control_token_file")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # Headers that are not UTF-8 come with surrogates.
        told = given.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(told, self._token.encode()):
            raise web.HTTPForbidden(reason="the token is missing or wrong")

    async def _status(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._commands.status())

    async def _command(self, request: web.Request) -> web.StreamResponse:
        body = await _body_of(request)
        told = await self._commands.run(request.match_info["command"], body)
        return web.json_response(told, status=200 if told.get("dry_run") else 202)

    async def _job(self, request: web.Request) -> web.StreamResponse:
        job = self._job_of(request)
        wait = min(MOST_WAIT, _seconds_of(request))
        if wait > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.ended.wait(), wait)
        return web.json_response({"version": FORMAT, **job.told()})

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        job = self._job_of(request)
        job.cancel()
        return web.json_response({"version": FORMAT, **job.told()})

    def _job_of(self, request: web.Request) -> Job:
        number = request.match_info["number"]
        known = number.isdecimal() and len(number) < 20
        if not known or (job := self._commands.job(int(number))) is None:
            raise web.HTTPNotFound(reason="no such job, or it ended long ago")
        return job

    # -- the socket ------------------------------------------------------------------------

    def _listen(self, path: Path) -> socket.socket:
        # Of processes that begin together one looks after the other.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        end = time.monotonic() + LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return self._listen_at_first(path)
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise ValueError(f"another process holds {path.parent} locked") from None
                time.sleep(0.02)
        finally:
            os.close(folder)

    def _listen_at_first(self, path: Path) -> socket.socket:
        for number in range(MOST_SOCKETS):
            name = path.name if not number else f"{path.stem}-{number}{path.suffix}"
            at = path.with_name(name)
            if _is_served(at):
                continue
            listening = socket.socket(socket.AF_UNIX)
            try:
                # The file gets the rights of the socket: nobody else's at any moment.
                os.fchmod(listening.fileno(), stat.S_IRUSR | stat.S_IWUSR)
                listening.bind(str(at))
                listening.listen()
                # A process may change its folder.
                self._path = at.absolute()
                self._made = _place_of(self._path)
            except OSError:
                listening.close()
                raise
            return listening
        raise ValueError(f"{MOST_SOCKETS} processes listen there already")


_open = given_up_in_children(ControlServer.abandon_in_child)


def _place_of(path: Path) -> tuple[int, int]:
    """Return what tells the file at the path from any other."""
    found = path.lstat()
    return found.st_dev, found.st_ino


def is_socket(path: Path) -> bool:
    """Whether there is a socket at the path.

    Raises:
        ValueError: if there cannot be one: the folder is missing, the path is too long, or there
            is a file of another kind.
    """
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist")
    if len(os.fsencode(path)) > MOST_PATH:
        raise ValueError(f"the path of a socket has at most {MOST_PATH} bytes")
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ValueError("there is a file that is no socket")
    except FileNotFoundError:
        return False
    return True


def _is_served(path: Path) -> bool:
    """Whether a process listens at the path. A socket that nobody listens at is removed.

    Raises:
        ValueError: as `is_socket`.
    """
    if not is_socket(path):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return False
        except (TimeoutError, BlockingIOError):
            # It does not accept, or has as many to accept as it may.
            return True
        return True


def _listen_on(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            ("127.0.0.1" if host == "localhost" else host, port), family=family
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError("another process listens there") from error
        raise


def token_of(path: Path) -> str:
    """Read a token that nobody else can read.

    Raises:
        ConfigError: with the reason why it cannot be used.
    """
    try:
        # A pipe in its place shall be refused, not waited for.
        with open(open_at_once(path, follows=True), encoding="ascii") as file:
            found = os.fstat(file.fileno())
            token = file.read(MOST_TOKEN).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"control_token_file = {str(path)!r}: {reason}") from error
    doubt = None
    if stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        doubt = "others may read or write it: chmod 600"
    elif found.st_uid not in (0, os.geteuid()):
        doubt = "belongs to another user"
    elif len(token) < LEAST_TOKEN or not token.isprintable():
        doubt = f"must hold one line of at least {LEAST_TOKEN} characters"
    if doubt is not None:
        raise ConfigError(f"control_token_file = {str(path)!r}: {doubt}")
    return token


async def _body_of(request: web.Request) -> dict[str, Any]:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise web.HTTPUnsupportedMediaType(reason="a command must not be compressed")
    try:
        text = await request.read()
    except ConnectionError as error:
        raise ConfigError("the body ends too early") from error
    if text.count(b"[") + text.count(b"{") > MOST_NESTED:
        raise ConfigError("the body has more lists and objects than any command")
    try:
        body = json.loads(text) if text else {}
    except NOT_PARSED as error:
        raise ConfigError(f"the body is not JSON that can be read: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object")
    return body


def _seconds_of(request: web.Request) -> float:
    try:
        return float(request.query.get("wait", "0"))
    except ValueError as error:
        raise ConfigError("wait must be a number of seconds") from error


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"version": FORMAT, "error": reason}, status=status)
