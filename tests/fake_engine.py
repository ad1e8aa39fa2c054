"""A serving engine in miniature that drives a `Controller`: no torch, no model.

    engine = FakeEngine({"policy": "fixed"}, pool_blocks=8)
    context = engine.turn("r1", [1, 2, 3, 4, 5], [6, 7], program="A")
    engine.step(seconds=1.0)
    engine.turn("r2", [*context, 8, 9], program="A")  # claims the pin of r1
    engine.check()

Blocks are small integers with reference counts; a full block is found again by its
chained hash for as long as nobody reuses it, as in vLLM's block pool.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fake_holder import FakeHolder
from ttlcache.clock import VirtualClock
from ttlcache.config import load_config
from ttlcache.controller import Controller
from ttlcache.programs.hints import parse_hints
from ttlcache.programs.model import MAX_AWAITED_TURNS, RequestRecord
from ttlcache.telemetry.events import Telemetry
from ttlcache.types import Arrival, Finish, Finished, GapKey, Urgency


def chain_hashes(
    tokens: Sequence[int], block_tokens: int, tenant: str = ""
) -> list[bytes]:
    """Hashes of the full blocks of `tokens`; each covers all tokens before it."""
    hashes: list[bytes] = []
    parent = tenant.encode()
    for stop in range(block_tokens, len(tokens) + 1, block_tokens):
        text = repr(list(tokens[stop - block_tokens : stop])).encode()
        parent = hashlib.sha256(parent + b"|" + text).digest()
        hashes.append(parent)
    return hashes


@dataclass(slots=True, eq=False)
class FakeRequest:
    """A request that arrived and has neither finished nor been aborted."""

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    tenant: str
    blocks: list[int] = field(default_factory=list)
    running: bool = False


class FakeEngine:
    """Requests in, pins out: `arrive`, `admit`, `finish` or `abort`, `step`.

    `requests` holds the requests in flight, `rekeyed` the ids whose priority the
    controller said has changed, `next_gap` what reading the output will tell.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        pool_blocks: int = 64,
        block_tokens: int = 4,
        clock: VirtualClock | None = None,
        whole_pins: bool = False,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.clock = clock if clock is not None else VirtualClock()
        self.block_tokens = block_tokens
        self.holder = FakeHolder(pool_blocks, block_tokens, whole_pins=whole_pins)
        self.rekeyed: list[str] = []
        self.requests: dict[str, FakeRequest] = {}
        self.next_gap: GapKey | None = GapKey("tool")
        self.controller = Controller(
            load_config(config),
            self.clock,
            self.holder,
            block_tokens,
            on_rekey=self.rekeyed.append,
            telemetry=telemetry,
        )

    def arrive(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        program: str | None = None,
        tenant: str = "",
        session: str | None = None,
        user_priority: int = 0,
        **hints: object,
    ) -> RequestRecord:
        """A request enters the queue; `hints` as in `kv_transfer_params`."""
        own = hints if program is None else {"program_id": program, **hints}
        request = FakeRequest(request_id, list(prompt), len(prompt), tenant)
        self.requests[request_id] = request
        self._count_queue()
        return self.controller.on_arrival(
            Arrival(
                request_id=request_id,
                num_tokens=len(prompt),
                hashes=chain_hashes(prompt, self.block_tokens, tenant),
                tokens=lambda start, stop: request.tokens[start:stop],
                hints=parse_hints({"ttlcache": own} if own else None),
                tenant=tenant,
                session_id=session,
                user_priority=user_priority,
            )
        )

    def admit(self, request_id: str, urgency: Urgency | None = None) -> bool:
        """Give the request its blocks, pins giving way; False if it must wait."""
        request = self.requests[request_id]
        hashes = chain_hashes(request.tokens, self.block_tokens, request.tenant)
        # The last token is always computed, so that there is something to sample.
        usable = hashes[: (len(request.tokens) - 1) // self.block_tokens]
        if urgency is None:
            urgency = Urgency.WAITING if self.holder.num_running else Urgency.STALLED
        needed = self._blocks_for(len(request.tokens))
        if urgency is Urgency.WAITING:
            new = needed - len(self.holder.find(usable))
            if not self.controller.memory.may_start(request_id, new):
                return False
        while True:
            cached = self.holder.find(usable)
            unreferenced = sum(1 for b in cached if not self.holder.references[b])
            lacking = needed - len(cached) + unreferenced - self.holder.free_blocks
            if lacking <= 0:
                break
            if urgency is not Urgency.STALLED:
                self.holder.memory_is_short = True
                lacking -= self.controller.memory.redecide_under_pressure()
            if lacking > 0 and not self.controller.memory.reclaim(
                lacking, urgency, request_id
            ):
                return False
        self.holder.take(cached)
        request.blocks = cached + self.holder.take_new(needed - len(cached))
        self.holder.name(request.blocks[: len(hashes)], hashes)
        request.running = True
        self._count_queue()
        self.controller.on_allocated(request_id, len(cached) * self.block_tokens)
        return True

    def preempt(self, request_id: str) -> None:
        """A running request gives its blocks back and waits again."""
        request = self.requests[request_id]
        self.holder.drop(request.blocks)
        request.blocks, request.running = [], False
        self._count_queue()

    def decode(self, request_id: str, output: Sequence[int]) -> bool:
        """Append sampled tokens; False, and preempted, if no memory is left."""
        request = self.requests[request_id]
        total = len(request.tokens) + len(output)
        lacking = self._blocks_for(total) - len(request.blocks)
        while lacking > self.holder.free_blocks:
            missing = lacking - self.holder.free_blocks
            if not self.controller.memory.reclaim(missing, Urgency.RUNNING, request_id):
                self.preempt(request_id)
                return False
        request.blocks += self.holder.take_new(max(0, lacking))
        request.tokens += output
        if output:
            self.controller.on_prefilled(request_id)
        return True

    def finish(self, request_id: str) -> Finished:
        """The request completes; a pin takes its references before it frees."""
        return self._leave(request_id, completed=True)

    def abort(self, request_id: str) -> Finished:
        """The client went away, whatever the request was doing."""
        return self._leave(request_id, completed=False)

    def turn(
        self,
        request_id: str,
        prompt: Sequence[int],
        output: Sequence[int] = (1, 1),
        **identity: Any,
    ) -> list[int]:
        """One request from arrival to finish; its prompt and output."""
        self.arrive(request_id, prompt, **identity)
        assert self.admit(request_id), f"{request_id}: prompt does not fit"
        assert self.decode(request_id, output), f"{request_id}: output does not fit"
        self.finish(request_id)
        return [*prompt, *output]

    def step(self, seconds: float = 0.0) -> None:
        """Let time pass, then do what the engine does before each step."""
        self.clock.advance(seconds)
        self.holder.memory_is_short = False
        self.controller.tick()

    def check(self) -> None:
        """Assert every invariant that the tables and the pool share."""
        _check_references(self)
        _check_orders(self.controller)
        _check_claims(self.controller)
        _check_programs(self.controller)

    def _leave(self, request_id: str, *, completed: bool) -> Finished:
        request = self.requests.pop(request_id)
        hashes = chain_hashes(request.tokens, self.block_tokens, request.tenant)
        # The KV of the token sampled last was never computed.
        num_full = max(0, len(request.tokens) - 1) // self.block_tokens
        blocks = request.blocks[:num_full] if completed else []
        self.holder.name(blocks, hashes[: len(blocks)])

        def count_unpinned(count: int) -> int:
            pinned = self.holder.pinned_blocks()
            return sum(1 for block in blocks[:count] if block not in pinned)

        def count_pins(count: int) -> int:
            pins = self.holder.blocks_by_pin.values()
            return sum(blocks[count - 1] in pinned for pinned in pins)

        finished = self.controller.on_finished(
            Finish(
                request_id=request_id,
                completed=completed,
                num_tokens=len(request.tokens),
                prompt_tokens=request.prompt_tokens,
                hashes=hashes,
                tokens=lambda start, stop: request.tokens[start:stop],
                kv_blocks=len(blocks),
                kv_tokens=len(blocks) * self.block_tokens,
                count_unpinned=count_unpinned,
                count_pins=count_pins,
                divisible=not self.holder.whole_pins,
                read_tool=lambda: self.next_gap,
            )
        )
        order = finished.order
        if order is not None:
            self.holder.hold(order.pin_id, blocks[: order.kv_blocks])
        self.holder.drop(request.blocks)
        self._count_queue()
        return finished

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _count_queue(self) -> None:
        self.holder.num_running = sum(r.running for r in self.requests.values())
        self.holder.num_waiting = len(self.requests) - self.holder.num_running


def _check_references(engine: FakeEngine) -> None:
    holder, pins = engine.holder, engine.controller.pins
    expected: Counter[int] = Counter()
    for request in engine.requests.values():
        expected.update(request.blocks)
    for blocks in holder.blocks_by_pin.values():
        expected.update(blocks)
    assert holder.references == expected, "references without an owner, or missing"
    assert holder.free_blocks == holder.pool_blocks - len(expected)
    held = {pin_id: len(blocks) for pin_id, blocks in holder.blocks_by_pin.items()}
    if engine.controller.config.observes:
        assert not held
        return
    assert held == {pin.pin_id: pin.kv_blocks for pin in pins}
    assert pins.kv_blocks == sum(held.values())


def _check_orders(controller: Controller) -> None:
    pins = list(controller.pins)
    victims = list(controller.pins.in_eviction_order())
    assert len(victims) == len(pins)
    assert set(victims) == set(pins)
    assert [pin.has_claimant for pin in victims] == sorted(
        pin.has_claimant for pin in pins
    )
    marked = {pin.pin_id for pin in pins if pin.uncontended}
    assert set(controller.pins._uncontended) == marked
    due = controller.pins.expired(math.inf)
    assert set(due) == {pin for pin in pins if not pin.has_claimant}
    deadlines = [pin.deadline_s for pin in due]
    assert deadlines == sorted(deadlines)
    assert controller.pins.next_deadline_s() == (deadlines[0] if due else None)


def _check_claims(controller: Controller) -> None:
    claims = {
        (record.pin_id, request_id)
        for request_id, record in controller.requests.items()
        if controller.pins.get(record.pin_id) is not None
    }
    held = {(pin.pin_id, rid) for pin in controller.pins for rid in pin.claimants}
    assert held == claims, "a pin is held by a request that will not claim it"


def _check_programs(controller: Controller) -> None:
    in_flight = Counter(id(r.program) for r in controller.requests.values())
    for program in controller.programs:
        assert not program.ended
        assert program.live_requests == in_flight[id(program)]
        pins = [controller.pins.get(turn.pin_id) for turn in program.awaited_turns]
        assert (
            sum(pin is None or not pin.has_claimant for pin in pins)
            <= MAX_AWAITED_TURNS
        )
    for pin in controller.pins:
        assert pin.turn.pin_id == pin.pin_id
        if not pin.has_claimant:
            assert controller.programs.get(pin.program.key) is pin.program
            assert pin.turn in pin.program.awaited_turns
