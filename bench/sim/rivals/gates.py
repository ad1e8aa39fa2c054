"""What stands between clients and engine: lets turns through, or holds them.

ThunderAgent is a proxy, MORI a router: both see programs, not blocks. `OpenGate` is
what everybody else has.
"""

from __future__ import annotations

from typing import Protocol

from bench.sim.load.agents import Agent


class Gate(Protocol):
    """Told of every turn; every method returns the agents that may go on now."""

    def arrive(self, agent: Agent, now_s: float) -> list[Agent]:
        """The agent's next turn is ready to be sent."""
        ...

    def finish(self, agent: Agent, now_s: float) -> list[Agent]:
        """Its current turn has left the engine; `agent.is_last` tells the end."""
        ...

    def tick(self, now_s: float) -> list[Agent]:
        """Called before each step, and whenever `next_s` has come."""
        ...

    def next_s(self) -> float | None:
        """When the gate wants to be asked again, None if nobody waits there."""
        ...

    def next_tick_s(self) -> float | None:
        """When `tick` will do something, None for never."""
        ...


class OpenGate:
    """Lets everybody through at once."""

    def arrive(self, agent: Agent, now_s: float) -> list[Agent]:
        return [agent]

    def finish(self, agent: Agent, now_s: float) -> list[Agent]:
        return []

    def tick(self, now_s: float) -> list[Agent]:
        return []

    def next_s(self) -> float | None:
        return None

    def next_tick_s(self) -> float | None:
        return None
