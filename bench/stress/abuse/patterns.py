"""Clients that harm others, with or without malice.

A client is a closed loop without a pause: its next request is sent as soon as the last
one was answered. Agents that behave run beside it (`bench.stress.abuse.play`).
Adding a pattern: one function and one entry in `patterns`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

VOCAB = 30_000
#: Prompt of a one-shot request, and what it puts out.
PROMPT_TOKENS, OUTPUT_TOKENS = 240, 8
#: A chat begins anew beyond this many tokens.
CHAT_TOKENS = 1_500
#: Contexts that grow without an end end somewhere: at the model's window.
GROWN_TOKENS = 6_000
CHAT_TURN_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Asked:
    """A client that is to send its next request.

    client, number: its number and that of the request, from 0.
    context: prompt and output of its last request.
    others: contexts of the agents beside it: what may be known of others' prompts.
    """

    client: int
    number: int
    context: list[int]
    others: Callable[[], list[list[int]]]

    @property
    def name(self) -> str:
        """An id that no other request has."""
        return f"{self.client}-{self.number}"

    def new(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        """Tokens that nobody sent before."""
        return text(self.client, self.number, tokens=tokens)


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of a client. `hints` are its `kv_transfer_params.ttlcache`.

    salt: its tenant; None: that of all clients.
    """

    prompt: list[int]
    hints: Mapping[str, Any] | None = None
    session_id: str | None = None
    max_tokens: int = OUTPUT_TOKENS
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """How `clients` clients behave.

    starts_at_s: seconds after the first agent came; negative: before.
    every_s: between the starts of two clients.
    repeats: False where each client sends one request in all.
    """

    request: Callable[[Asked], Sent]
    clients: int = 64
    starts_at_s: float = -5.0
    every_s: float = 0.0
    repeats: bool = True


def text(*seed: object, tokens: int = PROMPT_TOKENS) -> list[int]:
    rng = random.Random("/".join(map(str, seed)))
    return [rng.randrange(VOCAB) for _ in range(tokens)]


def new_ids(asked: Asked) -> Sent:
    """Every request is a program of its own."""
    return Sent(asked.new(), {"program_id": asked.name})


def one_id(asked: Asked) -> Sent:
    """All requests of all clients carry one id."""
    return Sent(asked.new(), session_id="proxy")


def constant_ids(asked: Asked) -> Sent:
    """Each client keeps one id for requests that have nothing in common."""
    return Sent(asked.new(), session_id=f"client-{asked.client}")


def one_parent(asked: Asked) -> Sent:
    """Every request is a sub-agent of one program."""
    if asked.client == asked.number == 0:
        return Sent(text("parent"), {"program_id": "parent", "tool": "task"})
    return Sent(asked.new(), {"program_id": asked.name, "parent_id": "parent"})


def sub_agents(asked: Asked) -> Sent:
    """Each client is a program whose sub-agents never end."""
    parent = f"parent-{asked.client}"
    if asked.number == 0:
        return Sent(asked.new(), {"program_id": parent, "tool": "task"})
    return Sent(asked.new(), {"program_id": asked.name, "parent_id": parent})


def endless_ttls(asked: Asked) -> Sent:
    """Every request wants its blocks kept for ever."""
    hints = {"program_id": asked.name, "ttl": 1e9, "tool": f"t{asked.number}"}
    return Sent(asked.new(), hints)


def priority_classes(asked: Asked) -> Sent:
    """Each client keeps one id, wants its blocks kept, and says that it comes first."""
    own = {"program_id": f"client-{asked.client}", "priority_class": 1_000_000}
    return Sent(asked.new(), {**own, "ttl": 1e9, "tool": "bash"})


def chats(asked: Asked, most_tokens: int = CHAT_TOKENS) -> Sent:
    """Contexts that grow without a pause, and begin anew under the same id."""
    known = asked.context if len(asked.context) < most_tokens else []
    prompt = known + asked.new(CHAT_TURN_TOKENS)
    return Sent(prompt, session_id=f"chat-{asked.client}")


def endless_contexts(asked: Asked) -> Sent:
    """Contexts that grow until the model's window is full."""
    return chats(asked, GROWN_TOKENS)


def prefixes(asked: Asked) -> Sent:
    """Prompts that begin as those of the agents do."""
    known = asked.others()
    begin = known[(asked.client + asked.number) % len(known)] if known else []
    return Sent(begin + asked.new(CHAT_TURN_TOKENS))


def long_answers(asked: Asked) -> Sent:
    """Few requests, of which some always runs."""
    return Sent(asked.new(), {"program_id": asked.name}, max_tokens=6_000)


def burst(asked: Asked) -> Sent:
    """A thousand requests at once, each with an id of its own."""
    return Sent(asked.new(), session_id=f"burst-{asked.client}")


def patterns(seats: int) -> dict[str, Pattern]:
    """All of them by name, for an engine that runs `seats` requests at a time."""
    return {
        **{
            f"constant ids, {clients}": Pattern(constant_ids, clients)
            for clients in (seats + 1, 2 * seats, 4 * seats)
        },
        "new ids": Pattern(new_ids),
        "one id for all": Pattern(one_id),
        "one parent": Pattern(one_parent),
        "sub-agents": Pattern(sub_agents),
        "endless TTLs": Pattern(endless_ttls),
        "priority classes": Pattern(priority_classes),
        "chats": Pattern(chats),
        "endless contexts": Pattern(endless_contexts),
        "prefixes of others": Pattern(prefixes),
        "long answers": Pattern(long_answers, clients=2),
        "burst": Pattern(burst, clients=1_000, starts_at_s=5.0, repeats=False),
    }
