"""Stories of programs, told to a controller by a fake engine."""

from collections import Counter

from tests.fake_engine import FakeEngine
from ttlcache.controller import Controller
from ttlcache.estimators.costs import CostModel
from ttlcache.programs.fair_queueing import Place
from ttlcache.programs.model import Program
from ttlcache.types import PinOutcome

TTL_S = 10.0
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # two full blocks of four, and a half
EVENTS = ("arrive", "admit", "preempt", "decode", "finish", "abort", "step")


class Story(FakeEngine):
    """Its invariants hold after every event."""

    def end(self, label, tenant=""):
        known = self.controller.end_program(tenant, label)
        self.check()
        return known

    def reclaim(self, needed, urgency, request_id, **more):
        freed = self.controller.memory.reclaim(needed, urgency, request_id, **more)
        self.check()
        return freed

    def total(self, name, label=""):
        return self.controller.telemetry.metrics.totals[name, label]

    def observed(self, name):
        return self.controller.telemetry.metrics.observations.get(name, [])

    def counted_outcomes(self):
        """What metrics tell of ended pins."""
        totals = self.controller.telemetry.metrics.totals
        return {label: n for (name, label), n in totals.items() if name == "pins"}

    def outcomes(self):
        """How many pins ended how, with those that are not counted yet."""
        ended = Counter(self.counted_outcomes())
        for program in self.controller.programs:
            expired = [turn.has_expired_pin for turn in program.awaited_turns]
            ended[PinOutcome.EXPIRED] += sum(expired)
        return +ended

    def pins(self):
        return list(self.controller.pins)

    def pinned(self):
        """Blocks pinned per program."""
        return {pin.program.program_id: pin.kv_blocks for pin in self.pins()}

    def deadlines(self):
        return {pin.program.program_id: pin.deadline_s for pin in self.pins()}

    def program(self, label):
        return self.controller.programs.get(("", label))

    def order(self, *request_ids):
        """The ids in the order of service."""
        return sorted(request_ids, key=self.controller.queue.priority)


def _checked(name):
    def event(self, *args, **more):
        result = getattr(FakeEngine, name)(self, *args, **more)
        self.check()
        return result

    return event


for _name in EVENTS:
    setattr(Story, _name, _checked(_name))


def make_engine(
    ttl_s=TTL_S, *, pool_blocks=64, block_tokens=4, whole_pins=False, **config
):
    """Every turn is pinned for `ttl_s`, unless `config` names another policy."""
    if "policy" not in config:
        config |= {"policy": "fixed", "policy_options": {"ttl_s": ttl_s}}
    sizes = {"pool_blocks": pool_blocks, "block_tokens": block_tokens}
    return Story(config, **sizes, whole_pins=whole_pins)


def token_engine(ttl_s=60.0, *, pool_blocks=32, max_pinned_fraction=1.0, **config):
    """Blocks of one token; pins may hold all of the pool."""
    config |= {"block_tokens": 1, "max_pinned_fraction": max_pinned_fraction}
    return make_engine(ttl_s, pool_blocks=pool_blocks, **config)


def make_program(number=1, *awaited_turns, **more):
    program = Program(("", f"P{number}"), place=Place(number), **more)
    program.awaited_turns.extend(awaited_turns)
    return program


def with_prefill_cost(engine, token_s=1.0, **more):
    """The engine, with a controller to which a token's prefill takes `token_s`."""
    engine.controller = Controller(
        engine.controller.config,
        engine.clock,
        engine.holder,
        engine.block_tokens,
        costs=CostModel(prefill=[token_s, 0, 0]),
        **more,
    )
    return engine
