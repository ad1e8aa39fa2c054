"""Clients that change the head of their prompts: what it costs, what is said of it.

Claude Code's requests in the shape that its CLI sends them with text of our own; and,
where npm can install it, the CLI itself.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.claude_code import converse, hit_of, install
from tests.e2e.conftest import Agent, start_server

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

#: System text first, and there only; tools behind it. As many models' templates.
TEMPLATE = (
    "{% if messages[0].role == 'system' %}<|system|>\n{{ messages[0].content }}"
    "{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}<|end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}\n{{ call.function | tojson }}{% endfor %}"
    "<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TURNS = 5
REMINDER = {"CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "countdown"}
REMEDY = {
    "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
}
SYSTEM = "You are an agent that repairs programs, one small step after the other. " * 30
TOOL = {
    "name": "Bash",
    "description": "Runs a command in a shell of this machine, and tells its end. "
    * 120,
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}


def header(number: int) -> str:
    """The first line of Claude Code's system text; of every request another."""
    return f"x-anthropic-billing-header: cc_version=2.1.0; cch={number:05d};"


@pytest.fixture(scope="module")
def agent(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    with start_server(
        tiny_model,
        folder / "server.log",
        {},
        num_blocks=2000,
        max_model_len=32768,
        extra_args=(
            *("--chat-template", str(template)),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        ),
    ) as server:
        agent = Agent(server)
        yield agent
        assert agent.count("ttlcache_hook_errors_total") == 0
        assert agent.count("ttlcache_http_errors_total") == 0


def diverged(agent: Agent, cause: str) -> float:
    return agent.count("ttlcache_turns_diverged_total", "cause", cause)


def said(agent: Agent) -> list[str]:
    log = agent.server.log_path.read_text().splitlines()
    return [line for line in log if "prompt diverged at token" in line]


def messages_hits(agent: Agent, session: str, *, reminds: bool) -> list[float]:
    """Share of each prompt that was cached, of five turns on `/v1/messages`."""
    chat: list[dict[str, object]] = [{"role": "user", "content": "Repair it."}]
    hits = []
    for number in range(TURNS):
        blocks = [{"type": "text", "text": text} for text in (header(number), SYSTEM)]
        body = {
            "model": "tiny",
            "max_tokens": 8,
            "system": blocks,
            "tools": [TOOL],
            "messages": chat,
            "metadata": {"user_id": json.dumps({"session_id": session})},
        }
        answer = agent.post("/v1/messages", **body)
        hits.append(hit_of(answer["usage"]))
        call = {"type": "tool_use", "id": f"t{number}", "name": "Bash", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "ok"}
        chat += [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        if reminds:
            left = f"<total_tokens>{190_000 - number} tokens left</total_tokens>"
            chat.append({"role": "system", "content": left})
    return hits


def test_reminders_that_go_to_the_head_are_named_and_without_them_it_hits(agent):
    before = messages_hits(agent, "reminded", reminds=True)
    assert max(before[1:]) < 0.5, before
    agent.settle()
    assert diverged(agent, "head") == TURNS - 2  # the first may be another's
    (line,) = said(agent)
    assert "CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off" in line
    after = messages_hits(agent, "quiet", reminds=False)
    assert min(after[1:]) >= 0.95, after
    agent.settle()
    assert diverged(agent, "head") == TURNS - 2
    assert len(said(agent)) == 1


def test_a_header_that_changes_each_time_does_no_harm_in_chats(agent):
    """As a proxy turns Anthropic's blocks into chat messages."""
    text = [{"type": "text", "text": SYSTEM * 3}]
    for joined in (False, True):
        hits, chat = [], [{"role": "user", "content": f"Repair it {joined}."}]
        for number in range(TURNS):
            system: object = [{"type": "text", "text": header(number)}, *text]
            if joined:
                system = f"{header(number)}\n{SYSTEM * 3}"
            messages = [{"role": "system", "content": system}, *chat]
            asked = {"model": "tiny", "max_tokens": 8, "messages": messages}
            usage = agent.post("/v1/chat/completions", **asked)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            hits.append(cached / usage["prompt_tokens"])
            chat += [
                {"role": "assistant", "content": "Go on."},
                {"role": "user", "content": "ok"},
            ]
        assert min(hits[1:]) >= 0.95, hits


def test_the_real_cli(agent, tmp_path):
    program = install(tmp_path / "claude")

    def hits(name: str, settings: dict[str, str]) -> list[float]:
        url = agent.server.base_url
        found = converse(program, tmp_path / name, url, TURNS, settings)
        agent.settle()
        return found

    counted = diverged(agent, "head")
    before = hits("before", REMINDER)
    # The whole of what its first turns share is system text.
    assert max(before[1:]) < 0.8, before
    assert diverged(agent, "head") == counted + TURNS - 2
    assert any("CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off" in line for line in said(agent))
    after = hits("after", REMEDY)
    assert min(after[1:]) >= 0.95, after
    assert diverged(agent, "head") == counted + TURNS - 2
