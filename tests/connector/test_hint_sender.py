"""What clients choose cannot make the sender of hints a fault of the lower tier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

from ttlcache_connector.tiers.base import TurnEnd
from ttlcache_connector.tiers.lmcache.client import HintSender
from ttlcache_lmcache import hints


class Server:
    """Keeps the hints that came; answers `success` at once."""

    def __init__(self, *, success: bool = True) -> None:
        self.told: list[hints.Hint] = []
        self.calls = 0
        self._answer = SimpleNamespace(success=success, error="no such method")

    def server_module_call(self, request: Any) -> Any:
        self.calls += 1
        self.told += hints.decode(request.payload)
        return SimpleNamespace(query=lambda: True, result=lambda timeout: self._answer)


def sender(*servers: Server) -> HintSender:
    clients = dict(enumerate(servers))
    return HintSender(SimpleNamespace(req_clients=clients), lambda: 0.0)


def test_every_server_hears_of_a_turn():
    servers = Server(), Server()
    for is_final in (False, True):
        turn = TurnEnd("r", "p", 3.0, is_final, tool=("bash", "git"))
        sender(*servers).report_turn(turn)
    for server in servers:
        assert [(hint.request_id, hint.program) for hint in server.told] == [
            ("r", "p"),
            ("r", "p"),
        ]
        assert [hint.ttl_s for hint in server.told] == [None, 3.0]  # a client's only
        assert server.told[0].tool == ("bash", "git")


@pytest.mark.parametrize(
    "turn",
    [
        TurnEnd("r" * 100_000, ttl_s=3.0),
        TurnEnd("", ttl_s=3.0),
        TurnEnd("r", ttl_s=float("inf"), is_final=True),
        TurnEnd("r", ttl_s=float("nan"), is_final=True),
        TurnEnd("r", ttl_s=3.0, tool=("x" * 65,)),
    ],
)
def test_what_no_hint_can_say_is_dropped(turn):
    server = Server()
    hints_out = sender(server)
    for _ in range(200):
        hints_out.report_turn(turn)  # must not raise: faults would turn the tier off
    assert server.told == []
    hints_out.report_turn(TurnEnd("next", ttl_s=3.0))
    assert [hint.request_id for hint in server.told] == ["next"]


def test_a_server_without_the_module_is_told_once_until_it_was_down():
    server = Server(success=False)
    hints_out = sender(server)
    for _ in range(5):
        hints_out.report_turn(TurnEnd("r", ttl_s=3.0))
    calls = server.calls
    assert calls <= 2  # the answer to the first is read with the second
    hints_out.reconnect()
    hints_out.report_turn(TurnEnd("r", ttl_s=3.0))
    assert server.calls == calls + 1
