"""Children stay with their parents: the one thing the front remembers of programs."""

from __future__ import annotations

from collections import OrderedDict

from ttlcache_connector.front.keys import Route

#: Programs remembered; their number is the memory's bound.
MAX_CHILDREN = 100_000


class Family:
    """Keys of sub-agents; programs without a parent are routed by their own id.

    What a program is routed by is settled when it is first seen, within its tenant:
    nobody can send another one's program away by calling it a child.

    Args:
        max_children: the longest unused are forgotten.
    """

    def __init__(self, max_children: int = MAX_CHILDREN) -> None:
        self._max_children = max_children
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
        while len(self._keys) > self._max_children:
            self._keys.popitem(last=False)
        return key
