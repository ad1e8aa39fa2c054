"""The halves of LMCache's tier: what ends a start, what its server is told."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.conftest import HOLD_5S, totals
from ttlcache.errors import ConfigError
from ttlcache_connector.tiers.base import TurnEnd
from ttlcache_connector.tiers.lmcache import tier, worker
from ttlcache_connector.tiers.lmcache.client import RETRY_HINTS_S, HintSender
from ttlcache_lmcache import hints


@pytest.fixture
def logged(monkeypatch, caplog):
    for module in (tier, worker):
        monkeypatch.setattr(module, "log", logging.getLogger("tests.lower_ranks"))
    return caplog


@pytest.mark.parametrize(
    ("groups", "kind"),
    [({"sliding_window": 64}, "SlidingWindow"), ({"mamba_mode": "align"}, "Mamba")],
)
def test_a_hybrid_model_runs_without_a_lower_tier_and_says_so(
    make_engine, logged, groups, kind
):
    """No server listens where the tier would be: none is asked."""
    below = {**HOLD_5S, "lower_tier": "lmcache", "lmcache.mp.port": 1}
    engine = make_engine(num_blocks=200, extra_config=below, **groups)
    (told,) = (t for t in logged.messages if "no lower tier for this model" in t)
    assert f"nothing of layers of the kind {kind};" in told
    said = {"program_id": "hybrid", "tool": "x"}
    context = engine.turn("first", range(100), hints=said)
    engine.turn("second", [*context, 7], hints=said)
    found = totals(engine)
    assert found["pins:claimed"] == 1
    assert not [name for name in found if name.startswith(("demotions", "tier_"))]
    assert engine.controller.tier_knowledge.reload_source is None


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("CUDA error: out of memory"), "refuses this model: CUDA error"),
        (ValueError("no such layout"), "refuses this model: no such layout"),
        (ConnectionError("nobody there"), "did not accept this worker"),
    ],
)
def test_why_a_registration_failed_is_logged_once(logged, raised, said):
    def register(_kv_caches: Any) -> None:
        raise raised

    half = object.__new__(worker.LMCacheWorkerTier)
    half._inner = SimpleNamespace(register_kv_caches=register)
    with pytest.raises(ConfigError, match=said):
        half.register({})
    (record,) = logged.records
    assert record.exc_info[1] is raised


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
        told = [(hint.request_id, hint.program, hint.ttl_s) for hint in server.told]
        assert told == [("r", "p", None), ("r", "p", 3.0)]  # a client's TTL only
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
    """What clients choose cannot turn the tier off: it would be a fault."""
    server = Server()
    hints_out = sender(server)
    for _ in range(200):
        hints_out.report_turn(turn)
    hints_out.report_turn(TurnEnd("next", ttl_s=3.0))
    assert [hint.request_id for hint in server.told] == ["next"]


def test_a_server_that_refused_is_told_again_after_a_while():
    """It may be another one."""
    server, now_s = Server(success=False), [0.0]
    hints_out = HintSender(SimpleNamespace(req_clients={0: server}), lambda: now_s[0])
    for _ in range(5):
        hints_out.report_turn(TurnEnd("r", ttl_s=3.0))
    calls = server.calls
    assert calls <= 2  # the answer to the first is read with the second
    server._answer.success = True
    now_s[0] = RETRY_HINTS_S - 1.0
    hints_out.report_turn(TurnEnd("r", ttl_s=3.0))
    assert server.calls == calls
    now_s[0] = RETRY_HINTS_S
    for _ in range(5):
        hints_out.report_turn(TurnEnd("r", ttl_s=3.0))
    assert server.calls == calls + 5
