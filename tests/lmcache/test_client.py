"""The hint client: it neither waits nor raises. The real RPC: tests/e2e."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

from ttlcache.clock import VirtualClock
from ttlcache_lmcache import hints
from ttlcache_lmcache.client import ANSWER_TIMEOUT_S, MAX_IN_FLIGHT, HintClient
from ttlcache_lmcache.hints import Hint

HINT = Hint(request_id="r", ttl_s=1.0)


class Answer:
    def __init__(self) -> None:
        self.is_there, self.success, self.error = False, True, "unknown method"

    def query(self) -> bool:
        return self.is_there

    def result(self, timeout: float | None = None) -> Answer:
        assert self.is_there, "would wait"
        return self


class Server:
    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.payloads: list[bytes] = []
        self.is_gone = False
        self.clock = VirtualClock()
        self.client = HintClient(self, self.clock.now_s)

    def server_module_call(self, request: Any) -> Answer:
        if self.is_gone:
            raise ConnectionError
        assert request.method == hints.SET_TTL
        self.payloads.append(request.payload)
        self.answers.append(Answer())
        return self.answers[-1]

    def fill(self) -> None:
        """As many hints as may be under way, and no more."""
        assert all(self.client.send([HINT]) for _ in range(MAX_IN_FLIGHT))
        assert not self.client.send([HINT])


def test_hints_arrive_as_they_were():
    server = Server()
    assert server.client.send([HINT, Hint(request_id="s", is_last_step=True)])
    assert hints.decode(server.payloads[0])[0] == HINT
    assert server.client.send([])
    assert len(server.payloads) == 1


def test_a_silent_server_costs_hints_and_no_time():
    server = Server()
    server.fill()
    assert server.client.refusal is None
    for answer in server.answers:
        answer.is_there = True
    server.answers[3].success = False
    assert server.client.send([HINT])
    assert server.client.refusal == "unknown method"


def test_answers_that_never_come_do_not_end_the_hints():
    """A server that was restarted does not answer what the old one was told."""
    server = Server()
    server.fill()
    server.clock.advance(ANSWER_TIMEOUT_S - 1.0)
    assert not server.client.send([HINT])
    server.clock.advance(1.0)
    server.fill()  # all of them are given up: as many have room again


def test_a_server_that_is_gone_raises_nothing():
    server = Server()
    server.is_gone = True
    assert not server.client.send([HINT])
