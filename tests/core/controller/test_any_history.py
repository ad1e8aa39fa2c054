"""Whatever happens, the books add up."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.core.stories import TTL_S, make_engine
from ttlcache.types import Urgency

LABELS = st.sampled_from(["A", "B", "C", None])
TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=12)
CUTS = st.sampled_from([0, 0, 0, 1, 3, 8])
HINTS = st.sampled_from(
    [
        {},
        {},
        {"priority_class": 2},
        {"ttl": 1},
        {"tool": "Task"},
        {"parent_id": "A"},
        {"parent_id": "B", "tool": "Task"},
        {"ttl": -1},
        {"is_last_step": True},
    ]
)
JUMPS = st.sampled_from([0.0, 0.5, 3.0, TTL_S, 45.0, -0.5, -30.0])
ENGINES = st.fixed_dictionaries(
    {
        "pool_blocks": st.integers(4, 60),
        "block_tokens": st.sampled_from([1, 2, 4]),
        "max_pinned_fraction": st.sampled_from([0.9, 0.3, 0.0, 1.0]),
        "whole_pins": st.sampled_from([False, False, True]),
    }
)
ORDERS = st.sampled_from(
    [
        ("ttl-aware", "none"),
        ("program-fcfs", "none"),
        ("request-fcfs", "none"),
        ("ttl-aware", "room-to-grow"),
        ("program-fcfs", "room-to-grow"),
    ]
)


class AnyHistory(RuleBasedStateMachine):
    """Programs in any order of events; the engine's invariants hold after each."""

    @initialize(made=ENGINES, order=ORDERS, max_programs=st.sampled_from([100, 2]))
    def start(self, made, order, max_programs):
        words = dict(zip(("ordering", "admission"), order, strict=True))
        self.engine = make_engine(**made, **words, program_idle_s=40.0)
        self.engine.controller.programs.max_programs = max_programs
        self.contexts = {}
        self.made = 0

    def waiting(self):
        return sorted(r for r, q in self.engine.requests.items() if not q.running)

    def running(self):
        return sorted(r for r, q in self.engine.requests.items() if q.running)

    def pick(self, data, ids):
        return data.draw(st.sampled_from(ids))

    @rule(label=LABELS, cut=CUTS, more=TOKENS, hints=HINTS)
    def arrive(self, label, cut, more, hints):
        self.new_request(label, cut, more, hints)

    def new_request(self, label, cut, more, hints):
        # The prompt extends the program's context, or what a cut leaves of it.
        context = self.contexts.get(label, [1, 2, 3, 1, 2, 3])
        prompt = [*context[: len(context) - cut], *more][:60]
        self.made += 1
        request_id = f"r{self.made}"
        self.engine.arrive(request_id, prompt, program=label, **hints)
        return request_id, prompt

    @rule(label=LABELS, cut=CUTS, more=TOKENS, hints=HINTS, output=TOKENS)
    def whole_turn(self, label, cut, more, hints, output):
        request_id, prompt = self.new_request(label, cut, more, hints)
        if self.engine.admit(request_id) and self.engine.decode(request_id, output):
            self.engine.finish(request_id)
            self.contexts[label] = [*prompt, *output]

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), label=LABELS)
    def reuse_an_id(self, data, label):
        request_id = self.pick(data, sorted(self.engine.requests))
        self.engine.holder.drop(self.engine.requests[request_id].blocks)
        self.engine.arrive(request_id, [1, 2, 3, 1], program=label)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), urgency=st.sampled_from([None, *Urgency]))
    def admit(self, data, urgency):
        request_id = self.pick(data, self.waiting())
        alone = not self.running()
        admitted = self.engine.admit(request_id, urgency)
        request = self.engine.requests[request_id]
        needed = -(-len(request.tokens) // self.engine.block_tokens)
        fits = needed <= self.engine.holder.pool_blocks
        if alone and fits and urgency in (None, Urgency.STALLED):
            assert admitted, "wedged: nothing runs and pins hold the pool"

    @precondition(lambda self: self.running())
    @rule(data=st.data(), output=TOKENS)
    def decode(self, data, output):
        self.engine.decode(self.pick(data, self.running()), output)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def preempt(self, data):
        self.engine.preempt(self.pick(data, self.running()))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data):
        request_id = self.pick(data, self.running())
        label = self.engine.controller.requests[request_id].hints.program_id
        self.contexts[label] = self.engine.requests[request_id].tokens
        self.engine.finish(request_id)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(self.pick(data, sorted(self.engine.requests)))

    @rule(seconds=JUMPS)
    def step(self, seconds):
        self.engine.step(seconds)
        now_s = self.engine.clock.now_s()
        assert all(p.has_claimant or p.deadline_s > now_s for p in self.engine.pins())

    @rule(needed=st.integers(-1, 50), urgency=st.sampled_from(Urgency), data=st.data())
    def reclaim(self, needed, urgency, data):
        request_id = self.pick(data, ["unknown", *sorted(self.engine.requests)])
        before = self.engine.holder.free_blocks
        freed = self.engine.controller.memory.reclaim(needed, urgency, request_id)
        assert self.engine.holder.free_blocks == before + freed
        if urgency is Urgency.STALLED and freed < needed:
            assert not self.engine.pins()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), blocks=st.integers(0, 50))
    def ask_for_admission(self, data, blocks):
        request_id = self.pick(data, sorted(self.engine.requests))
        may_start = self.engine.controller.memory.may_start(request_id, blocks)
        if self.engine.controller.requests[request_id].admitted_s is not None:
            assert may_start, "a started request was held back"

    @rule(label=LABELS)
    def end(self, label):
        self.engine.end(label or "nobody")

    @rule(tier=st.sampled_from([None, "cpu"]))
    def tier_comes_or_goes(self, tier):
        self.engine.controller.tier_knowledge.on_reload_source(tier)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), chunk_tokens=st.integers(1, 8))
    def ask_below(self, data, chunk_tokens):
        request_id = self.pick(data, self.waiting())
        self.engine.controller.tier_knowledge.on_lookup(request_id, chunk_tokens)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def reload(self, data, tokens):
        request_id = self.pick(data, self.running())
        controller = self.engine.controller
        controller.tier_knowledge.on_load_finished(request_id, tokens, 0.25)
        assert 0.0 <= controller.costs.kept_share <= 1.0

    @rule()
    def reset(self):
        self.engine.controller.memory.release_all()
        assert not self.engine.pins()

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "engine"):
            return
        controller = self.engine.controller
        self.engine.check()
        for request_id in controller.requests:
            controller.queue.priority(request_id)
        ended = sum(self.engine.outcomes().values())
        assert self.engine.total("pins_started") == ended + len(controller.pins)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine, controller = self.engine, self.engine.controller
        for request_id in sorted(engine.requests):
            engine.abort(request_id)
        assert controller.requests == {}
        for program in list(controller.programs):
            if not isinstance(program.key, int):
                controller.end_program(*program.key)
        # Nobody ends those without an id: they go idle.
        engine.step(seconds=1000.0)
        engine.step(seconds=1000.0)
        engine.check()
        assert len(controller.programs) == 0
        assert len(controller.pins) == 0
        assert len(controller.gaps._open) == 0
        assert engine.holder.free_blocks == engine.holder.pool_blocks
        assert controller.admission.reserved_pool_blocks == 0.0


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
