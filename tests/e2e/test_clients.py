"""Agents' own client libraries, with nothing in them that knows ttlcache.

The tiny model cannot think: vLLM's structured outputs make it write what an agent
would. Every conversation starts with the same system prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import anthropic
import openai
import pytest

from tests.waiting import becomes
from ttlcache.analysis.explain import claim_text
from ttlcache.analysis.reader import load
from ttlcache.analysis.recording import ProgramLog, TurnLog

pytestmark = pytest.mark.e2e

AGENTS = 5
TURNS = 10
SYSTEM = "You are a careful agent. " * 12
ACTION = r"run (ls|cat|pytest) [a-z]{3,8}"
REGEX = {"structured_outputs": {"regex": ACTION}}
Chat = list[dict[str, str]]
#: One turn on a server's URL; the response's id and text.
Say = Callable[[str, Chat], tuple[str, str]]


@cache
def openai_at(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


@cache
def anthropic_at(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none")


def openai_chat(url: str, chat: Chat) -> tuple[str, str]:
    answer = openai_at(url).chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": SYSTEM}, *chat],
        max_tokens=16,
        extra_body=REGEX,
    )
    return answer.id, answer.choices[0].message.content


def openai_responses(url: str, chat: Chat) -> tuple[str, str]:
    answer = openai_at(url).responses.create(
        model="tiny",
        instructions=SYSTEM,
        input=chat,
        max_output_tokens=12,
        prompt_cache_key="all-the-same",
    )
    return answer.id, answer.output_text


def openai_completions(url: str, chat: Chat) -> tuple[str, str]:
    said = (f" {t['content']}" if t["role"] == "user" else t["content"] for t in chat)
    prompt = SYSTEM + "".join(said)
    answer = openai_at(url).completions.create(
        model="tiny", prompt=prompt, max_tokens=12, extra_body=REGEX
    )
    return answer.id, answer.choices[0].text


def anthropic_messages(url: str, chat: Chat) -> tuple[str, str]:
    answer = anthropic_at(url).messages.create(
        model="tiny", max_tokens=12, system=SYSTEM, messages=chat
    )
    return answer.id, answer.content[0].text


def conversation(url: str, say: Say, number: int, turns: int) -> list[str]:
    """Response ids, in order."""
    chat = [{"role": "user", "content": f"Repair {say.__name__} {number}."}]
    ids = []
    for _ in range(turns):
        name, text = say(url, chat)
        ids.append(name)
        chat.append({"role": "assistant", "content": text})
        chat.append({"role": "user", "content": "exit status 0"})
    return ids


def recorded(agent, ids: Iterable[str]) -> dict[str, tuple[ProgramLog, TurnLog]]:
    """Response id -> program and turn, once the recorder has written them all."""
    wanted = set(ids)
    found: dict[str, tuple[ProgramLog, TurnLog]] = {}

    def all_are_there() -> bool:
        for log, turn in load(agent.recording).turns():
            for name in wanted:
                if turn.request.startswith(name) and turn.finish_s is not None:
                    found[name] = (log, turn)
        return set(found) == wanted

    becomes(all_are_there, 30.0)
    return found


def check(agent, conversations: list[list[str]], turns: int) -> None:
    """Each conversation is one program of its own; each return claims, or says why."""
    found = recorded(agent, (name for ids in conversations for name in ids))
    owners = defaultdict(set)
    for number, ids in enumerate(conversations):
        assert len(ids) == turns
        for name in ids:
            owners[id(found[name][0]), number].add(found[name][0].program)
    programs = [next(iter(names)) for names in owners.values()]
    assert len(programs) == len(conversations), "a conversation is in two programs"
    assert len(set(programs)) == len(programs), "two conversations are one program"
    for ids in conversations:
        log = found[ids[0]][0]
        by_turn = {turn.turn: turn for turn in log.turns}
        for name in ids[1:]:
            turn = found[name][1]
            claim = claim_text(turn, by_turn.get(turn.follows or 0), first=False)
            excuses = ("expired", "victim", "no room under", "superseded")
            is_excused = any(excuse in claim for excuse in excuses)
            assert turn.claimed_pin is not None or is_excused, claim
    claimed = sum(found[name][1].claimed_pin is not None for name in found)
    assert claimed > 0.5 * (len(found) - AGENTS)


@pytest.mark.parametrize(
    ("say", "turns"),
    [
        (openai_chat, TURNS),
        (openai_responses, 4),
        (openai_completions, 4),
        (anthropic_messages, TURNS),
    ],
)
def test_each_of_five_conversations_at_once_is_a_program(agent, say, turns):
    def talk(number: int) -> list[str]:
        return conversation(agent.server.base_url, say, number, turns)

    with ThreadPoolExecutor(AGENTS) as pool:
        check(agent, list(pool.map(talk, range(AGENTS))), turns)


def test_openai_streamed_chat_arrives_in_pieces(agent):
    stream = openai_at(agent.server.base_url).chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Go on."}],
        max_tokens=12,
        temperature=0,
        stream=True,
        user="u-1",
        extra_body={"ignore_eos": True},  # drawn at random it may end at once
    )
    pieces = [piece for piece in stream if piece.choices]
    assert len(pieces) > 3


def test_claude_codes_requests_are_one_program_by_header_and_by_body(agent):
    chat = [{"role": "user", "content": "hello"}]
    marker = {"type": "ephemeral", "ttl": "5m"}
    system = [{"type": "text", "text": SYSTEM, "cache_control": marker}]
    identity = {"device_id": "d", "account_uuid": "", "session_id": "cc-1"}
    calls = (
        {"extra_headers": {"X-Claude-Code-Session-Id": "cc-1"}},
        {"metadata": {"user_id": json.dumps(identity)}},
        {"metadata": {"user_id": "user_0a_account__session_cc-1-legacy"}},
    )
    ids = [
        anthropic_at(agent.server.base_url)
        .messages.create(
            model="tiny", max_tokens=4, system=system, messages=chat, **call
        )
        .id
        for call in calls
    ]
    found = recorded(agent, ids)
    assert [found[name][0].program for name in ids] == ["cc-1", "cc-1", "cc-1-legacy"]
    assert [found[name][1].decided.ttl_s for name in ids] == [300.0] * 3
    for program in ("cc-1", "cc-1-legacy"):
        assert agent.post(f"/ttlcache/programs/{program}/end")["known"] is True


MINI = Path(__file__).with_name("mini_agents.py")


@pytest.mark.nightly
def test_mini_swe_agent(agent, tmp_path):
    """The real agent, its real local environment: commands that take real seconds."""
    done = subprocess.run(
        [sys.executable, str(MINI), agent.server.base_url, str(AGENTS), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={
            **os.environ,
            "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "HOME": str(tmp_path),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    conversations = json.loads(done.stdout.splitlines()[-1])
    check(agent, conversations, 6)
    found = recorded(agent, conversations[0])
    tools = {found[name][1].decided.tool for name in conversations[0]}
    assert {tool.split()[1] for tool in tools} <= {"sleep", "ls"}, tools
