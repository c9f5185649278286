"""The command line of the server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
import sys

import uvicorn

import kvstore
from examples.http_server.app import App
from examples.http_server.model import HEAD, Model, Shape

STOP_SECONDS = 5
"""How long a stop waits for answers that are being generated."""


class Server(uvicorn.Server):
    """Says where it listens: with port 0 nobody else knows."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say where."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"listening on http://{host}:{port}", flush=True)


def main() -> int:
    """Serve until SIGTERM or SIGINT; the store is closed before the process ends."""
    parser = argparse.ArgumentParser(prog="python -m examples.http_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one")
    parser.add_argument("--cpu-bytes", default="256MiB", help="host memory for chunks")
    parser.add_argument("--disk", metavar="DIR", help="folder for chunks that outlive the server")
    parser.add_argument("--disk-bytes", default="1GiB")
    parser.add_argument("--no-cache", action="store_true", help="compute everything")
    parser.add_argument("--chunk-tokens", type=_positive, default=64)
    parser.add_argument("--layers", type=_positive, default=Shape.layers)
    parser.add_argument("--hidden", type=_positive, default=Shape.hidden, help="a multiple of 64")
    parser.add_argument("--context", type=_positive, default=Shape.context)
    parser.add_argument("--seed", type=int, default=Shape.seed, help="of the weights")
    given = parser.parse_args()
    if given.hidden % HEAD:
        parser.error(f"--hidden must be a multiple of {HEAD}")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    shape = Shape(given.layers, given.hidden, given.context, given.seed)
    model = Model(shape, given.chunk_tokens)
    config = None
    if not given.no_cache:
        try:
            config = _config(given, model)
        except kvstore.KVStoreError as error:
            parser.error(str(error))
    # The store is opened and closed by the application's lifespan, not around the server:
    # uvicorn ends the process by the signal that stopped it, once the lifespan is over.
    server = Server(
        uvicorn.Config(
            App(model, config).asgi,
            host=given.host,
            port=given.port,
            loop="uvloop",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
    )
    # It has ended in order by then.
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else 1


def _config(given: argparse.Namespace, model: Model) -> kvstore.Config:
    tiers = []
    if given.disk is not None:
        tiers = [{"type": "disk", "path": given.disk, "capacity_bytes": given.disk_bytes}]
    return kvstore.Config.from_mapping(
        {
            "cpu_bytes_to_use": given.cpu_bytes,
            "chunk_bytes": model.chunk_bytes,
            "identity": model.identity,
            "tiers": tiers,
        }
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
