"""Which key a request is routed by: from its headers, URL and body, and of a sub-agent
from what its parent was routed by, which is remembered."""

from __future__ import annotations

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ttlcache.programs.hints import ROUTE_PREFIX, parse_hints
from ttlcache.types import NO_HINTS
from ttlcache_connector.front.prompts import PromptMemory
from ttlcache_connector.http.body import Body, opening, parse
from ttlcache_connector.http.clues import (
    Clues,
    from_body,
    from_headers,
    with_hints,
)
from ttlcache_connector.http.naming import label

#: A shorter prompt is nobody's context, and the beginning of too many others.
MIN_PROMPT_BYTES = 16
#: vllm-router passes none of the client's headers on for these: an id in a header or
#: in the URL has to be told to the replica in the body.
HEADERLESS = frozenset({"/v1/messages", "/v1/responses"})
#: Programs whose keys are remembered; their number is the memory's bound.
MAX_PROGRAMS = 100_000


@dataclass(frozen=True, slots=True)
class Route:
    """What is known of a request.

    rule: where the key was found, "none" without one.
    key: what the router hashes; None: the request passes unchanged.
    program: the client's own id of the program, None where it has none; a sub-agent
        without one gets one.
    parent: the client's id of the program that started this one.
    in_body: the replica finds `program` in the body by itself.
    hints: what the request's headers say beside it.
    """

    rule: str = "none"
    key: str | None = None
    program: str | None = None
    parent: str | None = None
    in_body: bool = True
    hints: Mapping[str, Any] = field(default_factory=dict)


class Family:
    """Keys of sub-agents; programs without a parent are routed by their own id.

    What a program is routed by is settled when it is first seen, within its tenant:
    nobody can send another one's program away by calling it a child.

    Args:
        max_programs: the longest unused are forgotten.
    """

    def __init__(self, max_programs: int = MAX_PROGRAMS) -> None:
        self._max_programs = max_programs
        self._keys: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def of(self, program: str, tenant: str = "") -> str:
        """The key of a program that may be a sub-agent."""
        return self._keys.get((tenant, program), program)

    def key(self, route: Route, tenant: str = "") -> str | None:
        """The key to route by: a sub-agent goes where its parent went."""
        program, parent = route.program, route.parent
        if program is None or route.key is None:
            return route.key
        known = self._keys.get((tenant, program))
        if known is not None:
            self._keys.move_to_end((tenant, program))
            return known
        key = route.key
        if parent is not None and parent != program:
            key = self.of(parent, tenant)
        self._keys[tenant, program] = key
        while len(self._keys) > self._max_programs:
            self._keys.popitem(last=False)
        return key


def find(
    headers: Iterable[tuple[bytes, bytes]],
    url_session: str | None,
    body: bytes | None,
    prompts: PromptMemory,
) -> Route:
    """The route of a generating request; the first rule that applies wins.

    As in the replica, a program id in the hints outranks headers, and those the body.
    """
    asked = None if body is None else parse(body)
    hints = NO_HINTS
    if asked is not None:
        hints = parse_hints(asked.kv_transfer_params, asked.vllm_xargs)
    header = from_headers(headers, url_session)
    program = label(hints.program_id)
    parent = label(hints.parent_id) or header.parent
    if program is not None:
        return Route("hint", program, program, parent, hints=header.hints)
    clues = header
    if header.session is None and body is not None:
        clues = from_body(body, header)
        parent = parent or clues.parent
    if clues.session is not None:
        session, in_body = clues.session, header.session is None
        return Route(clues.rule, session, session, parent, in_body, header.hints)
    content = Route() if asked is None else _by_content(asked, prompts)
    if parent is not None:
        child = _child_of(parent, content.key)
        return Route("parent", parent, child, parent, False, header.hints)
    return content


def _child_of(parent: str, key: str | None) -> str:
    """An id for a sub-agent that has none: in the replica it is not its parent."""
    if key is None:
        return f"ttlcache-child-{uuid.uuid4().hex}"
    name = f"{parent}\0{key}".encode("utf-8", "replace")
    return f"ttlcache-child-{hashlib.blake2b(name, digest_size=16).hexdigest()}"


def _by_content(asked: Body, prompts: PromptMemory) -> Route:
    conversation = opening(asked)
    if conversation is not None:
        digest = hashlib.blake2b(conversation, digest_size=16).hexdigest()
        return Route("conversation", ROUTE_PREFIX + digest)
    # Up to the closing quote or bracket, which the next turn's prompt goes on behind.
    prompt = bytes(asked.prompt).rstrip(b' \n\r\t"]')
    if prompt.startswith((b'"', b"[")) and len(prompt) >= MIN_PROMPT_BYTES:
        return Route("prompt", ROUTE_PREFIX + prompts.key(prompt))
    return Route()


def named(body: bytes, program: str, told: Mapping[str, Any]) -> bytes | None:
    """The body with the program's id, and what else is `told`, among its hints.

    None for one that stays as it is.
    """
    asked = parse(body)
    if asked is None:
        return None  # no JSON object, or none in UTF-8
    params = asked.kv_transfer_params
    if not isinstance(params, Mapping | None):
        return None  # the replica answers 400
    params = dict(params or {})
    own = params.pop("ttlcache", None)
    if own is not None and not isinstance(own, Mapping):
        return None  # the replica rejects and counts it, as it came
    found = {**told.get("ttlcache", {}), "program_id": program}
    hints = {"ttlcache": {**found, **(own or {})}}
    return with_hints(body, Clues(hints=hints, params=params))


def rank_of(key: str, ranks: int) -> int:
    """A data-parallel rank, the same for a key at any time and place."""
    digest = hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest) % ranks
