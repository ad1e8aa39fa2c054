"""Which program an HTTP request belongs to: every header and body form once."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.core.test_hints import nested
from ttlcache.programs.client_values import MAX_INT
from ttlcache.programs.hints import parse_hints
from ttlcache_connector.http.body import MAX_MEMBER_BYTES, opening, parse
from ttlcache_connector.http.clues import Clues, from_body, from_headers, with_hints

CHAT = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Fix the bug."},
]


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": CHAT, **fields}).encode()


def conversation(sent: bytes) -> bytes | None:
    parsed = parse(sent)
    return None if parsed is None else opening(parsed)


def test_vllms_own_header_outranks_the_others():
    both = [(b"session-id", b"codex-1"), (b"x-session-id", b"own")]
    assert from_headers(both) == Clues("x-session-id", "own")


def test_the_opening_of_a_conversation_stays_in_all_its_turns():
    first = conversation(body())
    system, user = CHAT
    said = {"role": "assistant", "content": "ls"}
    assert conversation(body(messages=[*CHAT, said])) == first
    for marker in ({"type": "ephemeral"}, None):
        marked = [system, {**user, "cache_control": marker}]
        assert conversation(body(messages=marked)) == first
    other = [system, {**user, "content": "Another task."}]
    assert conversation(body(messages=other)) != first


def test_the_name_of_a_user_or_of_a_kind_of_job_tells_no_program():
    names = {"prompt_cache_key": "k", "safety_identifier": "k", "user": "k"}
    assert from_body(body(**names, metadata={"user_id": "k"})) == Clues()


def test_text_inside_a_message_is_no_field():
    talk = '"job_id": 3, "cache_control": {"type": "ephemeral", "ttl": "1h"}'
    chat = [{"role": "user", "content": talk}]
    assert from_body(body(messages=chat)) == Clues()


@pytest.mark.parametrize(
    ("markers", "ttl"),
    [
        ([{"type": "ephemeral"}], None),  # as in each of Claude Code's requests
        ([{"type": "ephemeral", "ttl": None}], None),
        ([{"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}], "1h"),
        ([{"type": "ephemeral", "ttl": "soon"}], None),
        ([{"type": "other", "ttl": "1h"}], None),
    ],
)
def test_anthropic_cache_control_becomes_a_wish(markers, ttl):
    blocks = [{"type": "text", "text": "t", "cache_control": m} for m in markers]
    hints = from_body(body(system=blocks)).hints
    assert hints == ({} if ttl is None else {"ttlcache": {"ttl": ttl}})
    assert parse_hints(dict(hints)).rejected == ()


def test_vllm_continuums_fields_reach_the_engine_as_they_came():
    called = {"this_func_call": "pytest", "last_func_call": "ls"}
    sent = body(job_id="j", is_last_step=True, **called)
    changed = with_hints(sent, from_body(sent))
    assert changed.startswith(sent[:-1])
    got = json.loads(changed)
    hints = parse_hints(got.pop("kv_transfer_params"))
    assert (hints.program_id, hints.is_last_step) == ("j", True)
    assert hints.tools == ("pytest",)
    assert got == json.loads(sent)


def test_a_clients_own_hints_win_and_stay():
    own = {"do_remote_decode": True, "ttlcache": {"program_id": "mine"}}
    sent = body(job_id="j", kv_transfer_params=own)
    got = json.loads(with_hints(sent, from_body(sent)))["kv_transfer_params"]
    assert got == {"job_id": "j", **own}
    assert parse_hints(got).program_id == "mine"


def test_blanks_without_end_are_read_once():
    """A body of blanks must not cost its square: 1 MB would take minutes."""
    text = " " * 1_000_000 + ", " * 100_000
    body = {"messages": [{"role": "user", "content": text}]}
    found = conversation(msgspec.json.encode(body))
    assert found is not None
    assert text.encode() in found


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"job_id": nested(500)}, ("id_type",)),
        ({"job_id": 1 << 64}, ("id_range",)),
        ({"job_id": "\ud800"}, ("id_encoding",)),
        ({"job_id": float("nan")}, ("id_type",)),
        ({"job_id": "x" * 1_000_000}, ("id_too_long",)),
        ({"this_func_call": nested(500)}, ("tool_type",)),
        ({"this_func_call": "\ud800"}, ("tool_encoding",)),
        ({"is_last_step": nested(500)}, ("bool_type",)),
        ({"metadata": {"session_id": "\ud800"}}, ("id_encoding",)),
        ({"last_func_call": nested(500)}, ()),
    ],
)
def test_what_does_not_fit_is_dropped_and_the_body_stays(fields, reasons):
    sent = body(**fields)
    clues = from_body(sent)
    assert clues.dropped == reasons
    assert clues.session is None
    assert with_hints(sent, clues) is None


def test_a_value_that_does_not_fit_costs_no_other_one():
    sent = body(job_id=nested(500), session_id="s", this_func_call="bash", x="\ud800")
    clues = from_body(sent)
    assert (clues.session, clues.hints) == ("s", {"this_func_call": ["bash"]})
    assert clues.dropped == ("id_type",)


@pytest.mark.parametrize(
    ("fields", "expected", "reasons"),
    [
        (
            {"kv_transfer_params": {"a": nested(500), "b": MAX_INT}},
            {"kv_transfer_params": {"b": MAX_INT}},
            ("nested_too_deep",),
        ),
        (
            {"kv_transfer_params": {"ttlcache": {"program_id": "\ud800"}}},
            {"kv_transfer_params": {}},
            ("nested_encoding",),
        ),
        (
            {"kv_transfer_params": {"a": "\ud800"}, "job_id": "j"},
            {"kv_transfer_params": {"job_id": "j"}},
            ("nested_encoding",),
        ),
        (
            {"vllm_xargs": {"ttlcache_tool": "\ud800", "top_a": 1}},
            {"vllm_xargs": {"top_a": 1}},
            ("nested_encoding",),
        ),
        ({"session_id": "\ud800"}, {"session_id": None}, ("id_encoding",)),
    ],
)
def test_what_vllm_could_not_carry_to_its_engine_is_replaced(fields, expected, reasons):
    sent = body(**fields)
    clues = from_body(sent)
    assert clues.dropped == reasons
    assert json.loads(with_hints(sent, clues)) == json.loads(sent) | expected


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u"},  # nothing to add
        {"this_func_call": "x" * 10_000},
        # What vLLM refuses itself stays for it to refuse.
        *({"job_id": "j", "kv_transfer_params": wrong} for wrong in ([], "x", 3)),
        {"vllm_xargs": {"a": nested(500)}},
        {"vllm_xargs": {"a": 1 << 64}},
        {"vllm_xargs": {"a": {"\ud800": 1}}},
        {"kv_transfer_params": {"a": ["\ud800", 1 << 64]}},
        {"kv_transfer_params": {"a": [nested(500), -(1 << 63) - 1]}},
        {"kv_transfer_params": {"a": 1 << 64, "b": float("nan")}},
    ],
)
def test_other_bodies_stay_as_they_are(fields):
    sent = body(**fields)
    assert with_hints(sent, from_body(sent)) is None


@pytest.mark.parametrize(
    ("params", "after"),
    [
        (None, b'{"job_id":"j"}'),
        (
            {"a": float("nan"), "b": 1 << 70},
            b'{"job_id":"j","a":NaN,"b":1180591620717411303424}',
        ),
    ],
)
def test_hints_are_added_to_what_the_client_gave(params, after):
    sent = body(kv_transfer_params=params, job_id="j")
    changed = with_hints(sent, from_body(sent))
    assert changed.endswith(b'"kv_transfer_params":' + after + b"}")


JUNK = [
    *(b"", b"{", b"[]", b'"user": 1', b'{"user": {"a": ['),
    b'{"user": "x", "messages": 7}',
    b'{"metadata": 3, "user": "\xff"}',
    b'{"metadata": {"user_id": "{"}}',
    b'{"user_id": 1, "metadata": ' + b"[" * 100_000,
    b'{"metadata": {"user_id": {"session_id": []}}, "job_id": [1]}',
]
ODD = [
    b'{"user": "u", "messages": [{"role": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    b'{"cache_control": {"ttl": ' + b"[" * 10_000 + b"}}",
    b'{"cache_control": {"ttl": 1e999}}',
    b'{"cache_control": {"type": "ephemeral", "ttl": 1' + b"0" * 300 + b"}}",
    b'{"cache_control": {"ttl": "\xff"}}',
    b'{"metadata": {"user_id": "{\\"session_id\\":' + b"[" * 3000 + b'"}}',
    b'\xef\xbb\xbf{"job_id": "j"}',
    '{"job_id": "j"}'.encode("utf-16"),
    b'{"job_id": ' + b"9" * 5000 + b"}",
    b'{"job_id": "\xed\xa0\x80"}',
    b'{"user": "u", "input": "\xff"}',
]


@pytest.mark.parametrize("sent", JUNK + ODD)
def test_nothing_raises_on_what_a_client_sends(sent):
    clues = from_body(sent)
    with_hints(sent, clues)
    conversation(sent)
    assert clues.session in (None, "j")
    if sent in JUNK:
        assert (clues.session, clues.rule) == (None, "none")


@pytest.mark.parametrize("name", ["kv_transfer_params", "metadata"])
def test_what_has_megabytes_is_not_read(name):
    value = {"do_remote_prefill": True, "a": [[]] * MAX_MEMBER_BYTES}
    clues = from_body(body(session_id="s", **{name: value}))
    assert (clues.session, clues.dropped) == ("s", ("nested_too_large",))
    kept = {"do_remote_prefill": True}
    assert clues.replaced == ({name: kept} if name == "kv_transfer_params" else {})


def test_vllm_refuses_what_is_no_object_however_long():
    clues = from_body(body(session_id="s", kv_transfer_params="x" * MAX_MEMBER_BYTES))
    assert (clues.replaced, clues.hints) == ({}, {})


def test_a_job_id_of_blanks_is_a_hint_and_no_session():
    clues = from_body(body(job_id=" ", user="u"))
    assert clues.rule == "none"
    assert clues.hints == {"job_id": " "}
