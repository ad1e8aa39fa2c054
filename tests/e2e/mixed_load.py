"""500 mixed requests: one-shot ones and programs of several turns, the same each time.

Short and long, half of them with a prefix that others have too; some requests are cut
off by their client after a few tokens and then sent again. Eight workers take one
program at a time, so that batches differ from run to run and server to server.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.e2e.loads import completion

REQUESTS = 500
WORKERS = 8
STYLES = ("hints", "ttl", "session", "nothing")
#: Five blocks of 32 tokens.
SHARED_TOKENS = 160
SHARED_PREFIXES = 4
#: An aborted request asks for these; its client leaves after a few.
ABORTED_TOKENS = 800


@dataclass(frozen=True)
class Request:
    """One request; `cut_after` is the chunk after which its client is gone."""

    new_tokens: int
    max_tokens: int
    cut_after: int | None = None


@dataclass(frozen=True)
class Job:
    """A program, or a one-shot request."""

    name: str
    style: str
    shared: int | None
    requests: tuple[Request, ...]


def all_jobs() -> list[Job]:
    """Exactly `REQUESTS` requests."""
    rng = random.Random("mixed load")
    found: list[Job] = []
    left = REQUESTS
    while left:
        job = one_job(len(found), rng, left)
        found.append(job)
        left -= len(job.requests)
    return found


def one_job(index: int, rng: random.Random, at_most: int) -> Job:
    kind = rng.choices(("short", "long", "agent"), (0.35, 0.15, 0.5))[0]
    turns = rng.randint(3, 5) if kind == "agent" else 1
    first = {"short": (10, 60), "long": (500, 900), "agent": (60, 200)}[kind]
    requests: list[Request] = []
    for turn in range(turns):
        new_tokens = rng.randint(*(first if turn == 0 else (20, 120)))
        if rng.random() < 0.1:
            cut = Request(new_tokens, ABORTED_TOKENS, rng.randint(1, 6))
            requests.append(cut)
        requests.append(Request(new_tokens, rng.randint(4, 16)))
    shared = rng.randrange(SHARED_PREFIXES) if rng.random() < 0.5 else None
    style = rng.choice(STYLES)
    return Job(f"mixed-{index}", style, shared, tuple(requests[:at_most]))


def tokens(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 2048) for _ in range(count)]


def identity(job: Job, index: int) -> dict[str, Any]:
    """Keyword arguments by which ttlcache knows the program."""
    if job.style == "session":
        return {"headers": {"X-Session-ID": job.name}}
    if job.style == "nothing":
        return {}
    last = index == len(job.requests) - 1
    hints: dict[str, Any] = {"program_id": job.name, "is_last_step": last}
    return {"hints": hints | ({"ttl": "30s"} if job.style == "ttl" else {})}


def play_job(agent: Any, job: Job, identify: bool) -> Iterator[dict[str, Any]]:
    """The job's answers in order; a cut one has no tokens to compare."""
    context: list[int] = []
    if job.shared is not None:
        context = tokens(f"shared/{job.shared}", SHARED_TOKENS)
    for index, request in enumerate(job.requests):
        # A request sent again after a cut has the same new tokens.
        cut_before = job.requests[index - 1].cut_after is not None and index > 0
        if not cut_before:
            context += tokens(f"{job.name}/{index}", request.new_tokens)
        own = identity(job, index) if identify else {}
        if request.cut_after is not None:
            cut_off(agent, context, request, own)
            yield {"aborted": True}
            continue
        choice = agent.ask(
            context,
            max_tokens=request.max_tokens,
            logprobs=2,
            return_tokens_as_token_ids=True,
            **own,
        )
        context = choice["context"]
        yield {
            "aborted": False,
            "token_ids": choice["token_ids"],
            "margins": margins(choice["logprobs"]["top_logprobs"]),
        }


def cut_off(
    agent: Any, prompt: list[int], request: Request, own: dict[str, Any]
) -> None:
    body = completion(prompt, own.get("hints"), request.max_tokens) | {"stream": True}
    with agent.http.stream(
        "POST", "/v1/completions", json=body, headers=own.get("headers")
    ) as response:
        assert response.status_code == 200
        chunks = (line for line in response.iter_lines() if line.startswith("data: "))
        for _ in itertools.islice(chunks, request.cut_after):
            pass


def margins(top_logprobs: list[dict[str, float]]) -> list[float]:
    """How far the best token is above the second best, per position."""
    best = [sorted(at.values(), reverse=True) for at in top_logprobs]
    return [two[0] - two[1] for two in best]


def play(agent: Any, identify: bool) -> list[list[dict[str, Any]]]:
    """All jobs on eight workers; answers by job."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(
            pool.map(lambda job: list(play_job(agent, job, identify)), all_jobs())
        )
