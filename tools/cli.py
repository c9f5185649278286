"""The `kvstore` command.

Exit status: 0 no fault was found, 1 a fault was found, 2 the command failed
(usage, a path without a cache, a disk error, a closed output pipe).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

import kvstore
from kvstore.errors import KVStoreError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Only what one command needs is imported: a script may run it a thousand times.
    none = "" if words[:1] == ["--version"] else None
    wanted = next((word for word in words if word in COMMANDS), none)
    try:
        options = _parser(wanted).parse_args(words)
        for stream in (sys.stdout, sys.stderr):
            # Escape characters that the terminal's encoding lacks instead of failing.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        status: int = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KVStoreError as error:
        return _fail(str(error))
    except BrokenPipeError:
        _drop_output()
        return 2
    except OSError as error:
        _drop_output()
        about = f"{error.filename}: " if error.filename else ""
        return _fail(f"{about}{error.strerror or error}")
    except KeyboardInterrupt:
        return 130


def _drop_output() -> None:
    """Redirect a broken stdout, so that the interpreter does not flush it again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(text: str) -> int:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"kvstore: {text}", file=sys.stderr)
    return 2


def _folder(text: str) -> Path:
    """Parse the path of a folder; refuse "", which an unset shell variable gives."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must be the path of a folder, not empty")
    if text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text} is an address: top, doctor and advise take those, this is about a folder"
        )
    return Path(text)


STATUS = "exit status: 0 no fault was found, 1 a fault was found, 2 the command failed"

EXAMPLES: Mapping[str, tuple[str, str]] = {
    "inspect": (
        "kvstore inspect /nvme/kv\nkvstore inspect /nvme/kv --segments\n"
        "kvstore inspect /nvme/kv/llama-3f2a --json | jq .namespaces[].lanes[].owner",
        "operators.md",
    ),
    "verify": ("kvstore verify /nvme/kv\nkvstore verify /nvme/kv --json", "operators.md"),
    "compact": ("kvstore compact /nvme/kv --dry-run\nkvstore compact /nvme/kv", "operators.md"),
    "purge": (
        "kvstore purge /nvme/kv --unused 7d --dry-run\n"
        "kvstore purge /nvme/kv --namespace llama-3f2a --all --yes",
        "operators.md",
    ),
    "gc": ("kvstore gc /nvme/kv --keep 2 --dry-run\nkvstore gc /nvme/kv --keep 2", "operators.md"),
    "export": (
        "kvstore export /nvme/kv/llama-3f2a prompts.safetensors\n"
        "kvstore export /nvme/kv/llama-3f2a recent.safetensors --used 7d\n"
        "kvstore export /nvme/kv/llama-3f2a one.safetensors --key 6b31",
        "operators.md",
    ),
    "import": ("kvstore import prompts.safetensors /nvme/kv", "operators.md"),
    "show": ("kvstore show /nvme/kv/llama-3f2a 6b31 --dtype bfloat16", "operators.md"),
    "keys": (
        "kvstore keys keys.toml --add '*'\nkvstore keys keys.toml --add alice\n"
        "kvstore keys keys.toml --forget alice",
        "encryption.md",
    ),
    "gate": (
        "kvstore gate my-model my-model.gate --prompts prompts.txt\n"
        "kvstore gate my-model my-model.gate --prompts prompts.txt --control --tokens 64 "
        """--engine '{"tensor_parallel_size": 2}'""",
        "codec.md",
    ),
    "simulate": (
        "kvstore simulate trace.jsonl --host 5% --disk 20%,40%\n"
        "kvstore simulate trace.jsonl --host 5% --policy lru,arc,hit-density",
        "simulate.md",
    ),
    "advise": (
        "kvstore advise trace.jsonl --host 64GiB --disk 2TiB --chunk-bytes 2MiB --compute-ms 12 "
        "--read-ms 3\n"
        "kvstore advise trace.packed --host 64GiB --server http://host:8000/metrics\n"
        "kvstore advise http://host:8000/metrics",
        "simulate.md",
    ),
    "top": ("kvstore top http://host:8000/metrics\nkvstore top /nvme/kv", "operators.md"),
    "doctor": ("kvstore doctor http://host:8000/metrics\nkvstore doctor /nvme/kv", "operators.md"),
    "config": (
        "kvstore config sample > kvstore.toml\nkvstore config check kvstore.toml\n"
        "kvstore config check vllm.json --chunk-bytes 2MiB --all",
        "configuration.md",
    ),
    "ctl": (
        "kvstore ctl /run/kvstore/ctl.sock status\n"
        "kvstore ctl /run/kvstore/ctl.sock set host.bytes=32GiB",
        "control.md",
    ),
    "completion": (
        "kvstore completion bash > ~/.local/share/bash-completion/completions/kvstore\n"
        "kvstore completion zsh > ~/.zfunc/_kvstore",
        "operators.md",
    ),
}
"""For each command examples, and the page that has more."""


Adder = Callable[[argparse.ArgumentParser], None]
"""Adds the arguments of one command."""


def _cache(command: argparse.ArgumentParser) -> None:
    """What commands over a cache on disk have in common."""
    command.add_argument("path", type=_folder, help="folder of the cache, or one namespace in it")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _changing(command: argparse.ArgumentParser) -> None:
    """What commands that change a cache have in common."""
    command.register("action", None, _Once)
    _cache(command)
    command.add_argument("--dry-run", action="store_true", help="only report what would be done")
    _strict(command)


def _strict(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--no-strict-modes",
        dest="strict_modes",
        action="store_false",
        help="also accept lanes that other users own or may write to",
    )


def _keys(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--keys",
        metavar="SOURCE",
        help="the keys of encrypted chunks: a file, env:NAME, or module:function",
    )


def _keyring(command: argparse.ArgumentParser) -> None:
    command.register("action", None, _Once)
    command.add_argument("file", type=Path, help="the file of keys")
    change = command.add_mutually_exclusive_group()
    change.add_argument(
        "--add",
        metavar="TENANT",
        help='make a new key of that tenant, "*" of all others; the file, too, if there is none',
    )
    change.add_argument(
        "--retire", metavar="TENANT", help="forget all keys of that tenant but the newest"
    )
    change.add_argument(
        "--forget",
        metavar="TENANT",
        help="forget all keys of that tenant: nobody can read its chunks any more",
    )
    command.add_argument("--yes", action="store_true", help="do not ask on a terminal")
    command.add_argument("--json", action="store_true", help="print JSON")


def _inspect(command: argparse.ArgumentParser) -> None:
    _cache(command)
    command.add_argument("--segments", action="store_true", help="also list each segment")
    command.add_argument(
        "--settings", action="store_true", help="all that processes must have in common to share it"
    )
    command.add_argument(
        "--tenant",
        metavar="NAME",
        action="append",
        default=[],
        help="also count the chunks of that tenant; may be given several times",
    )


def _verify(command: argparse.ArgumentParser) -> None:
    _cache(command)
    _keys(command)


def _purge(command: argparse.ArgumentParser) -> None:
    _changing(command)
    command.add_argument("--yes", action="store_true", help="do not ask on a terminal")
    command.add_argument("--namespace", help="only in the namespace of that name")
    command.add_argument("--unused", metavar="AGE", help="only chunks not used for 36h, 7d, ...")
    command.add_argument(
        "--key", metavar="HEX", action="append", help="only the chunk of that key; may be repeated"
    )
    command.add_argument(
        "--tenant",
        metavar="NAME",
        action="append",
        help="only the chunks of that tenant; may be repeated",
    )
    command.add_argument("--all", action="store_true", help="every chunk")


def _gc(command: argparse.ArgumentParser) -> None:
    from kvstore.tools.output import whole_number

    _changing(command)
    command.add_argument("--yes", action="store_true", help="do not ask on a terminal")
    command.add_argument(
        "--keep", type=whole_number, metavar="N", required=True, help="namespaces to keep"
    )


def _export(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=_folder, help="one namespace, or a folder with only one")
    command.add_argument("file", type=Path, help="the bundle to write")
    command.add_argument(
        "--key", metavar="HEX", action="append", help="only this chunk; may be repeated"
    )
    command.add_argument("--used", metavar="AGE", help="only chunks used within 36h, 7d, ...")
    command.add_argument("--force", action="store_true", help="replace the file if it exists")
    _keys(command)
    command.add_argument("--json", action="store_true", help="print JSON")


def _import(command: argparse.ArgumentParser) -> None:
    from kvstore.tools.output import parse_bytes

    command.add_argument("file", type=Path, help="the bundle")
    command.add_argument("path", type=_folder, help="folder of the cache")
    command.add_argument(
        "--capacity",
        type=parse_bytes,
        metavar="SIZE",
        help="of the lane that takes them; by default what the bundle needs",
    )
    _keys(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    _strict(command)


def _show(command: argparse.ArgumentParser) -> None:
    from kvstore.tools.bundle import DTYPES

    command.add_argument("path", type=_folder, help="one namespace, or a folder with only one")
    command.add_argument("key", metavar="KEY", help="the key in hex")
    command.add_argument("--dtype", choices=DTYPES, help="of its numbers")
    _keys(command)
    command.add_argument("--json", action="store_true", help="print JSON")


def _completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=SHELLS, help="the shell")


COMMANDS: Mapping[str, tuple[Adder | None, str]] = {
    "inspect": (_inspect, "list namespaces and lanes, and what they hold"),
    "verify": (_verify, "check every payload against its digest"),
    "compact": (_changing, "remove sparse segments and put chunks in order"),
    "purge": (_purge, "forget chunks by namespace, age or key"),
    "gc": (_gc, "empty all namespaces of a path but those that were used last"),
    "export": (_export, "write the chunks of a namespace to a file, a valid safetensors file"),
    "import": (_import, "store the chunks of a bundle in a cache, each one verified"),
    "show": (_show, "show one chunk: where it lies, how old it is, what its numbers are like"),
    "gate": (None, "try a model with chunks in half the bytes, and say whether it bears that"),
    "keys": (_keyring, "make, list and forget the keys that chunks are encrypted with"),
    "simulate": (None, "replay a trace of requests with other sizes, policies and flows"),
    "advise": (
        None,
        "say which sizes, policies and flow suit what was asked for, and whether a disk pays",
    ),
    "top": (
        None,
        "show the rates and states of a server's tiers, or the growth of a cache on disk, live",
    ),
    "doctor": (None, "say whether the cache helps a server, and what to change"),
    "config": (None, "check and explain a configuration; print its schema or a sample"),
    "ctl": (None, "inspect and change a store while it serves, by its control socket"),
    "completion": (
        _completion,
        "print a script that completes the words of this command in a shell",
    ),
}
"""For each command what adds its arguments, if its module does not, and what it does."""

MODULES = {
    **dict.fromkeys(("compact", "purge", "gc"), "upkeep"),
    **dict.fromkeys(("export", "import", "show"), "bundle"),
    "completion": "cli",
}
"""Of commands whose module has another name than they."""


class _Once(argparse.Action):
    """Refuses an option that is given twice: of two tenants to forget one would be left."""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, value: Any, *_: Any
    ) -> None:
        given = vars(options).setdefault("_given", set())
        if self.option_strings and self.dest in given:
            parser.error(f"{self.option_strings[-1]} is given twice")
        given.add(self.dest)
        setattr(options, self.dest, value)


def _parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """The parser; with the arguments of one command only, if that is all that is `wanted`."""
    parser = argparse.ArgumentParser(
        prog="kvstore",
        description="Inspect, check, tidy, watch and simulate a KV cache.",
        epilog=f"{STATUS}\nmore: docs/operators.md; kvstore COMMAND --help has examples",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=kvstore.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (add, text) in COMMANDS.items():
        examples, page = EXAMPLES[name]
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"examples:\n{indent(examples, '  ')}\n\n{STATUS}\nmore: docs/{page}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if wanted in (None, name):
            module = import_module(f"kvstore.tools.{MODULES.get(name, name)}")
            (add or getattr(module, f"add_{name}_arguments"))(command)
            command.set_defaults(run=getattr(module, f"run_{name}"))
    return parser


SHELLS = ("bash", "zsh", "tcsh")


def run_completion(options: argparse.Namespace) -> int:
    """Print what a shell needs to complete the command's words."""
    import shtab

    parser = _parser()
    for each in _parsers(parser):
        for action in each._actions:
            if action.type is _folder:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _parsers(each)
