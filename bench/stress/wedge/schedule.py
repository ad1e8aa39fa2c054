"""One randomised schedule: programs, branches, aborts, junk, resets, clock jumps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from vllm.lora.request import LoRARequest

from bench.stress.wedge.engine import DrivenEngine, ScheduleFailure
from bench.stress.wedge.spec import RandomEngine, random_engine
from ttlcache.clock import VirtualClock, use_clock

#: Steps after which a schedule whose clients went home must be done.
DRAIN_STEPS = 20_000

ADAPTERS = (LoRARequest("one", 1, "/one"), LoRARequest("two", 2, "/two"))

JUNK: tuple[Any, ...] = (
    {"ttl": -1},
    {"ttl": "soon"},
    {"program_id": "x" * 10_000},
    {"program_id": ["a"]},
    {"is_last_step": 3},
    {"tool": {"deep": [{}]}},
    {"unknown": 1},
    [],
    "text",
)


@dataclass
class Client:
    """One program's client: what it has said so far, and what it waits for."""

    name: str
    context: list[int]
    identified_by: str  # hint, session, or prefix
    salt: str | None = None  # its tenant
    pending: set[str] = field(default_factory=set)
    ended: bool = False


class Schedule:
    """Plays one seed against one engine."""

    driver = DrivenEngine

    def __init__(self, seed: int, length: int = 60) -> None:
        self.rng = random.Random(seed)
        self.length = length
        self.clock = VirtualClock(1000.0)
        self.clients: list[Client] = []
        self.requests = 0
        self.sessions: list[str] = []
        self.shared = [self.rng.randrange(1, 999) for _ in range(40)]

    def run(self) -> int:
        """Play; returns the number of steps.

        Raises:
            ScheduleFailure: a wedge, a leak, a broken invariant.
        """
        self.start(self.draw())
        for _ in range(self.length):
            self._act()
            self.steps(self.rng.choice((0, 1, 1, 2, 5)))
        self.finish()
        return self.engine.steps

    def draw(self) -> RandomEngine:
        return random_engine(self.rng)

    def start(self, spec: RandomEngine) -> None:
        self.spec = spec
        with use_clock(self.clock):
            self.engine = self.driver(spec, self.rng, self.clock)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.clock.advance(self.rng.choice((0.0, 0.01, 0.01, 0.2)))
        self._collect()

    def _act(self) -> None:
        actions = (
            (30, self.next_turn),
            (14, self.new_program),
            (8, self.abort),
            (6, self.retry),
            (6, self.branch),
            (4, self.parallel_samples),
            (4, self.jump),
            (3, self.end),
            (3, self.reset),
            (2, self.rewrite),
            (3, self.stream),
            (0 if self.spec.loads is None else 8, self.pile_up),
        )
        weights = [weight for weight, _ in actions]
        (_, action), *_ = self.rng.choices(actions, weights)
        action()

    def new_program(self) -> None:
        client = self._new_client()
        self._ask(client, client.context)

    def _new_client(self, length: int | None = None) -> Client:
        shared = self.shared[: self.rng.choice((0, 0, 17, 40))] if not length else []
        length = length or self._length()
        own = [self.rng.randrange(1000, 30_000) for _ in range(length)]
        name = f"P{len(self.clients)}"
        kind = self.rng.choice(("hint", "hint", "session", "prefix"))
        salt = self.rng.choice((None, None, "one", "two"))
        client = Client(name, [*shared, *own], kind, salt)
        self.clients.append(client)
        return client

    def next_turn(self) -> None:
        client = self._pick(lambda c: not c.pending)
        if client is None:
            self.new_program()
            return
        new = [self.rng.randrange(1000, 30_000) for _ in range(self._length())]
        self._ask(client, [*client.context, *new])

    def pile_up(self) -> None:
        """An old program's long answer takes what loads under way were promised."""
        for _ in range(40):
            if self.engine.scheduler.has_unfinished_requests():
                self.engine.step()
        self._collect()
        old = self._pick(lambda c: not c.pending) or self._new_client()
        size = self.spec.block_tokens
        small = [self.rng.choice((2, 3)) for _ in range(self.rng.choice((2, 3)))]
        # It ends with a full block: all that it held can be pinned.
        blocks = self.engine.harness.pool.get_num_free_blocks() - sum(small)
        blocks += len(old.context) // size
        max_tokens = blocks * size - len(old.context)
        self._ask(old, [*old.context, 5], max_tokens=max(1, min(200, max_tokens)))
        self.engine.step()
        for count in small:
            client = self._new_client(count * size + 1)
            self._ask(client, client.context)
        for _ in range(200):
            if old.pending <= self.engine.scheduler.requests.keys():
                self.engine.step()

    def retry(self) -> None:
        client = self._pick(lambda c: bool(c.pending))
        if client is not None:
            self._ask(client, client.context)

    def branch(self) -> None:
        client = self._pick(lambda c: True)
        if client is not None:
            cut = self.rng.randrange(len(client.context) + 1)
            self._ask(client, [*client.context[:cut], 7, 8, 9], keep=False)

    def rewrite(self) -> None:
        client = self._pick(lambda c: not c.pending and len(c.context) > 4)
        if client is not None:
            client.context = client.context[: self.rng.randrange(1, 40)]
            self._ask(client, [*client.context, 5, 5])

    def parallel_samples(self) -> None:
        """`n > 1` is several requests with one prompt."""
        client = self._pick(lambda c: not c.pending)
        if client is not None:
            for _ in range(self.rng.choice((2, 3))):
                self._ask(client, client.context, keep=False)

    def stream(self) -> None:
        """A streaming session: chunks of input under one request id."""
        if self.spec.engine.max_num_seqs == 1:
            return  # an idle session would hold the only slot
        if self.spec.drafts:
            return  # vLLM asserts when a session resumes behind its own drafts
        live = self.engine.scheduler.requests
        # An aborted one stays while its load goes on, and no client knows it any more.
        self.sessions = [
            s for s in self.sessions if s in live and not live[s].is_finished()
        ]
        if self.sessions:
            closing = self.rng.random() < 0.4
            self._chunk(self.sessions[0], resumable=not closing)
        else:
            self.requests += 1
            self._chunk(f"stream-{self.requests}", resumable=True)
            self.sessions.append(f"stream-{self.requests}")

    def _chunk(self, request_id: str, *, resumable: bool) -> None:
        known = self.engine.scheduler.requests.get(request_id)
        tokens = self._length() % 20 + 1
        used = 0 if known is None else known.num_tokens + 60
        if used + tokens + 10 > self.spec.capacity_tokens // 2:
            resumable, tokens = False, 1
        if known is None and not resumable:
            return
        self.engine.harness.add(
            request_id, range(50, 50 + tokens), max_tokens=3, resumable=resumable
        )

    def abort(self) -> None:
        live = list(self.engine.scheduler.requests)
        if live:
            self.engine.harness.abort(self.rng.choice(live))

    def jump(self) -> None:
        self.clock.advance(self.rng.choice((-50.0, 1.0, 6.0, 30.0, 1000.0)))

    def end(self) -> None:
        client = self._pick(lambda c: not c.ended)
        if client is not None:
            client.ended = True
            self.engine.role.parts.controller.end_program(
                client.salt or "", client.name
            )

    def reset(self) -> None:
        self.engine.harness.drain()
        # vLLM itself raises when a streaming session or a load keeps its blocks.
        force = self.rng.random() < 0.5 and not self.engine.holds_blocks_waiting()
        self.engine.scheduler.reset_prefix_cache(reset_running_requests=force)

    def _ask(
        self,
        client: Client,
        prompt: list[int],
        *,
        keep: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        max_tokens = max_tokens or self.rng.choice((1, 2, 5, 20))
        room = self.spec.capacity_tokens - max_tokens
        prompt = prompt[: max(1, room)]
        if room < 1:
            return
        self.requests += 1
        request_id = f"{client.name}-{self.requests}"
        if keep:
            client.context = prompt
        client.pending.add(request_id)
        self.engine.harness.add(
            request_id,
            prompt,
            max_tokens=max_tokens,
            session_id=client.name if client.identified_by == "session" else None,
            priority=self.rng.choice((0, 0, -3, 5)),
            lora_request=self._lora(),
            cache_salt=client.salt,
            **self._hints(client),
        )

    def _lora(self) -> LoRARequest | None:
        if not self.spec.has_lora:
            return None
        return self.rng.choice((None, ADAPTERS[0], ADAPTERS[1]))

    def _hints(self, client: Client) -> dict[str, Any]:
        if self.rng.random() < 0.08:
            junk = self.rng.choice(JUNK)
            return {"kv_transfer_params": {"ttlcache": junk}}
        hints: dict[str, Any] = {}
        if client.identified_by == "hint":
            hints["program_id"] = client.name
        if self.rng.random() < 0.5:
            hints["tool"] = self.rng.choice(("bash", "Task", ["a", "b"], "ask_user"))
        if self.rng.random() < 0.1:
            hints["is_last_step"] = True
        if self.rng.random() < 0.15:
            hints["ttl"] = self.rng.choice((0, 1, "5m", 1e9))
        if self.rng.random() < 0.1:
            hints["tool_eta_s"] = self.rng.choice((0.1, 30, 1e6))
        if self.rng.random() < 0.1 and self.clients:
            hints["parent_id"] = self.rng.choice(self.clients).name
        if self.rng.random() < 0.1:
            hints["priority_class"] = self.rng.choice((-5, 0, 9))
        return {"kv_transfer_params": {"ttlcache": hints}} if hints else {}

    def _collect(self) -> None:
        live = self.engine.scheduler.requests
        finished = self.engine.take_finished()
        for client in self.clients:
            for request_id in [r for r in client.pending if r not in live]:
                client.pending.discard(request_id)
                done = finished.get(request_id)
                if done is not None and len(done) > len(client.context):
                    client.context = done

    def finish(self) -> None:
        """All clients go home: everything ends, every block comes back."""
        for session in self.sessions:
            self.engine.harness.abort(session)
        while self.engine.scheduler.has_unfinished_requests():
            self.engine.step()
            self.clock.advance(0.05)
            if self.engine.steps > DRAIN_STEPS:
                raise ScheduleFailure("requests do not end")
        self.engine.harness.drain()
        while self.engine.is_loading:  # for aborted requests, whose blocks wait for it
            self.engine.step()
        controller = self.engine.role.parts.controller
        self.clock.advance(1e10)
        self.engine.step()
        if self.spec.has_cpu_tier:
            self.end_tier()
        self.engine.check()
        pool = self.engine.harness.pool
        free, usable = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
        if free != usable or len(controller.pins):
            raise ScheduleFailure(
                f"leak: {free} of {usable} blocks free, {len(controller.pins)} pins"
            )
        if controller.requests or len(controller.programs):
            raise ScheduleFailure(
                f"leak: {len(controller.requests)} requests, "
                f"{len(controller.programs)} programs remembered"
            )

    def end_tier(self) -> None:
        """Copies end; then a reset leaves nothing in host memory, either."""
        self.engine.role.teardown.release_all()
        while self.engine.is_loading:
            self.engine.step()
        self.engine.step()
        lower = self.engine.role.parts.lower
        lower.tier.reset()
        if lower.tier.fill().used_bytes or not lower.is_up():
            raise ScheduleFailure(f"leak: {lower.tier.fill()} in the CPU tier")

    def _pick(self, wanted: Any) -> Client | None:
        found = [client for client in self.clients if wanted(client)]
        return self.rng.choice(found) if found else None

    def _length(self) -> int:
        return self.rng.choice((1, 3, 10, 30, 80))
