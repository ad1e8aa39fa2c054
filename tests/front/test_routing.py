"""Hundreds of turns through the real vllm-router: where do they land?

About routing alone: two light upstreams stand in for vLLM, which is in tests/e2e and
in `bench fleet`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.front.conftest import CHAT, HANG_S

HASH, STICKY = "consistent_hash", "sticky_least_loaded"
Request = tuple[str, dict[str, str], dict[str, Any]]
TURNS = 8
#: Of all programs.
ALL_TURNS = 400


@pytest.fixture(scope="module", params=[HASH, STICKY])
def policy(request):
    """Either one keeps programs at home; where one does not, tests say which."""
    return str(request.param)


def words(rng: random.Random, number: int) -> str:
    return " ".join(f"w{rng.randrange(10_000)}" for _ in range(number))


def chat(seed: int, turn: int) -> list[dict[str, str]]:
    """What an agent sends in this turn: everything said so far."""
    rng = random.Random(seed)
    messages = [
        {"role": "system", "content": "You are an agent. " * 50},
        {"role": "user", "content": f"task {seed}: {words(rng, 30)}"},
    ]
    for _ in range(turn):
        messages.append({"role": "assistant", "content": words(rng, 20)})
        messages.append({"role": "user", "content": words(rng, 60)})
    return messages


def text(seed: int, turn: int) -> str:
    """The same as one growing string."""
    return "\n".join(f"{m['role']}: {m['content']}" for m in chat(seed, turn))


def ids(seed: int, turn: int) -> list[int]:
    rng = random.Random(seed)
    shared = [7] * 500
    return shared + [rng.randrange(2000) for _ in range(40 + 90 * turn)]


WITH_ID: dict[str, Callable[[int, int], Request]] = {
    "X-Session-ID": lambda i, t: (
        CHAT,
        {"X-Session-ID": f"own-{i}"},
        {"messages": chat(i, t)},
    ),
    "Claude Code": lambda i, t: (
        "/v1/messages",
        {"X-Claude-Code-Session-Id": f"claude-{i}"},
        {"messages": chat(i, t)[1:], "system": "s", "max_tokens": 3},
    ),
    "Codex": lambda i, t: (
        "/v1/responses",
        {"session-id": f"codex-{i}"},
        {"input": chat(i, t)},
    ),
    "URL": lambda i, t: (
        f"/sessions/url-{i}/v1/chat/completions",
        {},
        {"messages": chat(i, t)},
    ),
    "hint": lambda i, t: (
        "/v1/completions",
        {},
        {
            "prompt": ids(i, t),
            "kv_transfer_params": {"ttlcache": {"program_id": f"hint-{i}"}},
        },
    ),
    "user": lambda i, t: (CHAT, {}, {"messages": chat(i, t), "user": "one-for-all"}),
    "request ids": lambda i, t: (
        CHAT,
        {"X-Session-ID": f"traced-{i}", "X-Request-ID": f"{i}-{t}"},
        {"messages": chat(i, t)},
    ),
}
WITHOUT_ID: dict[str, Callable[[int, int], Request]] = {
    "chat": lambda i, t: (CHAT, {}, {"messages": chat(i, t)}),
    "Anthropic": lambda i, t: (
        "/v1/messages",
        {},
        {"messages": chat(i, t)[1:], "system": "s", "max_tokens": 3},
    ),
    "responses": lambda i, t: ("/v1/responses", {}, {"input": chat(i, t)}),
    "text": lambda i, t: ("/v1/completions", {}, {"prompt": text(i, t)}),
    "token ids": lambda i, t: ("/v1/completions", {}, {"prompt": ids(i, t)}),
}


def land(
    base_url: str, kinds: dict[str, Callable[[int, int], Request]], turns: int
) -> Any:
    """Who served each turn of each program; at least `turns`, 32 at a time."""
    programs = [(k, i) for i in range(-(-turns // (TURNS * len(kinds)))) for k in kinds]
    served: dict[tuple[str, int], list[str]] = {}
    gate = asyncio.Semaphore(32)

    async def run(client: httpx.AsyncClient, kind: str, number: int) -> None:
        seed = number * 1000 + sorted(kinds).index(kind)
        for turn in range(TURNS):
            path, headers, body = kinds[kind](seed, turn)
            async with gate:
                answer = await client.post(
                    path, headers=headers, json={"model": "tiny", **body}
                )
            assert answer.status_code == 200, answer.text
            served.setdefault((kind, number), []).append(answer.json()["name"])

    async def main() -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=base_url, timeout=HANG_S, limits=limits
        ) as client:
            await asyncio.gather(*(run(client, *program) for program in programs))

    asyncio.run(main())
    return served


def share_at_home(served: dict[tuple[str, int], list[str]]) -> float:
    """Turns that landed where their program's first one did."""
    turns = [name == own[0] for own in served.values() for name in own]
    return sum(turns) / len(turns)


def assert_both_are_used(served: dict[tuple[str, int], list[str]]) -> None:
    homes = [own[0] for own in served.values()]
    for name in ("left", "right"):
        assert homes.count(name) > len(homes) / 5


def test_programs_with_an_id_always_land_at_home(front):
    served = land(front.base_url, WITH_ID, ALL_TURNS)
    assert sum(map(len, served.values())) >= ALL_TURNS
    assert share_at_home(served) == 1.0
    assert_both_are_used(served)


def test_programs_without_an_id_land_at_home(front):
    served = land(front.base_url, WITHOUT_ID, ALL_TURNS)
    assert sum(map(len, served.values())) >= ALL_TURNS
    assert share_at_home(served) >= 0.99
    assert_both_are_used(served)


def test_the_end_of_a_program_is_told_to_its_replica(front):
    for name in (f"ends-{number}" for number in range(20)):
        home = _first_turn(front.base_url, name)
        path = f"/ttlcache/programs/{name}/end"
        end = httpx.post(f"{front.base_url}{path}", timeout=HANG_S).json()
        assert (end["name"], end["path"]) == (home, path)


def _first_turn(base_url: str, session: str) -> str:
    answer = httpx.post(
        f"{base_url}{CHAT}",
        headers={"X-Session-ID": session},
        json={"model": "tiny", "messages": chat(0, 0)},
        timeout=HANG_S,
    )
    return str(answer.json()["name"])
