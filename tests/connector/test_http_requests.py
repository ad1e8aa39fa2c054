"""What the middleware changes in a request: its billing header, its rank."""

from __future__ import annotations

import json

import pytest

from tests.connector.test_middleware import CHAT, application, post
from ttlcache_connector.http.billing_header import without_billing_header

HEADER = (
    "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"
)
NAME = b"x-anthropic-billing-header"
SYSTEM = "You are an agent."
USER = {"role": "user", "content": f"{HEADER}\nWhat is this?"}


def text(value: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": value, **more}


def stripped(**fields: object) -> object:
    out = without_billing_header(json.dumps(fields).encode())
    return None if out is None else json.loads(out)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{HEADER}\n{SYSTEM}", SYSTEM),
        (f"{HEADER}{SYSTEM}", SYSTEM),
        (HEADER, ""),
        (HEADER.removesuffix(";"), ""),
        ([text(HEADER), text(SYSTEM, kept={})], [text(SYSTEM, kept={})]),
        ([text(f"{HEADER}\n{SYSTEM}")], [text(SYSTEM)]),
        ([text(HEADER)], ""),
    ],
)
def test_in_every_form_of_system_text(before, after):
    found = stripped(system=before, messages=[USER])
    assert found == {"system": after, "messages": [USER]}
    assert stripped(instructions=before) == {"instructions": after}
    for role in ("system", "developer"):
        for name in ("messages", "input"):
            turns = [{"role": role, "content": before, "name": "x"}, USER]
            expected = [{"role": role, "content": after, "name": "x"}, USER]
            assert stripped(**{name: turns}) == {name: expected}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"prompt": HEADER},
        {"system": f"Text first. {HEADER}"},
        {"system": "x-anthropic-billing-header is a header."},
        {"system": {"text": HEADER}, "messages": {"role": HEADER}},
        {"system": [HEADER, 5, None, {"text": 5}], "input": HEADER},
        {"messages": [{"role": "system", "content": None}, {"content": HEADER}, USER]},
        {"messages": [{"role": "system", "content": []}, {"role": "system"}, USER]},
    ],
)
def test_what_is_no_header_before_system_text_stays(fields):
    assert stripped(**fields) is None


@pytest.mark.parametrize(
    "body",
    [
        NAME,
        b'{"system": "%s: a=1;' % NAME,
        b'["%s: a=1;"]' % NAME,
        b'{"messages": [5, "%s: a=1;"]}' % NAME,
        b'{"system": %s"%s: a=1;"' % (b"[" * 5000, NAME),
        b'{"system": %s"%s: a=1;"%s}' % (b"[" * 5000, NAME, b"]" * 5000),
    ],
)
def test_broken_bodies_stay_as_they_are(body):
    assert without_billing_header(body) is None


def test_other_members_keep_their_bytes():
    body = (
        '{"n": 1.10, "system": "%s\\nX", "e": "\\u00e9", "big": 123456789012345678901}'
    )
    out = without_billing_header((body % HEADER).encode())
    assert out == b'{"n":1.10,"system":"X","e":"\\u00e9","big":123456789012345678901}'


def test_the_middleware_sends_the_body_on_without_it():
    messages = [{"role": "system", "content": f"{HEADER}\n{SYSTEM}"}, USER]
    answer = post(application(), CHAT, json={"messages": messages}).json()
    sent = json.loads(answer["body"])
    assert sent == {"messages": [{"role": "system", "content": SYSTEM}, USER]}
    assert int(answer["length"]) == answer["bytes"] == len(answer["body"])
