"""Children stay with their parents: the one thing the front remembers of programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable

from ttlcache_connector.front.keys import Route

#: Sub-agents remembered; their number is the memory's bound.
MAX_CHILDREN = 100_000


class Family:
    """Keys of sub-agents; programs without a parent are routed by their own id.

    Args:
        is_over: whether the replica that holds a program is over its bound.
        max_children: the longest unused are forgotten.
    """

    def __init__(
        self,
        is_over: Callable[[str], Awaitable[bool]],
        max_children: int = MAX_CHILDREN,
    ) -> None:
        self._is_over = is_over
        self._max_children = max_children
        self._keys: OrderedDict[str, str] = OrderedDict()
        #: Sub-agents that were sent away from their parent's replica.
        self.sent_away = 0

    def __len__(self) -> int:
        return len(self._keys)

    def of(self, program: str) -> str:
        """The key of a program that may be a sub-agent."""
        return self._keys.get(program, program)

    async def key(self, route: Route) -> str | None:
        """The key to route by. A sub-agent's first turn decides for all of them."""
        child, parent = route.program, route.parent
        if child is None or route.key is None:
            return route.key if route.key is None else self.of(route.key)
        if parent is None or parent == child:
            return self._keys.get(child, route.key)
        known = self._keys.get(child)
        if known is not None:
            self._keys.move_to_end(child)
            return known
        key = self.of(parent)
        if await self._is_over(parent):
            key = child
            self.sent_away += 1
        # Another turn of the same child may have decided meanwhile.
        key = self._keys.setdefault(child, key)
        while len(self._keys) > self._max_children:
            self._keys.popitem(last=False)
        return key
