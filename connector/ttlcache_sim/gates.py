"""What stands between clients and engine: lets turns through, or holds them.

ThunderAgent is a proxy, MORI a router: both see programs, not blocks. `Gate` itself is
what everybody else has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they import vLLM, and the policies of some rivals do not
    from ttlcache.controller import Controller
    from ttlcache_connector.connector import TTLConnector
    from ttlcache_sim.load.agents import Agent


def controller_of(connector: TTLConnector | None) -> Controller:
    """For arms with pins: what stands behind their connector's hooks."""
    assert connector is not None
    assert connector.scheduler_role is not None
    return connector.scheduler_role.parts.controller


class Gate:
    """Told of every turn; every method returns the agents that may go on now.

    This one lets everybody through at once.
    """

    def arrive(self, agent: Agent, now_s: float) -> list[Agent]:
        """The agent's next turn is ready to be sent."""
        return [agent]

    def finish(self, agent: Agent, now_s: float) -> list[Agent]:
        """Its current turn has left the engine; `agent.is_last` tells the end."""
        return []

    def tick(self, now_s: float) -> list[Agent]:
        """Called before each step, and whenever `next_s` has come."""
        return []

    def next_s(self) -> float | None:
        """When the gate wants to be asked again, None if nobody waits there."""
        return None

    def next_tick_s(self) -> float | None:
        """When `tick` will do something, None for never."""
        return None
