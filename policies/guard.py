"""Guard: stand in for a policy or a filter of others when it fails.

A policy that raises, or gives an answer that its contract excludes, would leave the tier's books
wrong for good. An LRU that has seen the same calls takes its place for the rest of the process. A
filter that fails is asked again, and its tier admits everything meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstore.policies.admission import AdmissionFilter
from kvstore.policies.base import LATER, EvictionPolicy, Protected
from kvstore.policies.lru import LRU

__all__ = ["GuardedFilter", "GuardedPolicy", "guarded_filter", "guarded_policy"]

Report = Callable[[str], None]
"""Called with what a plug-in has done wrong."""

_OURS = __name__.rpartition(".")[0] + "."


def guarded_policy(policy: EvictionPolicy, report: Report) -> EvictionPolicy:
    """Return `policy` if it is kvstore's own, and otherwise one that guards it."""
    return policy if _is_ours(policy) else GuardedPolicy(policy, report)


def guarded_filter(admits: AdmissionFilter, report: Report) -> AdmissionFilter:
    """Return the filter if it is kvstore's own, and otherwise one that guards it."""
    return admits if _is_ours(admits) else GuardedFilter(admits, report)


def _is_ours(plugin: object) -> bool:
    return type(plugin).__module__.startswith(_OURS)


class GuardedPolicy(EvictionPolicy):
    """See the module's text. It raises nothing.

    Attributes:
        failed: whether the LRU has taken over.
    """

    def __init__(self, policy: EvictionPolicy, report: Report) -> None:
        super().__init__(policy.capacity)
        if not policy.effort > 0:
            raise ValueError(f"policy {policy.name!r}: effort = {policy.effort}: must be above 0")
        self.name = policy.name
        self.effort = policy.effort
        self.declines = policy.declines
        self.spares_latest = policy.spares_latest
        self.shared = policy.shared
        self.failed = False
        self._policy, self._report = policy, report
        self._spare = LRU(policy.capacity)

    @property
    def faults(self) -> int:
        """1 once the policy has failed."""
        return int(self.failed)

    @property
    def parts(self) -> Sequence[EvictionPolicy]:
        return (self._spare,)

    def _fail(self, what: str) -> None:
        if not self.failed:
            self.failed = True
            self.declines, self.spares_latest = self._spare.declines, self._spare.spares_latest
            self._report(f"policy {self.name!r} {what}: lru takes its place")

    def _call(self, method: str, *arguments: Any) -> Any:
        """Return what the policy answers; None if it has failed."""
        if self.failed:
            return None
        try:
            return getattr(self._policy, method)(*arguments)
        except Exception as error:
            self._fail(f"raised {error!r} in {method}")
            return None

    # -- keys ------------------------------------------------------------------------------

    def insert(self, key: bytes) -> None:
        self._spare.insert(key)
        self._call("insert", key)

    def touch(self, key: bytes) -> None:
        self._spare.touch(key)
        self._call("touch", key)

    def remove(self, key: bytes) -> None:
        self._spare.remove(key)
        self._call("remove", key)

    def restore(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        self._spare.restore(keys)
        self._call("restore", keys)

    def release(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        self._spare.release(keys)
        self._call("release", keys)

    def link(self, keys: Sequence[bytes], after: bytes | None = None) -> None:
        self._call("link", keys, after)

    def settle(self, keys: Sequence[bytes], ends: Sequence[bytes] | None = None) -> None:
        self._spare.settle(keys, ends)
        self._call("settle", keys, ends)

    def cool(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        self._spare.cool(keys)
        self._call("cool", keys)

    def clear(self) -> None:
        self._spare.clear()
        self._call("clear")

    def __len__(self) -> int:
        return len(self._spare)

    def __contains__(self, key: object) -> bool:
        return key in self._spare

    def order(self) -> Iterable[bytes]:
        """Return the policy's order; its RuntimeError and KeyError tell of a use meanwhile."""
        if not self.failed:
            try:
                keys = list(self._policy.order())
            except (RuntimeError, KeyError):
                raise
            except Exception as error:
                self._fail(f"raised {error!r} in order")
            else:
                return [key for key in dict.fromkeys(keys) if key in self._spare]
        return self._spare.order()

    def overrides(self, hook: str) -> bool:
        return (self._spare if self.failed else self._policy).overrides(hook)

    # -- eviction ----------------------------------------------------------------------------

    def evict(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes] | None:
        found = self._call("evict", count, protected, incoming)
        if not self.failed:
            if found is None:
                return None
            victims = self._checked("evict", found, protected, count, exactly=True)
            if victims is not None:
                return victims
        return self._spare.evict(count, protected, incoming)

    def evict_up_to(
        self, count: int, protected: Protected, incoming: Sequence[bytes] = ()
    ) -> list[bytes]:
        found = self._call("evict_up_to", count, protected, incoming)
        if not self.failed:
            victims = self._checked("evict_up_to", found, protected, count)
            if victims is not None:
                return victims
        return self._spare.evict_up_to(count, protected, incoming)

    @property
    def excess(self) -> int:
        if not self.failed:
            try:
                return int(self._policy.excess)
            except Exception as error:
                self._fail(f"raised {error!r} in excess")
        return 0

    def trim(self, count: int, protected: Protected) -> list[bytes]:
        found = self._call("trim", count, protected)
        checked = None if self.failed else self._checked("trim", found, protected, count)
        return checked or []

    def _checked(
        self, method: str, found: Any, protected: Protected, count: int, *, exactly: bool = False
    ) -> list[bytes] | None:
        """Return the victims, which have left; None if they break the contract."""
        try:
            victims: list[bytes] = list(found)
            distinct = set(victims)
        except Exception:
            self._fail(f"returned {found!r:.100} from {method}, not keys")
            return None
        spare = self._spare
        wrong = len(distinct) != len(victims) or len(victims) > count
        if wrong or (exactly and len(victims) < count):
            what = f"{len(distinct)} distinct keys of {count}"
        elif any(key not in spare for key in victims):
            what = "a key that is not resident"
        elif any(protected(key) not in (False, LATER) for key in victims):
            what = "a key that is protected"
        else:
            for key in victims:
                spare.remove(key)
            if self._call("__len__") in (len(spare), None):
                return victims
            # These have left all the same.
            self._fail(f"has lost count of its keys in {method}")
            return victims
        self._fail(f"returned {what} from {method}")
        return None

    # -- whose, and how many -------------------------------------------------------------------

    def reach(self, keys: Sequence[bytes]) -> int:
        found = self._call("reach", keys)
        return found if isinstance(found, int) else self.capacity

    def owner_of(self, key: bytes) -> int:
        found = self._call("owner_of", key)
        return found if isinstance(found, int) else 0

    def tenant_of(self, key: bytes) -> str:
        found = self._call("tenant_of", key)
        return found if isinstance(found, str) else ""

    def tenants(self) -> dict[str, int]:
        found = self._call("tenants")
        return found if isinstance(found, dict) else {}


class GuardedFilter(AdmissionFilter):
    """See the module's text. It raises nothing."""

    def __init__(self, admits: AdmissionFilter, report: Report) -> None:
        super().__init__(admits.capacity, admits.chunk_bytes)
        self.name, self.spends = admits.name, admits.spends
        self._faults = 0
        self._filter, self._report = admits, report

    @property
    def faults(self) -> int:
        return self._faults

    def asked(self, keys: Sequence[bytes]) -> None:
        self._call("asked", keys)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        before = self._faults
        found = self._call("admit", keys, now)
        if self._faults == before:
            try:
                answers = [bool(each) for each in found]
                if len(answers) == len(keys):
                    return answers
            except Exception:
                pass
            self._fail(f"answered {found!r:.100} for {len(keys)} keys")
        return [True] * len(keys)

    def clear(self) -> None:
        self._call("clear")

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._filter, method)(*arguments)
        except Exception as error:
            self._fail(f"raised {error!r} in {method}")
            return None

    def _fail(self, what: str) -> None:
        self._faults += 1
        # It may fail at each call.
        if self._faults == 1:
            self._report(f"filter {self.name!r} {what}: everything is admitted where it fails")
