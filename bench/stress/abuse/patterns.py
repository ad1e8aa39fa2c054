"""Clients that harm others, with or without malice; each pattern is one class.

A client is a closed loop without a pause: its next request is sent as soon as the last
one was answered. Agents that behave run beside it (`bench.stress.abuse.play`).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

VOCAB = 30_000
#: Prompt of a one-shot request, and what it puts out.
PROMPT_TOKENS, OUTPUT_TOKENS = 240, 8
#: A chat begins anew beyond this many tokens.
CHAT_TOKENS = 1_500
#: Contexts that grow without an end end somewhere: at the model's window.
GROWN_TOKENS = 6_000
CHAT_TURN_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of a client. `hints` are its `kv_transfer_params.ttlcache`."""

    prompt: list[int]
    hints: Mapping[str, Any] | None = None
    session_id: str | None = None
    max_tokens: int = OUTPUT_TOKENS


#: Contexts of the agents that behave: what a client may know of others' prompts.
Contexts = Callable[[], list[list[int]]]


class Pattern(ABC):
    """How `clients` clients behave.

    clients: how many run at once.
    starts_at_s: seconds after the first agent came; negative: before.
    repeats: False where each client sends one request in all.
    """

    name: ClassVar[str]
    clients: int = 64
    starts_at_s: float = -5.0
    repeats: bool = True

    @abstractmethod
    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        """The next request of a client.

        Args:
            client: its number, from 0.
            number: of its request, from 0.
            context: prompt and output of its last request.
            others: contexts of the agents beside it.
        """


def _text(*seed: object, tokens: int = PROMPT_TOKENS) -> list[int]:
    rng = random.Random("/".join(map(str, seed)))
    return [rng.randrange(VOCAB) for _ in range(tokens)]


class NewIds(Pattern):
    """Every request is a program of its own."""

    name = "new ids"

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        hints = {"program_id": f"{client}-{number}"}
        return Sent(_text(client, number), hints)


class OneId(Pattern):
    """All requests of all clients carry one id."""

    name = "one id for all"

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        return Sent(_text(client, number), session_id="proxy")


class ConstantIds(Pattern):
    """Each client keeps one id for requests that have nothing in common."""

    name = "constant ids"

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        return Sent(_text(client, number), session_id=f"client-{client}")


class OneParent(Pattern):
    """Every request is a sub-agent of one program."""

    name = "one parent"

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        if client == number == 0:
            return Sent(_text("parent"), {"program_id": "parent", "tool": "task"})
        hints = {"program_id": f"{client}-{number}", "parent_id": "parent"}
        return Sent(_text(client, number), hints)


class SubAgents(Pattern):
    """Each client is a program whose sub-agents never end."""

    name = "sub-agents"

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        parent = f"parent-{client}"
        if number == 0:
            return Sent(_text(client, number), {"program_id": parent, "tool": "task"})
        hints = {"program_id": f"{client}-{number}", "parent_id": parent}
        return Sent(_text(client, number), hints)


class EndlessTTLs(Pattern):
    """Every request wants its blocks kept for ever."""

    name = "endless TTLs"

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        hints = {"program_id": f"{client}-{number}", "ttl": 1e9, "tool": f"t{number}"}
        return Sent(_text(client, number), hints)


class PriorityClasses(Pattern):
    """Each client keeps one id, wants its blocks kept, and says that it comes first."""

    name = "priority classes"

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        hints = {
            "program_id": f"client-{client}",
            "priority_class": 1_000_000,
            "ttl": 1e9,
            "tool": "bash",
        }
        return Sent(_text(client, number), hints)


class Chats(Pattern):
    """Contexts that grow without a pause, and begin anew under the same id."""

    name = "chats"
    most_tokens = CHAT_TOKENS

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        known = context if len(context) < self.most_tokens else []
        prompt = known + _text(client, number, tokens=CHAT_TURN_TOKENS)
        return Sent(prompt, session_id=f"chat-{client}")


class Growing(Chats):
    """Contexts that grow until the model's window is full."""

    name = "endless contexts"
    most_tokens = GROWN_TOKENS


class Prefixes(Pattern):
    """Prompts that begin as those of the agents do."""

    name = "prefixes of others"

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        known = others()
        begin = known[(client + number) % len(known)] if known else []
        return Sent(begin + _text(client, number, tokens=CHAT_TURN_TOKENS))


class Burst(Pattern):
    """A thousand requests at once, each with an id of its own."""

    name = "burst"
    clients = 1_000
    starts_at_s = 5.0
    repeats = False

    def request(
        self, client: int, number: int, context: list[int], others: Contexts
    ) -> Sent:
        return Sent(_text(client, number), session_id=f"burst-{client}")


def patterns(seats: int) -> dict[str, Pattern]:
    """All of them by name, for an engine that runs `seats` requests at a time."""
    found: dict[str, Pattern] = {}
    for clients in (seats + 1, 2 * seats, 4 * seats):
        found[f"constant ids, {clients}"] = ConstantIds(clients)
    for kind in (
        NewIds,
        OneId,
        OneParent,
        SubAgents,
        EndlessTTLs,
        PriorityClasses,
        Chats,
        Growing,
        Prefixes,
        Burst,
    ):
        found[kind.name] = kind()
    return found
