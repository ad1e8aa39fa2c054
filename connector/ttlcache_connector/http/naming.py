"""Which program headers or a body name, and which one started it.

Reads the tables of `known_clients`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from ttlcache.programs.client_values import (
    UnfitValueError,
    client_flag,
    header_flag,
    header_id,
)
from ttlcache.programs.hints import ROUTE_PREFIX, clean_hint
from ttlcache_connector.http.body import Body, member, members
from ttlcache_connector.http.known_clients import (
    BODY_FORMS,
    BODY_HINTS,
    FINAL_HEADERS,
    HEADER_FORMS,
    PROGRAM_HEADER,
    HeaderForm,
)

Value = TypeVar("Value")

_LEGACY_USER_ID = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")


@dataclass(slots=True)
class Named:
    """A program as it is named somewhere.

    hints: ours, by their names, as far as they are told beside it.
    """

    rule: str = "none"
    session: str | None = None
    hints: dict[str, Any] = field(default_factory=dict)


def checked(
    clean: Callable[[Any], Value], value: object, dropped: list[str]
) -> Value | None:
    """The value as `clean` has it; None where there is none, or one that does not fit.

    dropped: gets the reason of the latter.
    """
    if value is None:
        return None
    try:
        return clean(value)
    except UnfitValueError as unfit:
        dropped.append(str(unfit))
        return None


def label(value: object) -> str | None:
    """An id as a bounded ASCII string, None where it is none."""
    return checked(header_id, value, [])


def in_headers(found: Mapping[bytes, str], dropped: list[str]) -> Named:
    """The program of the first form that is there.

    Args:
        found: headers by their names in lower case.
    """
    named = Named()
    for form in HEADER_FORMS:
        session, parent = _in_form(form, found)
        if session is not None:
            named = Named(form.rule, session)
            if parent not in (None, session):
                named.hints["parent_id"] = parent
            break
    for name in FINAL_HEADERS:
        if checked(header_flag, found.get(name), dropped):
            named.hints["is_last_step"] = True
    return named


def _in_form(
    form: HeaderForm, found: Mapping[bytes, str]
) -> tuple[str | None, str | None]:
    """The program and its parent.

    Ids of agents are unique within their session only; its first agent has its id.
    """
    told = found.get(form.session, "")
    # A client may send back what an answer told it.
    session = label(unquote(told) if form.session == PROGRAM_HEADER else told)
    if session is None or session.startswith(ROUTE_PREFIX):
        return None, None
    parent = None if form.parent is None else label(found.get(form.parent, ""))
    if form.agent is None:
        return session, parent
    agent = label(found.get(form.agent, ""))
    if agent is None or agent == session:
        return session, None
    if parent not in (None, session):
        return header_id(f"{session}:{agent}"), header_id(f"{session}:{parent}")
    return header_id(f"{session}:{agent}"), session


def in_objects(body: Body, dropped: list[str]) -> Named:
    """The program that the objects of other systems in a body name."""
    named = Named()
    for path, hint in BODY_HINTS.items():
        told = member(getattr(body, path[0]), *path[1:])
        value = checked(partial(clean_hint, hint), told, dropped)
        if value is not None:
            named.hints[hint] = value
    for form in BODY_FORMS:
        told = members(getattr(body, form.path[0]), *form.path[1:])
        session = _first_id(told, form.session, dropped)
        parent = _first_id(told, form.parent, dropped)
        if named.session is None and session is not None:
            named.rule, named.session = form.rule, session
        if parent not in (None, session):
            named.hints.setdefault("parent_id", parent)
        for name, last in form.last:
            if checked(client_flag, told.get(name), dropped) is last:
                named.hints["is_last_step"] = True
    return named


def in_body(
    body: Body, job: str | None, named: Named, dropped: list[str]
) -> tuple[str, str | None]:
    """Rule and id of the most specific one that a body names.

    Not `user` and its like: they name a person or a kind of job. What tells the
    programs of one apart is the prompt, and the engine sees that.

    Args:
        job: vllm-continuum's id.
        named: by an object of another system.
    """
    metadata = body.metadata if isinstance(body.metadata, dict) else {}
    for told in (body.session_id, member(body.vllm_xargs, "session_id")):
        own = checked(header_id, told, dropped)
        if own is not None:
            return "body-session", own
    job_id = label(job)
    if job_id is not None:
        return "job-id", job_id
    if named.session is not None:
        return named.rule, named.session
    claude = _claude_session(metadata.get("user_id"))
    if claude is not None:
        return "claude-code-body", claude
    session = checked(header_id, metadata.get("session_id"), dropped)
    if session is not None:
        return "body-session", session
    return "none", None


def _first_id(
    told: Mapping[str, Any], names: Iterable[str], dropped: list[str]
) -> str | None:
    ids = (checked(header_id, told.get(name), dropped) for name in names)
    return next((found for found in ids if found is not None), None)


def _claude_session(user_id: object) -> str | None:
    """The session inside Claude Code's `metadata.user_id`: JSON, or a suffix."""
    if not isinstance(user_id, str) or len(user_id) > 4096:
        return None
    if user_id.startswith("{"):
        return label(member(user_id, "session_id"))
    match = _LEGACY_USER_ID.search(user_id)
    return match[1] if match else None
