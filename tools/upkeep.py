"""``kvstore compact``, ``kvstore purge`` and ``kvstore gc``."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError, KVStoreError
from kvstore.maintenance.offline import (
    CompactedLane,
    Compaction,
    PurgedLane,
    compact,
    namespaces_to_change,
    not_followed,
    purge,
)
from kvstore.maintenance.survey import NamespaceSurvey
from kvstore.sizes import format_size
from kvstore.tools.bundle import parse_age, parse_key
from kvstore.tools.output import age, asks, confirm, counted, print_json, show_progress

__all__ = ["run_compact", "run_gc", "run_purge"]

AHEAD_MS = 60_000
"""How far the clocks of those who share a cache may be apart."""


def run_compact(options: argparse.Namespace) -> int:
    """Compact lanes that no process uses.

    Returns 1 if a lane was refused or has faults, 2 if one could not be compacted.
    """
    with show_progress("chunks moved") as show:
        done = compact(
            options.path,
            dry_run=options.dry_run,
            progress=show,
            strict_modes=options.strict_modes,
        )
    if options.json:
        _print_json(done, options.dry_run)
    else:
        for one in done:
            _print_compacted(one, options.dry_run)
    bad = any(one.refused or (one.result and one.result.faults) for one in done)
    return _status(bad, done)


def run_purge(options: argparse.Namespace) -> int:
    """Forget chunks; return 1 if a lane or a segment was refused, 2 if one could not be purged."""
    only = (options.key, options.unused, options.tenant)
    if options.all and any(one is not None for one in only):
        raise ConfigError("--all is every chunk: leave out --tenant, --unused and --key, or --all")
    if not options.all and options.namespace is None and all(one is None for one in only):
        raise ConfigError("say what to purge: --namespace, --tenant, --unused, --key, or --all")
    unused_since = None
    if options.unused is not None:
        unused_since = int((time.time() - parse_age("--unused", options.unused)) * 1000)
    keys = options.key and [parse_key("--key", each) for each in options.key]

    def forget(*, dry_run: bool) -> list[PurgedLane]:
        return purge(
            options.path,
            namespace=options.namespace,
            key=keys,
            tenant=options.tenant,
            unused_since_ms=unused_since,
            dry_run=dry_run,
            strict_modes=options.strict_modes,
        )

    if asks(options):
        would = forget(dry_run=True)
        chunks, size = sum(one.chunks for one in would), sum(one.bytes for one in would)
        if chunks or any(one.outdated for one in would):
            confirm(f"forget {counted(chunks, 'chunk')}, {format_size(size)}, in {options.path}?")
    done = forget(dry_run=options.dry_run)
    if options.json:
        _print_json(done, options.dry_run)
    else:
        for one in done:
            _print_purged(one, options.dry_run)
        if not options.dry_run and any(one.chunks for one in done):
            print("the files keep their size; kvstore compact gives the space back")
    return _status(any(one.refused or one.faults for one in done), done)


def run_gc(options: argparse.Namespace) -> int:
    """Empty all namespaces but those used last, and those that a process has open.

    One that no server would open takes no place among those that are kept. One of which a part
    cannot be read may have been used later than is known: it is never emptied. Nor is one that was
    used in the future, as the clock was ahead: of it is not known when.

    Returns 1 if a namespace or a lane was refused, was used in the future, or has a fault and is
    not emptied, 2 if one failed.
    """
    found = [(each, _last_use(each)) for each in namespaces_to_change(options.path)]
    unknown = [
        each
        for each, _ in found
        if each.lost
        or (each.unlisted and not each.lanes)
        or not (each.identity or Path(each.path).is_symlink())
    ]
    latest = time.time() * 1000 + AHEAD_MS
    ahead = [each for each, used in found if used > latest and each not in unknown]
    found = [each for each in found if each[0] not in (*unknown, *ahead)]
    found.sort(key=lambda each: each[1], reverse=True)
    kept = [each for each, used in found if used][: options.keep]
    kept += [each for each, _ in found if each not in kept and each.is_open]
    # Of one that was emptied before, files may be left.
    old = [each for each, used in found if each not in kept and (used or each.segments)]
    unread = [each for each in old if _unread(each)]
    old = [each for each in old if each not in unread]
    # Of no other files is known whose they are.
    foreign = [
        each
        for each, _ in found
        if each not in kept and each not in old and each not in unread
        if _file_bytes(each) or (each.faults and (each.lanes or each.links))
    ]
    left = {
        each.name: str(each.lost or each.faults[0]) if each.faults else "holds no file of a lane"
        for each in (*unknown, *unread, *foreign)
    }
    left |= {each.name: "used in the future, by a clock that was ahead" for each in ahead}
    links = [each for each, _ in found if Path(each.path).is_symlink()]
    if not options.json:
        for each, used in found:
            what = "keep" if each in kept else "empty" if each in old else ""
            if what:
                ago = f"used {age(used)} ago" if used else "no chunks"
                print(f"{what:<6}{each.name}, {format_size(_file_bytes(each))}, {ago}")
        for each in kept:
            for fault in each.unlisted:
                print(f"WRONG {fault}")
        for each in (*unknown, *unread, *foreign, *ahead):
            print(f"leave {each.name}, {format_size(_file_bytes(each))}: {left[each.name]}")
    if old and asks(options):
        confirm(f"empty {counted(len(old), 'namespace')} in {options.path}?")
    modes, dry_run = options.strict_modes, options.dry_run
    forgot: list[PurgedLane] = []
    gave: list[CompactedLane] = []
    spared: list[str] = []
    for each in old:
        try:
            # The question, and those before it, may have taken a while.
            (now,) = namespaces_to_change(each.path)
            if now.is_open or _last_use(now) > _last_use(each):
                spared.append(each.name)
                forgot.append(
                    PurgedLane(each.path, refused="used by a process by now: not emptied")
                )
                continue
            forgot += purge(each.path, dry_run=dry_run, strict_modes=modes)
            if not dry_run:
                gave += compact(each.path, strict_modes=modes)
        except KVStoreError as error:
            # It has vanished, for one: the others are done, and told, all the same.
            forgot.append(PurgedLane(each.path, failed=str(error)))
    for each in links:
        forgot.append(PurgedLane(each.path, refused=not_followed(each.path)))
    if options.json:
        told: dict[str, object] = {
            "dry_run": dry_run,
            "kept": [each.name for each in kept],
            "emptied": [each.name for each in old if each.name not in spared],
            "left": left,
        }
        told["lanes"] = [dataclasses.asdict(one) for one in forgot]
        print_json(told | {"compacted": [dataclasses.asdict(one) for one in gave]})
    else:
        for one in forgot:
            _print_purged(one, dry_run)
        for other in gave:
            _print_compacted(other, dry_run)
    done: list[CompactedLane | PurgedLane] = [*forgot, *gave]
    bad = any(one.refused for one in done) or any(one.faults for one in forgot)
    bad = bad or any(one.result.faults for one in gave if one.result)
    bad = bad or bool(ahead) or any(each.unlisted for each in kept)
    return _status(bad or any(each.faults for each in (*unknown, *unread, *foreign)), done)


def _last_use(namespace: NamespaceSurvey) -> int:
    """When a chunk of it was last stored or read, in milliseconds; 0 if it holds none."""
    if namespace.is_open:
        return int(time.time() * 1000)
    return max((segment.used_ms for segment in namespace.segments), default=0)


def _unread(namespace: NamespaceSurvey) -> bool:
    """Whether a lane or a segment cannot be read: of its chunks nothing is known."""
    known = {segment.path for segment in namespace.segments} | set(namespace.links)
    return any(fault.slot is None and fault.path not in known for fault in namespace.faults)


def _file_bytes(namespace: NamespaceSurvey) -> int:
    others = sum(lane.other_bytes for lane in namespace.lanes)
    return others + sum(segment.file_bytes for segment in namespace.segments)


def _status(bad: bool, done: Sequence[CompactedLane | PurgedLane]) -> int:
    if any(one.failed for one in done):
        return 2
    return 1 if bad else 0


def _print_compacted(one: CompactedLane, dry_run: bool) -> None:
    if one.refused or one.failed:
        _print_not_done(one)
    elif one.result is None:
        print(f"{one.lane}: empty")
    else:
        before, after = one.result.before, one.result.after
        gained = before.file_bytes - after.file_bytes
        print(
            f"{one.lane}: {'would give' if dry_run else 'gave'} back {format_size(gained)}, "
            f"segments {before.segments} -> {after.segments}, "
            f"extents {before.extents} -> {after.extents}; "
            f"{'' if dry_run else f'{one.result.moved:,} copies made, '}{_damage(one.result)}"
        )
        for fault in one.result.faults:
            print(f"WRONG {fault}")


def _damage(result: Compaction) -> str:
    """Summarize the faults in one phrase. Chunks that were not moved were not checked."""
    records = sum(fault.slot is not None and fault.key is None for fault in result.faults)
    files = sum(fault.slot is None for fault in result.faults)
    summary = f"{result.dropped} damaged and dropped"
    if records:
        summary += f", {counted(records, 'damaged record')}"
    if files:
        summary += f", {counted(files, 'segment')} with faults"
    return summary


def _print_purged(one: PurgedLane, dry_run: bool) -> None:
    if one.refused or one.failed:
        _print_not_done(one)
    if one.chunks or not (one.refused or one.failed):
        what = "would forget" if dry_run else "forgot"
        more = f", and {one.outdated:,} that nobody would find" if one.outdated else ""
        print(f"{one.lane}: {what} {counted(one.chunks, 'chunk')}, {format_size(one.bytes)}{more}")
    for fault in one.faults:
        print(f"WRONG {fault}")


def _print_not_done(one: CompactedLane | PurgedLane) -> None:
    what, why = ("REFUSED", one.refused) if one.refused else ("FAILED", one.failed)
    # Several lanes may fail alike.
    print(f"{what} {why}" if one.lane in str(why) else f"{what} {one.lane}: {why}")


def _print_json(done: Sequence[CompactedLane | PurgedLane], dry_run: bool) -> None:
    print_json({"dry_run": dry_run, "lanes": [dataclasses.asdict(one) for one in done]})
