"""Small logs in the shape of every format that `ttlcache_sim.load.readers` knows.

Each is one agent with three turns: prompts of 1000, 1100 and 1300 tokens where the
format counts them, outputs of 50, 60 and 70; `pytest` runs for 4 s, then a file is read
for half a second.
"""

from __future__ import annotations

import json
from typing import Any

PROMPTS, OUTPUTS = (1000, 1100, 1300), (50, 60, 70)
#: When each request was sent, and when its answer had come.
TIMES = ((0.0, 2.0), (6.0, 8.0), (8.5, 10.0))
CALLS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Bash", {"command": "cd /src && pytest -q"}),
    ("Read", {"file_path": "/src/a.py"}),
)
_DAY = "2026-03-01T10:00:"


def at(seconds: float) -> str:
    return f"{_DAY}{seconds:06.3f}Z"


def lines(*items: Any) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


def claude_code() -> str:
    """An answer has two lines, of which the first does not know its output yet."""
    found: list[Any] = [{"type": "summary", "summary": "about it", "leafUuid": "u"}]
    for turn, (start_s, end_s) in enumerate(TIMES):
        common = {"sessionId": "s-1", "isSidechain": False, "parentUuid": None}
        text = "Do it." if not turn else [{"type": "tool_result", "content": "ok"}]
        message: dict[str, Any] = {"role": "user", "content": text}
        line = {"type": "user", "uuid": f"u{turn}", "timestamp": at(start_s)}
        found.append({**common, **line, "message": message})
        usage = {"input_tokens": 10, "cache_creation_input_tokens": 90}
        usage |= {"cache_read_input_tokens": PROMPTS[turn] - 100, "output_tokens": 1}
        blocks: list[Any] = [{"type": "text", "text": "I see."}]
        if turn < len(CALLS):
            name, given = CALLS[turn]
            blocks.append({"type": "tool_use", "id": "t", "name": name, "input": given})
        for block in blocks:
            is_last = block is blocks[-1]
            told = {**usage, "output_tokens": OUTPUTS[turn]} if is_last else usage
            message = {"id": f"msg_{turn}", "content": [block], "usage": told}
            message["stop_reason"] = "tool_use" if is_last else None
            line = {"type": "assistant", "uuid": f"a{turn}{is_last}"}
            stamp = at(end_s if is_last else end_s - 0.5)
            found.append({**common, **line, "timestamp": stamp, "message": message})
    return lines(*found)


def codex(*, counted: bool = True) -> str:
    meta = {"id": "c-1", "cwd": "/src", "cli_version": "0.150.0"}
    found: list[Any] = [{"timestamp": at(0), "type": "session_meta", "payload": meta}]
    tools = (("exec_command", {"cmd": "pytest -q"}), ("Read", {"path": "a"}))
    for turn, (start_s, end_s) in enumerate(TIMES):
        given: dict[str, Any] = {"type": "function_call_output", "output": "x" * 400}
        if not turn:
            text = [{"type": "input_text", "text": "y" * 4000}]
            given = {"type": "message", "role": "user", "content": text}
        answer: dict[str, Any] = {"type": "message", "role": "assistant"}
        answer["content"] = [{"type": "output_text", "text": "done"}]
        if turn < len(tools):
            name, arguments = tools[turn]
            answer = {"type": "function_call", "name": name, "call_id": "c"}
            answer["arguments"] = json.dumps(arguments)
        usage = {"input_tokens": PROMPTS[turn], "output_tokens": OUTPUTS[turn]}
        info = {"last_token_usage": usage, "total_token_usage": {"total_tokens": turn}}
        count = {"type": "token_count", "info": info if counted else None}
        items = [(start_s, "response_item", given), (end_s, "response_item", answer)]
        # Told twice, as after a turn of the person.
        items += [(end_s, "event_msg", count)] * 2
        found += [{"timestamp": at(s), "type": t, "payload": p} for s, t, p in items]
    return lines(*found)


def atif() -> str:
    steps: list[dict[str, Any]] = [{"source": "user", "message": "Do it."}]
    for turn, (_, end_s) in enumerate(TIMES):
        step: dict[str, Any] = {
            "source": "agent",
            "message": "",
            "timestamp": at(end_s),
        }
        if turn < len(CALLS):
            name, given = CALLS[turn]
            step["tool_calls"] = [{"function_name": name, "arguments": given}]
            step["observation"] = {"results": [{"content": "ok"}]}
        counts = {"prompt_tokens": PROMPTS[turn], "completion_tokens": OUTPUTS[turn]}
        steps.append({**step, "metrics": counts})
    found = {"schema_version": "ATIF-v1.7", "session_id": "d-1", "steps": steps}
    return json.dumps(found, indent=2)


def mini_swe_agent(*, early: bool = False) -> str:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "x" * 2000}]
    messages.append({"role": "user", "content": "y" * 2000})
    for turn, (_, end_s) in enumerate(TIMES):
        command = ("pytest -q", "cat a.py", "echo done")[turn]
        usage = {"prompt_tokens": PROMPTS[turn], "completion_tokens": OUTPUTS[turn]}
        extra: dict[str, Any] = {"actions": [{"command": command}], "timestamp": end_s}
        extra["response"] = {"usage": usage}
        content = f"I run it.\n\n```bash\n{command}\n```"
        messages.append({"role": "assistant", "content": content, "extra": extra})
        next_s = TIMES[turn + 1][0] if turn + 1 < len(TIMES) else end_s
        seen = {"role": "user", "content": "z" * 400, "extra": {"timestamp": next_s}}
        messages.append(seen)
    if early:
        for message in messages:
            message.pop("extra", None)
    name = "mini-swe-agent-1" if early else "mini-swe-agent-1.1"
    found = {"trajectory_format": name, "info": {}, "messages": messages}
    return json.dumps(found, indent=2)


def swe_agent() -> str:
    history = [{"role": "system", "content": "x" * 4000}]
    history.append({"role": "assistant", "content": "y" * 40})
    steps = [
        {"action": action, "response": "y" * 40, "observation": "z" * 400}
        for action in ("pytest -q", "open a.py 12", "submit")
    ]
    for step, seconds in zip(steps, (4.0, 0.5, 0.1), strict=True):
        step["execution_time"] = seconds
    return json.dumps({"trajectory": steps, "history": history, "info": {}})


def openhands_events() -> list[dict[str, Any]]:
    """Of the newer kind; the first answer makes two calls."""
    prompt = {"type": "text", "text": "x" * 4000}
    found: list[dict[str, Any]] = [
        {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": prompt},
        {"kind": "MessageEvent", "source": "user", "timestamp": at(0)},
    ]
    found[0]["timestamp"] = at(0)
    found[1]["llm_message"] = {"role": "user", "content": [{"text": "Do it."}]}
    actions = [
        ("terminal", "pytest -q"),
        ("terminal", "pytest -q"),
        ("file_editor", "view"),
    ]
    for turn, (tool, command) in zip((0, 0, 1), actions, strict=True):
        event: dict[str, Any] = {"kind": "ActionEvent", "source": "agent"}
        event |= {"tool_name": tool, "action": {"command": command}}
        event |= {"llm_response_id": f"r{turn}", "timestamp": at(TIMES[turn][1])}
        found.append(event)
        if event["llm_response_id"] == "r0" and len(found) < 4:
            continue
        seen = {"kind": "ObservationEvent", "source": "environment"}
        seen["observation"] = {"content": [{"text": "z" * 400}]}
        found.append({**seen, "timestamp": at(TIMES[turn + 1][0])})
    last = {"kind": "MessageEvent", "source": "agent", "llm_response_id": "r2"}
    found.append({**last, "llm_message": "done", "timestamp": at(TIMES[2][1])})
    return found


def openhands_state() -> dict[str, Any]:
    """base_state.json of the same conversation."""
    usages = [
        {"response_id": f"r{n}", "prompt_tokens": p, "completion_tokens": o}
        for n, (p, o) in enumerate(zip(PROMPTS, OUTPUTS, strict=True))
    ]
    agent = {"response_latencies": [{"response_id": "r0", "latency": 2.0}]}
    return {"stats": {"usage_to_metrics": {"agent": {**agent, "token_usages": usages}}}}


def openhands_early() -> str:
    """A line of output.jsonl of the earlier kind."""
    found: list[dict[str, Any]] = []
    calls = (("run", "execute_bash", "pytest -q"), ("read", "str_replace_editor", "a"))
    for turn, (start_s, end_s) in enumerate(TIMES):
        seen = {"source": "user", "action": "message", "args": {"content": "Do it."}}
        if turn:
            seen = {"source": "agent", "observation": "run", "content": "ok"}
        found.append({**seen, "timestamp": at(start_s)})
        kind, name, given = calls[turn] if turn < 2 else ("finish", "finish", "")
        usage = {"prompt_tokens": PROMPTS[turn], "completion_tokens": OUTPUTS[turn]}
        response = {"id": f"r{turn}", "usage": usage}
        meta = {"function_name": name, "model_response": response}
        event = {"source": "agent", "action": kind, "args": {"command": given}}
        found.append({**event, "timestamp": at(end_s), "tool_call_metadata": meta})
    return lines({"instance_id": "o-1", "history": found})


def kv_cache_tester() -> str:
    requests = [
        {"t": start_s, "type": "n", "in": p, "out": o, "hash_ids": [1, 2]}
        | {"stop": "tool_use", "api_time": end_s - start_s}
        for (start_s, end_s), p, o in zip(TIMES, PROMPTS, OUTPUTS, strict=True)
    ]
    nested = {"type": "subagent", "agent_id": "b", "requests": requests[:2]}
    found = {"id": "k-1", "block_size": 64, "requests": [*requests, nested]}
    return json.dumps(found)


def request_log(*, session: str = "", counted: bool = True) -> str:
    """Another agent's requests lie between those of the one."""
    found = []
    messages: list[Any] = [{"role": "user", "content": "x" * 4000}]
    for turn, (start_s, end_s) in enumerate(TIMES):
        body = {"model": "m", "messages": list(messages), "user": session or None}
        answer: dict[str, Any] = {"role": "assistant", "content": "done"}
        if turn < len(CALLS):
            name, given = CALLS[turn]
            function = {"name": name, "arguments": json.dumps(given)}
            answer["tool_calls"] = [{"id": "t", "function": function}]
        usage = {"prompt_tokens": PROMPTS[turn], "completion_tokens": OUTPUTS[turn]}
        response = {"choices": [{"message": answer}], "usage": usage}
        line = {"start_time": start_s, "end_time": end_s, "request": body}
        if counted:
            line["response"] = response
        found.append(line)
        other = {"messages": [{"role": "user", "content": f"other {turn}"}]}
        found.append({"start_time": start_s + 0.1, "request": other})
        messages += [answer, {"role": "tool", "content": "z" * 400}]
    return lines(*found)


def vllm_log(*, prompts: bool = True) -> str:
    found, text = ["INFO:     Application startup complete."], "<|user|>" + "x" * 3990
    for turn, (start_s, end_s) in enumerate(TIMES):
        head = f"(APIServer pid=1) INFO 11-05 12:39:{start_s:02.0f} [logger.py:40] "
        told = f"prompt: {text!r}, " if prompts else ""
        params = "params: SamplingParams(n=1, max_tokens=100), lora_request: None."
        found.append(f"{head}Received request chatcmpl-{turn}: {told}{params}")
        answer = f"I run it.\n```bash\npytest -q\n```{turn}"
        head = f"(APIServer pid=1) INFO 11-05 12:39:{end_s:02.0f} [logger.py:80] "
        told = f"output: {answer!r}, finish_reason: stop"
        found.append(f"{head}Generated response chatcmpl-{turn}: {told}")
        text += answer + "\n'quoted' \"twice\"" + "z" * 400
    return "\n".join(found) + "\n"
