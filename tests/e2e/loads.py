"""What several tests ask of a server, and `vanilla` in conftest.py of plain vLLM."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any


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


def record(agent: Any, hints: bool = False) -> list[list[dict[str, Any]]]:
    """Eight concurrent programs on a pool that holds six of them at the end."""
    with ThreadPoolExecutor(GROWING_PROGRAMS) as pool:
        everybody = range(GROWING_PROGRAMS)
        return list(pool.map(lambda i: one_program(agent, i, hints), everybody))


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
