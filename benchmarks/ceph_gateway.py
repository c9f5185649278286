"""An S3 server for a while, for benchmarks and tests: Ceph's RADOS gateway over one OSD in memory.

Debian has it in the packages `ceph-mon`, `ceph-osd` and `radosgw`.
"""

from __future__ import annotations

import hmac
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Sequence
from email.utils import formatdate
from http.client import HTTPException
from pathlib import Path
from uuid import uuid4

from benchmarks.server_process import ServerProcess, free_port

__all__ = ["CephGateway", "is_installed"]

PROGRAMS = (
    "ceph-mon",
    "ceph-osd",
    "radosgw",
    "radosgw-admin",
    "ceph",
    "ceph-authtool",
    "monmaptool",
)

CAPABILITIES = {
    "mon.": ("mon",),
    "client.admin": ("mon", "osd"),
    "client.rgw": ("mon", "osd"),
    "osd.0": ("mon", "osd"),
}

KEY, SECRET = "kvstore", "kept-in-the-environment"

CONFIGURATION = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}
mon initial members = a
keyring = {folder}/keyring
ms bind ipv6 = false
public addr = 127.0.0.1
paxos propose interval = 0.05
paxos min wait = 0.02
mon allow pool size one = true
mon data avail crit = 1
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {pool}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
run dir = {folder}
crash dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
debug rgw = 0
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw pg num min = 1
rgw rados pool pg num min = 1
rgw run sync thread = false
"""


def is_installed() -> bool:
    """Whether this machine has Ceph's programs."""
    return all(shutil.which(program) for program in PROGRAMS)


class CephGateway(ServerProcess):
    """A gateway on the loopback, with one bucket.

    Args:
        folder: for its logs. pool_bytes: memory that it may fill.
    """

    bucket = "bucket"
    start_seconds = 120.0

    def __init__(self, folder: Path, pool_bytes: int = 2**31) -> None:
        super().__init__(folder / "radosgw.out")
        self._folder = folder
        self._configuration = folder / "ceph.conf"
        fsid, mon = str(uuid4()), free_port()
        self._configuration.write_text(
            CONFIGURATION.format(fsid=fsid, mon=mon, folder=folder, port=self.port, pool=pool_bytes)
        )
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        self._cluster: list[subprocess.Popen[bytes]] = []
        try:
            self._start_cluster(fsid, mon)
            user = ("--uid", "kvstore", "--display-name", "kvstore")
            keys = ("--access-key", KEY, "--secret-key", SECRET)
            self._run("radosgw-admin", "-n", "client.rgw", "user", "create", *user, *keys)
            self.start()
            self._make_bucket()
        except BaseException:
            self.end()
            raise

    @property
    def url(self) -> str:
        """What a tier is told."""
        return f"s3://{self.bucket}/kv"

    @property
    def endpoint(self) -> str:
        """Where it serves."""
        return f"http://{self.host}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Credentials, as clients look for them."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

    def command(self) -> Sequence[str]:
        """What starts the gateway."""
        return ["radosgw", "-c", str(self._configuration), "-n", "client.rgw", "-f"]

    def serves(self) -> bool:
        """Whether it refuses whoever has no credentials."""
        try:
            urllib.request.urlopen(f"{self.endpoint}/{self.bucket}", timeout=5).close()
        except urllib.error.HTTPError as answer:
            return answer.code < 500
        except (OSError, HTTPException):
            return False
        return False

    def end(self) -> None:
        """Kill everything."""
        self.stop()
        for process in reversed(self._cluster):
            process.kill()
            process.wait()

    def _start_cluster(self, fsid: str, mon: int) -> None:
        monmap = str(self._folder / "monmap")
        address = ("--addv", "a", f"[v2:127.0.0.1:{mon}]")
        keyring = str(self._folder / "keyring")
        for new, (name, caps) in enumerate(CAPABILITIES.items()):
            self._run(
                "ceph-authtool",
                keyring,
                *(("--create-keyring",) if not new else ()),
                *("--gen-key", "-n", name),
                *(word for cap in caps for word in ("--cap", cap, "allow *")),
            )
        self._run("monmaptool", "--create", *address, "--fsid", fsid, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._cluster.append(self._serve("ceph-mon", "-i", "a"))
        osd = str(uuid4())
        self._run("ceph", "osd", "create", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._cluster.append(self._serve("ceph-osd", "-i", "0"))

    def _make_bucket(self) -> None:
        date = formatdate(usegmt=True)
        # The older way to sign, which is the shorter one (Amazon S3, "Signing REST Requests").
        text = f"PUT\n\n\n{date}\n/{self.bucket}"
        signed = b64encode(hmac.digest(SECRET.encode(), text.encode(), "sha1")).decode()
        head = {"Date": date, "Authorization": f"AWS {KEY}:{signed}"}
        url = f"{self.endpoint}/{self.bucket}"
        request = urllib.request.Request(url, headers=head, method="PUT")
        urllib.request.urlopen(request, timeout=self.start_seconds).close()

    def _run(self, program: str, *arguments: str) -> None:
        configured = () if program.endswith("tool") else ("-c", str(self._configuration))
        command = [program, *configured, *arguments]
        done = subprocess.run(command, capture_output=True, timeout=self.start_seconds, check=False)
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr.decode()[-2000:]}")

    def _serve(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{program}.out").open("ab") as out:
            command = [program, "-c", str(self._configuration), *arguments, "-f"]
            return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ})
