"""Requests that say odd things about themselves, each made from its number alone.

What decides an answer (model, prompt, sampling) stays valid, so that answers can be
compared; every field, header, URL and control route that ttlcache documents gets values
that nobody should send.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from urllib.parse import quote

#: From here on plain vLLM dies of what is nested in fields that it sends to its
#: workers; below it answers. From `CANNOT_ENCODE` on its API server refuses it.
DEADLY_DEPTH = 350
DEPTHS = (1, 2, 10, 31, 33, 100, 200, 450, 500, 700, 900, 1_000, 2_000, 10_000)
#: One in so many odd values is a megabyte long.
HUGE_EVERY = 300
HUGE_CHARS = 1_000_000

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
PATHS = (COMPLETIONS, COMPLETIONS, CHAT, CHAT, RESPONSES, MESSAGES)

#: Top-level members of a body, and members of `metadata`.
SCALAR_FIELDS = (
    *("session_id", "job_id", "is_last_step", "this_func_call", "last_func_call"),
    *("prompt_cache_key", "safety_identifier", "user", "metadata", "cache_salt"),
    *("priority", "request_id", "cache_control", "previous_response_id"),
    *("agent_hint", "nvext"),
)
METADATA = ("session_id", "user_id", "ttlcache")
HINTS = (
    *("program_id", "parent_id", "is_last_step", "tool", "tool_eta_s", "ttl"),
    *("priority_class", "job_id", "this_func_call", "last_func_call", "colour"),
)
#: vLLM carries these to its workers.
CARRIED = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs")
HEADERS = (
    *(b"X-TTLCache-Program", b"X-Claude-Code-Session-Id", b"X-Session-Affinity"),
    *(b"X-Claude-Code-Agent-Id", b"X-Claude-Code-Parent-Agent-Id", b"session_id"),
    *(b"session-id", b"thread-id", b"X-Codex-Parent-Thread-Id", b"X-Session-ID"),
    *(b"X-Parent-Session-ID", b"X-Session-Final", b"X-Dynamo-Session-ID"),
    *(b"X-Dynamo-Parent-Session-ID", b"X-Dynamo-Session-Final", b"X-Request-Id"),
    *(b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id"),
    *(b"X-data-parallel-rank", b"Authorization"),
)
HEADER_VALUES = (
    *(b"", b" ", b"s-1", b"0", b"1", b"-1", b"1_0", b"18446744073709551616"),
    *(b"\xff\xfe\xed\xa0\x80", b"a\tb", b"x" * 8_000, b"9" * 5_000, b"[[[[", b"\xa05"),
    *("größe".encode(), b"ttlcache-route-1", b"%00%0a", b"NaN"),
)
IDS_IN_URLS = (
    *("p", "a b", "größe", "../..", "%2e%2e", "\x00", "\n", "x" * 5_000, "%", "%ff"),
    *("\U0001f600", "18446744073709551616", "a/b", "ttlcache-route-1", " "),
)
SCALARS = (
    *("null", "true", "false", "0", "1", "-1", "1.5", "-0.0", "1e308", "1e999"),
    *("18446744073709551615", "18446744073709551616", "-9223372036854775809"),
    *("1" + "0" * 400, "9" * 5_000, "NaN", "Infinity", "-Infinity"),
    *('""', '" "', '"x"', '"5m"', '"1e3s"', r'"\ud800"', r'"a\udc00b"', r'"\u0000"'),
    *(
        r'"\ud83d\ude00"',
        '"é"',
        '"a\\nb"',
        '"' + "x" * 300 + '"',
        '"' + "é" * 300 + '"',
    ),
    *("[]", "{}", '["a","b"]', '["a",null]', '{"a":1}', r'{"\ud800":1}', '[["a"]]'),
    *('["bash",' * 40 + '"bash"' + "]" * 40, json.dumps(["t"] * 40)),
    *(
        json.dumps({"type": "ephemeral", "ttl": "1h"}),
        json.dumps({"type": "ephemeral"}),
    ),
    json.dumps(json.dumps({"device_id": "d", "session_id": "c"})),
    json.dumps("user_ab_account__session_57a121ec-f78c"),
    json.dumps('{"session_id":' + "[" * 3_000),
    json.dumps({"session_id": "c", "parent_session_id": ["p"]}),
    json.dumps({"agent_context": {"session_id": 1, "session_final": "x"}}),
)
#: Not JSON; what follows of the body may become part of it.
BROKEN = ("", "{", "[", "\x00", '"', "nul", "1.2.3", "'x'")


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """One request.

    number: from which it was made.
    plain_path: what plain vLLM is asked instead of `path`; None: it is not asked.
    """

    number: int
    method: str
    path: str
    plain_path: str | None
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def make(number: int, seed: int = 0) -> FuzzRequest:
    """The request of this number."""
    rng = random.Random(f"{seed}/{number}")
    if rng.random() < 0.1:
        return _control(number, rng)
    path = rng.choice(PATHS)
    members, deadly = _members(rng)
    body = _body(path, members, rng)
    headers = [(b"Content-Type", b"application/json")]
    headers += [
        (rng.choice(HEADERS), rng.choice(HEADER_VALUES)) for _ in range(_few(rng))
    ]
    url = path
    if rng.random() < 0.1:
        url = f"/sessions/{quote(rng.choice(IDS_IN_URLS), safe='%')}{path}"
    return FuzzRequest(
        number,
        "POST",
        url,
        None if deadly else path,
        tuple(headers),
        body,
    )


def _control(number: int, rng: random.Random) -> FuzzRequest:
    """A request that only ttlcache answers."""
    program = quote(rng.choice(IDS_IN_URLS), safe=rng.choice(("", "%/")))
    verb = rng.choice(("end", "progress", "progress", "nothing", "end/end", ""))
    path = rng.choice(
        (f"/ttlcache/programs/{program}/{verb}",) * 8
        + ("/ttlcache/programs", "/ttlcache/", f"/ttlcache/{program}")
    )
    names = ("eta_s", "done", "total", "elapsed_s", "cache_salt", "colour", r"\ud800")
    members = {rng.choice(names): _value(rng)[0] for _ in range(rng.randint(0, 3))}
    body = "{" + ",".join(f'"{name}":{text}' for name, text in members.items()) + "}"
    if rng.random() < 0.1:
        body = rng.choice((*BROKEN, _value(rng)[0]))
    method = rng.choice(("POST", "POST", "POST", "POST", "GET", "PUT", "DELETE"))
    return FuzzRequest(number, method, path, None, (), body.encode("utf-8", "replace"))


def _members(rng: random.Random) -> tuple[dict[str, str], bool]:
    """Odd members of a body as JSON, and whether plain vLLM would die of them."""
    members: dict[str, str] = {}
    deadly = False
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            name = rng.choice(SCALAR_FIELDS)
            members[name] = _value(rng)[0]
            if rng.random() < 0.3:
                members["metadata"] = _object(rng, METADATA)[0]
            continue
        name = rng.choice(CARRIED)
        text, depth = _value(rng) if rng.random() < 0.1 else _carried(name, rng)
        members[name] = text
        deadly = deadly or depth >= DEADLY_DEPTH
    return members, deadly


def _carried(name: str, rng: random.Random) -> tuple[str, int]:
    if name == "vllm_xargs":
        flat = (
            *(f"ttlcache_{hint}" for hint in HINTS),
            *("session_id", "job_id", "top_a", "agentic_context"),
        )
        return _object(rng, flat)
    names = (*HINTS, "do_remote_prefill", "remote_block_ids", "a")
    text, depth = _object(rng, names)
    if rng.random() < 0.7:
        own, own_depth = _object(rng, HINTS) if rng.random() < 0.9 else _value(rng)
        text = '{"ttlcache":' + own + ("," + text[1:] if text != "{}" else "}")
        depth = max(depth, own_depth)
    return text, depth + 2


def _object(rng: random.Random, names: tuple[str, ...]) -> tuple[str, int]:
    found = {rng.choice(names): _value(rng) for _ in range(rng.randint(0, 3))}
    text = ",".join(f'"{name}":{value}' for name, (value, _) in found.items())
    return "{" + text + "}", max((depth for _, depth in found.values()), default=0)


def _value(rng: random.Random) -> tuple[str, int]:
    """A JSON value and its depth."""
    if rng.randrange(HUGE_EVERY) == 0:
        return '"' + rng.choice("xé") * HUGE_CHARS + '"', 0
    if rng.random() < 0.2:
        depth = rng.choice(DEPTHS)
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[0,{"b":', "}]")))
        levels = depth // len(closing) or 1
        return opening * levels + '"x"' + closing * levels, levels * len(closing)
    return rng.choice(SCALARS), 50


def _body(path: str, members: dict[str, str], rng: random.Random) -> bytes:
    words = " ".join(rng.choices(("find", "the", "bug", "in", "main", "now"), k=4))
    tokens = rng.randint(1, 4)
    chat = [{"role": "user", "content": words}]
    fixed: dict[str, object] = {"model": "tiny", "temperature": 0}
    if path == COMPLETIONS:
        prompt = [rng.randrange(5, 2048) for _ in range(rng.randint(1, 40))]
        fixed |= {"prompt": prompt, "max_tokens": tokens, "return_token_ids": True}
    elif path == CHAT:
        fixed |= {"messages": chat, "max_tokens": tokens, "return_token_ids": True}
    elif path == RESPONSES:
        fixed |= {"input": words, "max_output_tokens": tokens}
    else:
        fixed |= {"messages": chat, "max_tokens": tokens}
    if path in (COMPLETIONS, CHAT) and rng.random() < 0.2:
        fixed["stream"] = True
    texts = {name: json.dumps(value) for name, value in fixed.items()}
    items = [*texts.items(), *members.items()]
    if rng.random() < 0.1:
        rng.shuffle(items)
    if rng.random() < 0.03:
        items.append((rng.choice(SCALAR_FIELDS), rng.choice(BROKEN)))
    if rng.random() < 0.03:
        items.append(rng.choice(items))  # a member twice: the last one counts
    text = "{" + ",".join(f'"{name}":{value}' for name, value in items) + "}"
    body = text.encode()
    if rng.random() < 0.02:
        body = rng.choice((b"\xef\xbb\xbf" + body, text.encode("utf-16"), body[:-1]))
    return body


def _few(rng: random.Random) -> int:
    return rng.choice((0, 0, 0, 1, 1, 2))
