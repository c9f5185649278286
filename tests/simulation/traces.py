"""Small traces of prompts, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvstore.policies import EvictionPolicy
from kvstore.simulation import Trace


def conversations(seed: int, sessions: int = 60, turns: int = 400) -> Trace:
    """Sessions that share a system prompt and grow with each turn; some go on longer."""
    rng = random.Random(seed)
    fresh = iter(range(1, 10**9))
    system = [next(fresh) for _ in range(3)]
    open_sessions: list[list[int]] = []
    requests: list[tuple[float, Sequence[int]]] = []
    for turn in range(turns):
        if not open_sessions or rng.random() < sessions / turns:
            head = system if rng.random() < 0.7 else []
            open_sessions.append([*head, *(next(fresh) for _ in range(rng.randrange(1, 12)))])
        session = rng.choice(open_sessions[-12:])
        session += [next(fresh) for _ in range(rng.randrange(4))]
        requests.append((turn / 10, list(session)))
    return Trace.of(f"seed {seed}", requests)


def hits_by_the_rules(trace: Trace, policy: EvictionPolicy) -> int:
    """Hits of one tier under the rules that published figures use, with nothing of the core."""
    keys, hits = trace.keys(), 0
    for chunks in trace.requests:
        prompt = [keys[chunk] for chunk in chunks]
        for key in prompt:
            if key not in policy:
                break
            hits += 1
        policy.link(prompt, None)
        for key in reversed(prompt):
            if key in policy:
                policy.touch(key)
        for key in reversed(prompt):
            if key not in policy:
                if len(policy) >= policy.capacity:
                    policy.evict(1, lambda key: False, (key,))
                policy.insert(key)
        policy.settle(prompt)
    return hits
