"""Give one target inputs without end, those first that reach new lines of the product.

    python -m tests.fuzz segment --seconds 600

With atheris (`pip install atheris`) the inputs are led by coverage, and what reached something
new is kept in build/fuzz. Without it they are random. An input that fails is kept as a file:

    python -m tests.fuzz segment --input build/fuzz/crash-...
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from pathlib import Path

NAMES = (
    *("segment", "namespace", "epoch", "bundle", "trace"),
    *("configuration", "control", "hints", "record"),
)


def main() -> int:
    """Do what the command line says; 1 if an input fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=NAMES, nargs="?")
    parser.add_argument("--list", action="store_true", help="print the names of all targets")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--input", type=Path, help="this one alone")
    parser.add_argument("--kept", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--dry", action="store_true", help="a few inputs only")
    options = parser.parse_args()
    if options.list or options.target is None:
        print(*NAMES)
        return 0 if options.list else parser.error("name a target")
    if options.input is None and not options.dry and importlib.util.find_spec("atheris"):
        return led(options)
    from tests.fuzz.choices import Choices
    from tests.fuzz.targets import TARGETS

    target = TARGETS[options.target]()
    try:
        if options.input is not None:
            target.read(Choices(options.input.read_bytes()))
            return 0
        rng, end, count = random.Random(0), time.monotonic() + options.seconds, 0
        while time.monotonic() < end and not (options.dry and count >= 5):
            data = rng.randbytes(rng.choice((8, 40, 200)))
            try:
                target.read(Choices(data))
            except BaseException:
                options.kept.mkdir(parents=True, exist_ok=True)
                file = options.kept / f"crash-{options.target}-{count}"
                file.write_bytes(data)
                print(f"again: python -m tests.fuzz {options.target} --input {file}")
                raise
            count += 1
        print(f"{options.target}: {count} inputs")
    finally:
        target.close()
    return 0


def led(options: argparse.Namespace) -> int:
    """Let atheris lead; it ends the process."""
    import atheris

    with atheris.instrument_imports(include=["kvstore"]):
        from tests.fuzz.choices import Choices
    from tests.fuzz.targets import TARGETS

    target = TARGETS[options.target]()
    corpus = options.kept / options.target
    corpus.mkdir(parents=True, exist_ok=True)
    arguments = [sys.argv[0], str(corpus), f"-max_total_time={options.seconds}", "-max_len=400"]
    arguments += [f"-artifact_prefix={options.kept}/", "-print_final_stats=1", "-rss_limit_mb=4096"]
    atheris.Setup(arguments, lambda data: target.read(Choices(data)))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
