"""A Prometheus of one's own, on loopback, with its data in a folder."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.server_process import free_port

__all__ = ["Prometheus"]


class Prometheus:
    """Debian's `prometheus`, from `start` to `stop`; a context manager.

    Args:
        folder: where its configuration, its data and its log are; what was scraped before into
            the same folder can be asked for again.
        target: `host:port` of what is scraped every two seconds; nothing, without one.
    """

    def __init__(self, folder: Path, target: str | None = None) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._address = f"127.0.0.1:{free_port()}"
        jobs = []
        if target is not None:
            jobs.append({"job_name": "vllm", "static_configs": [{"targets": [target]}]})
        timing = {"scrape_interval": "2s", "scrape_timeout": "2s"}
        # YAML is a superset of JSON.
        config = json.dumps({"global": timing, "scrape_configs": jobs})
        (folder / "prometheus.yml").write_text(config)

    def __enter__(self) -> Prometheus:
        with (self._folder / "prometheus.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(OSError, urllib.error.URLError):
                self._get("/-/ready")
                return self
            time.sleep(0.1)
        self.__exit__()
        raise RuntimeError(f"prometheus did not start: see {self._folder / 'prometheus.log'}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def range(self, query: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series of a query: `metric`, its labels, and `values`, pairs of time and text.

        Raises:
            RuntimeError: if Prometheus refuses the query.
        """
        asked = {"query": query, "start": start, "end": end, "step": step}
        try:
            text = self._get(f"/api/v1/query_range?{urllib.parse.urlencode(asked)}")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{query}: {error.read().decode()}") from error
        return list(json.loads(text)["data"]["result"])

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._address}{path}", timeout=30) as answer:
            return str(answer.read().decode())
