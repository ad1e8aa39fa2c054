"""What an arm puts between clients and engine: lets turns through, or holds them.

ThunderAgent is a proxy: it sees programs, not blocks. An arm that
needs the engine itself, to sort its queue or choose victims, changes it here, too.
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

    This one lets every turn through at once.
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
        """When a simulation without steps has to call `tick`, None for never."""
        return None

    def next_tick_s(self) -> float | None:
        """Until when a run of equal steps may skip `tick`, None for always."""
        return None
