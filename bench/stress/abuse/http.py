"""One client with thousands of sessions against a real server, and another tenant.

The client wants every session kept for ever, names some by a megabyte of text and
some like the other tenant's programs, and invents a tool for each.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import psutil

from bench.serve.replay import ReplayOptions, replay
from bench.serve.server import VLLMServer, parse_metrics, total
from bench.stress.soak.watch import descendants, rss_mib
from ttlcache_sim.load.programs import Program, Turn

WORKERS = 16
#: Every so many sessions one has an id of a megabyte.
HUGE_EVERY = 250
HUGE_CHARS = 1_000_000
PROMPT_TOKENS = 40
VICTIM_TURNS = 5
VICTIM_TURN = Turn(new_prompt_tokens=96, output_tokens=4, tool="bash", gap_s=0.0)
VICTIM = "good"
#: Sessions before the first look: metrics have their labels then, and vLLM buffers for
#: so many requests at once.
WARM_UP = 2048


@dataclass(frozen=True, slots=True)
class Look:
    """The server at one moment."""

    metrics_lines: int
    metrics_bytes: int
    rss_mib: float
    programs: float
    hook_errors: float
    retention_enabled: float


@dataclass(frozen=True, slots=True)
class AbuseResult:
    """What the abuse did."""

    refused: int
    """Requests that were not answered 200."""
    before: Look
    after: Look
    hit_calm: float
    """Share of the other tenant's context that its turns found in memory, alone."""
    hit_flooded: float
    """The same while the flood went on."""


def session_body(number: int) -> dict[str, Any]:
    """The request of one session of the abusing client."""
    rng = random.Random(number)
    hints: dict[str, Any] = {"ttl": 1e9, "tool": f"tool-{number}"}
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [rng.randrange(5, 2048) for _ in range(PROMPT_TOKENS)],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"ttlcache": hints},
    }
    kind = number % 4
    if number % HUGE_EVERY == 1:
        hints["program_id"] = f"{number}-" + "x" * HUGE_CHARS
    elif number % HUGE_EVERY == 2:
        body["session_id"] = f"{number}-" + "y" * HUGE_CHARS
    elif kind == 0:
        hints["program_id"] = f"{VICTIM}-{number % 100}"  # an id of the other tenant
    elif kind == 1:
        body["session_id"] = f"session-{number}"
    elif kind == 2:
        hints["program_id"] = f"program-{number}"
    else:
        hints[f"key-{number}"] = 1  # must make no label of its own
    return body


def abuse(server: VLLMServer, sessions: int) -> AbuseResult:
    """Flood `server` with `sessions`; another tenant works before and meanwhile."""
    serials = itertools.count()
    with httpx.Client(base_url=server.base_url, timeout=600.0) as client:
        start = min(WARM_UP, sessions)
        with ThreadPoolExecutor(WORKERS) as pool:
            first = list(pool.map(partial(_send, client), range(start)))
        hit_calm = _victim(server, next(serials))
        client.post("/reset_prefix_cache").raise_for_status()
        before = look(client, server)
        with ThreadPoolExecutor(WORKERS + 1) as pool:
            rest = range(start, start + sessions)
            flood = [pool.submit(_send, client, number) for number in rest[:-WORKERS]]
            hits = [_victim(server, next(serials))]
            while not all(each.done() for each in flood):
                hits.append(_victim(server, next(serials)))
            flood += [pool.submit(_send, client, n) for n in rest[-WORKERS:]]
            codes = first + [each.result() for each in flood]
        after = look(client, server)
    return AbuseResult(
        refused=sum(code != 200 for code in codes),
        before=before,
        after=after,
        hit_calm=hit_calm,
        hit_flooded=sum(hits) / len(hits),
    )


def look(client: httpx.Client, server: VLLMServer) -> Look:
    """One turn, so that the engine reports, and one scrape."""
    _send(client, 3)
    response = client.get("/metrics")
    response.raise_for_status()
    numbers = parse_metrics(response.text)
    # vLLM's worker runs none of our code here, and grows by itself: by 102 MiB under
    # 10,000 sessions without us.
    pids = [p for p in (server.pid, *descendants(server.pid)) if not _is_worker(p)]
    return Look(
        metrics_lines=response.text.count("\n"),
        metrics_bytes=len(response.content),
        rss_mib=sum(rss_mib(pid) for pid in pids),
        programs=total(numbers, "ttlcache_programs_active"),
        hook_errors=total(numbers, "ttlcache_hook_errors_total"),
        retention_enabled=total(numbers, "ttlcache_retention_enabled"),
    )


def _is_worker(pid: int) -> bool:
    try:
        return "Worker" in psutil.Process(pid).name()
    except psutil.Error:
        return False


def _send(client: httpx.Client, number: int) -> int:
    return client.post("/v1/completions", json=session_body(number)).status_code


def _victim(server: VLLMServer, serial: int) -> float:
    """One program of the other tenant; the share of its context that was found."""
    program = Program(f"{VICTIM}-{serial % 100}", 0.0, (VICTIM_TURN,) * VICTIM_TURNS)
    options = ReplayOptions(seed=serial, cache_salt=VICTIM)
    result = replay(server.base_url, [program], options)
    if result.failures:
        raise RuntimeError(f"a turn failed: {result.failures[0]}")
    pairs = list(itertools.pairwise(result.records))
    found = sum(after.cached_tokens for _, after in pairs)
    return found / sum(before.context_tokens for before, _ in pairs)
