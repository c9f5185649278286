"""Azure's blob storage for a while, for tests: Azurite, Microsoft's own emulator.

It is an npm package: `npm install -g azurite`.
"""

from __future__ import annotations

import hmac
import shutil
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Sequence
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path

from benchmarks.server_process import ServerProcess

__all__ = ["Azurite"]

PROGRAM = "azurite-blob"

ACCOUNT, KEY = "kvstore", b64encode(b"kept-in-the-environment").decode()

VERSION = "2021-08-06"


class Azurite(ServerProcess):
    """A server on the loopback, with one container.

    Args:
        folder: for its files.
    """

    container = "container"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "azurite.out")
        self._folder = folder
        self.start()

    @staticmethod
    def is_installed() -> bool:
        """Whether this machine has it."""
        return shutil.which(PROGRAM) is not None

    @property
    def url(self) -> str:
        """What a tier is told."""
        return f"az://{self.container}/kv"

    @property
    def endpoint(self) -> str:
        """Where it serves. The account is a part of it, as there are no names of hosts here."""
        return f"http://{self.host}:{self.port}/{ACCOUNT}"

    @property
    def environment(self) -> dict[str, str]:
        """Credentials, as clients look for them."""
        return {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}

    def command(self) -> Sequence[str]:
        """What starts it."""
        place = ["--location", str(self._folder), "--blobHost", self.host]
        quiet = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        accounts = f"AZURITE_ACCOUNTS={ACCOUNT}:{KEY}"
        return ["env", accounts, PROGRAM, *place, "--blobPort", str(self.port), *quiet]

    def start(self) -> None:
        """Start it, or let it go on. A container that a kill came too early for is made again.

        Raises:
            RuntimeError: as `ServerProcess.start`.
        """
        frozen = self._process is not None
        super().start()
        if not frozen:
            try:
                self._make_container()
            except BaseException:
                self.stop()
                raise

    def _make_container(self) -> None:
        head = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": VERSION}
        # "Authorize with Shared Key" of Azure's REST reference: a verb, eleven headers that are
        # empty here, those of Azure, the resource.
        named = "".join(f"{name}:{value}\n" for name, value in head.items())
        resource = f"/{ACCOUNT}/{ACCOUNT}/{self.container}\nrestype:container"
        text = "PUT" + "\n" * 12 + named + resource
        signed = b64encode(hmac.digest(b64decode(KEY), text.encode(), "sha256")).decode()
        request = urllib.request.Request(
            f"{self.endpoint}/{self.container}?restype=container",
            headers={**head, "Authorization": f"SharedKey {ACCOUNT}:{signed}"},
            method="PUT",
        )
        try:
            urllib.request.urlopen(request, timeout=self.start_seconds).close()
        except urllib.error.HTTPError as answer:
            if answer.code != HTTPStatus.CONFLICT:
                raise
