"""What several tests ask of a server, and `vanilla` in conftest.py of plain vLLM."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil


def completion(
    prompt: list[int], hints: object = None, max_tokens: int = 8
) -> dict[str, Any]:
    """The body of a greedy completion of so many tokens."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    if hints is not None:
        body["kv_transfer_params"] = {"ttlcache": hints}
    return body


# --- programs that grow together (tokens and logprobs) -----------------------

GROWING_PROGRAMS = 8
GROWING_TURNS = 4


def one_program(agent: Any, index: int, hints: bool) -> list[dict[str, Any]]:
    """An agent of four turns whose context grows to about 700 tokens."""
    rng = random.Random(index)
    context: list[int] = []
    answers = []
    for turn in range(GROWING_TURNS):
        context += [rng.randrange(5, 2048) for _ in range(150)]
        own = {"program_id": f"same-{index}", "is_last_step": turn == GROWING_TURNS - 1}
        choice = agent.ask(context, max_tokens=16, hints=own if hints else None)
        context = choice["context"]
        answers.append(
            {
                "token_ids": choice["token_ids"],
                "logprobs": choice["logprobs"]["token_logprobs"],
                "cached_tokens": choice["cached_tokens"],
            }
        )
    return answers


def record(agent: Any, hints: bool = False) -> dict[str, Any]:
    """Eight concurrent programs on a pool that holds six of them at the end.

    cpu_s: CPU seconds that the server's processes spent on it.
    """
    before_s = cpu_s(agent.server.pid)
    with ThreadPoolExecutor(GROWING_PROGRAMS) as pool:
        programs = list(
            pool.map(lambda i: one_program(agent, i, hints), range(GROWING_PROGRAMS))
        )
    return {"programs": programs, "cpu_s": cpu_s(agent.server.pid) - before_s}


def cpu_s(pid: int) -> float:
    """CPU seconds so far of a process and all its descendants."""
    process = psutil.Process(pid)
    family = (process, *process.children(recursive=True))
    return sum(sum(each.cpu_times()[:2]) for each in family)


# --- two turns each (tokens with no cache at all) ----------------------------

PROGRAMS = 50
BLOCK = 32
FIRST_TOKENS = 200
#: What a turn leaves: the KV of its last token does not exist.
KEPT = (FIRST_TOKENS + 8 - 1) // BLOCK * BLOCK


def first_prompt(index: int) -> list[int]:
    return [5 + (index * 7919 + i * i * 31 + i * 3) % 2000 for i in range(FIRST_TOKENS)]


def tool_result(index: int) -> list[int]:
    return [5 + (index * 104_729 + i * 17) % 2000 for i in range(40)]


def uncached(agent: Any) -> list[list[list[int]]]:
    """Both turns of every program, with no cache at all: a salt of its own each."""

    def both(index: int) -> list[list[int]]:
        first = agent.ask(first_prompt(index), cache_salt=f"first-{index}")
        prompt = first["context"] + tool_result(index)
        second = agent.ask(prompt, cache_salt=f"second-{index}")
        assert first["cached_tokens"] == second["cached_tokens"] == 0
        return [first["token_ids"], second["token_ids"]]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(both, range(PROGRAMS)))


# --- two turns of one program ------------------------------------------------

PROMPT = [5 + (i * 7919 + i * i) % 2000 for i in range(200)]
RESULT = [5 + (i * 104_729) % 2000 for i in range(40)]


def two_turns(agent: Any) -> list[dict[str, Any]]:
    first = agent.ask(PROMPT, max_tokens=24)
    return [first, agent.ask([*first["context"], *RESULT], max_tokens=24)]


# --- broken requests ---------------------------------------------------------

CHAT = "/v1/chat/completions"
MESSAGE = b'"messages": [{"role": "user", "content": "x"}]'
#: (path, body): what clients get wrong, and fields of other people's conventions.
BROKEN = [
    (CHAT, b""),
    (CHAT, b"{"),
    (CHAT, b"[1, 2]"),
    (CHAT, b'{"user": "u"'),
    (CHAT, b"\xff\xfe\x00"),
    (CHAT, b'{"model": "tiny", "metadata": 3, "messages": 7}'),
    (CHAT, b'{"model": "tiny", "job_id": "j", "messages": "no"}'),
    (CHAT, b'{"model": "tiny", "session_id": 5, ' + MESSAGE + b"}"),
    (CHAT, b'{"kv_transfer_params": [], "job_id": 1, "model": "tiny"}'),
    ("/v1/messages", b'{"metadata": {"user_id": "{"}, "model": "tiny"}'),
    ("/v1/responses", b'{"agent_hint": 3, "model": "tiny", "input": 4}'),
    ("/v1/completions", b'{"job_id": "j", "prompt": "' + b"x " * 5_000_000 + b'"}'),
]


def answers_to_broken(agent: Any) -> list[tuple[int, str]]:
    """Status and text of each."""
    found = []
    for path, body in BROKEN:
        headers = {"content-type": "application/json", "session-id": "broken"}
        answer = agent.http.post(path, content=body, headers=headers)
        found.append((answer.status_code, answer.text))
    return found
