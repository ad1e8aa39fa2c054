"""How the world's clients name programs, parents, last turns and TTLs: tables.

One row is one form that some client or router sends; `naming` reads them all in one
way, docs/clients.md shows them, tests/connector/test_http_known_clients.py has a
request for each. Names of headers are in lower case, paths begin at the top of a body.
"""

from __future__ import annotations

from dataclasses import dataclass

#: vLLM's own header.
SESSION_HEADER = b"x-session-id"
#: In a request a program's id, in its answer the id that was found; quoted as in URLs.
PROGRAM_HEADER = b"x-ttlcache-program"


@dataclass(frozen=True, slots=True)
class HeaderForm:
    """Headers of one kind of client.

    rule: label in `ttlcache_http_requests_total`.
    session: the program's id; where there is an `agent`, that of all its agents.
    agent: one agent of the session: a program of its own.
    parent: the program, or with `agent` the agent, that started this one.
    """

    rule: str
    session: bytes
    agent: bytes | None = None
    parent: bytes | None = None


#: The first one present wins.
HEADER_FORMS = (
    HeaderForm("x-session-id", SESSION_HEADER, parent=b"x-parent-session-id"),
    HeaderForm("x-ttlcache-program", PROGRAM_HEADER),
    HeaderForm("dynamo", b"x-dynamo-session-id", parent=b"x-dynamo-parent-session-id"),
    HeaderForm(
        "claude-code",
        b"x-claude-code-session-id",
        agent=b"x-claude-code-agent-id",
        parent=b"x-claude-code-parent-agent-id",
    ),
    HeaderForm(  # OpenCode
        "session-affinity", b"x-session-affinity", parent=b"x-parent-session-id"
    ),
    HeaderForm(
        "codex", b"session-id", agent=b"thread-id", parent=b"x-codex-parent-thread-id"
    ),
    HeaderForm("codex", b"session_id"),
)
#: Headers that say whether this turn is the program's last.
FINAL_HEADERS = (b"x-session-final", b"x-dynamo-session-final")


@dataclass(frozen=True, slots=True)
class BodyForm:
    """An object in the body that names a program.

    path: where it is; JSON text on the way is read as JSON.
    session, parent: its members with these ids; the first one present wins.
    last: members, and the value with which they say that no turn follows.
    """

    rule: str
    path: tuple[str, ...]
    session: tuple[str, ...]
    parent: tuple[str, ...]
    last: tuple[tuple[str, bool], ...]


#: The first one that names a program wins; parents and last turns count anyway.
BODY_FORMS = (
    BodyForm(  # AgentInfer
        "agentic-context",
        ("vllm_xargs", "agentic_context"),
        session=("program_id", "session_id"),
        parent=("parent_program_id", "parent_id"),
        last=(("expected_resume", False),),
    ),
    BodyForm(  # vLLM's RFC 52113, AgentInfer
        "agent-hint",
        ("agent_hint",),
        session=("session_id",),
        parent=("parent_session_id",),
        last=(("expected_resume", False),),
    ),
    BodyForm(  # Dynamo up to 1.3; its names changed twice
        "agent-context",
        ("nvext", "agent_context"),
        session=("trajectory_id", "program_id", "session_id"),
        parent=("parent_trajectory_id", "parent_program_id", "parent_session_id"),
        last=(("session_final", True), ("trajectory_final", True)),
    ),
)
#: Other members that are hints of ours under another name.
BODY_HINTS = {("nvext", "agent_hints", "priority"): "priority_class"}

#: vllm-continuum's top-level fields; `parse_hints` knows them by these names.
CONTINUUM_FIELDS = ("job_id", "is_last_step", "this_func_call")

#: Every label of `ttlcache_http_requests_total`: metric labels come from here only.
RULES = (
    *dict.fromkeys(form.rule for form in HEADER_FORMS),
    *("url", "body-session", "job-id"),
    *(form.rule for form in BODY_FORMS),
    *("claude-code-body", "none"),
)
