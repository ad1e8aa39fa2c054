"""Prompts that do not begin with their program's last context: found, and named."""

from __future__ import annotations

import pytest

from tests.fake_engine import FakeEngine
from ttlcache.analysis.reader import load
from ttlcache.cli.top import divergence_lines
from ttlcache.control import obey
from ttlcache.programs.divergence import Cause
from ttlcache.telemetry.events import Telemetry
from ttlcache.telemetry.recorder import Recorder

SYSTEM = [*range(1000, 1040)]
#: With its hashes kept while it waits, and without.
KEPT, NOT_KEPT = {"policy": "fixed"}, {"policy": "none"}


class Agent:
    """A client under one id, whose history grows by whole turns."""

    def __init__(self, config, **kwargs) -> None:
        self.config = config
        self.engine = FakeEngine(config, pool_blocks=1000, **kwargs)
        self.context = [*SYSTEM, *range(1, 21)]
        self.number = 0

    def output(self, tokens=8):
        """Of the last turn."""
        return [*range(self.number * 100, self.number * 100 + tokens)]

    def turn(self, prompt=None, *, output=8, program="job", **hints):
        """One request; the divergence that was found of it."""
        self.number += 1
        name = f"r{self.number}"
        prompt = self.context if prompt is None else prompt
        record = self.engine.arrive(name, prompt, program=program, **hints)
        assert self.engine.admit(name)
        self.engine.decode(name, self.output(output))
        self.engine.finish(name)
        self.engine.step(seconds=1.0)
        return record.divergence

    def grow(self):
        """The last turn's output and a tool's result are part of the history now."""
        self.context = [*self.context, *self.output(), *range(50, 66)]

    def turns_of_a_changing_head(self, number):
        """Each with a line more than the one before; what was found of them."""
        found = []
        for each in range(number):
            self.context[20:21] = [9000 + each] * (1 + each)
            found.append(self.turn())
            self.grow()
        return found

    @property
    def counted(self):
        totals = self.engine.controller.telemetry.metrics.totals
        items = totals.items()
        return {label: n for (name, label), n in items if name == "turns_diverged"}


@pytest.fixture(params=[KEPT, NOT_KEPT], ids=["pinned", "unpinned"])
def agent(request):
    return Agent(request.param)


def test_a_head_that_changes_each_turn_is_told_from_the_second_time_on(agent):
    found = agent.turns_of_a_changing_head(5)
    assert found[0] is None
    assert [f.cause for f in found[1:]] == [Cause.HEAD] * 4
    assert [f.is_sure for f in found[1:]] == [False, True, True, True]
    # Exactly where hashes are kept, at the mark before it elsewhere.
    assert all(f.at_tokens == 20 for f in found[1:]) or agent.config is NOT_KEPT
    assert all(0 <= f.at_tokens <= 20 < f.context_tokens for f in found[1:])
    assert agent.counted == {"head": 3}


def test_lines_that_are_appended_to_the_head_each_turn_are_the_head():
    """Each fills more than a block, behind all of the system text."""
    agent = Agent(KEPT)
    for each in range(8):
        agent.turn()
        agent.grow()
        place = len(SYSTEM) + 5 * each
        agent.context[place:place] = [9000 + each] * 5
    assert agent.counted == {"head": 6}


def test_a_head_that_differs_in_its_first_token_is_told_too(agent):
    for number in range(4):
        agent.turn([7000 + number, *agent.context])
        agent.grow()
    assert agent.counted == {"head": 2}


# Of more than a turn's growth only kept hashes tell the place.
@pytest.mark.parametrize(("config", "extra"), [(KEPT, 12), (NOT_KEPT, 12), (KEPT, 40)])
def test_an_edited_middle_is_not_the_head(config, extra):
    agent = Agent(config)
    for _ in range(6):
        # What the last user message brought with it is gone in the next turn.
        agent.turn([*agent.context, *range(5000, 5000 + extra)])
        agent.grow()
    assert set(agent.counted) == {"middle"}
    assert agent.counted["middle"] >= 3


def test_a_changed_output_is_told_at_once_and_is_no_early_one(agent):
    for _ in range(3):
        agent.turn(output=16)
        agent.context = [*agent.context, *range(8000, 8012)]  # without its reasoning
    assert agent.counted == {"output": 2}
    assert not agent.engine.controller.programs.get(("", "job")).strayed


def test_compaction_is_a_shortened_history(agent):
    for _ in range(5):
        agent.turn()
        agent.grow()
    agent.context = [*SYSTEM, *range(700, 730)]
    found = agent.turn()
    assert (found.cause, found.is_sure) == (Cause.SHORTENED, True)
    assert agent.counted == {"shortened": 1}
    agent.grow()
    assert agent.turn() is None


@pytest.mark.parametrize("shared", [0, 8], ids=["nothing", "a line"])
def test_side_requests_and_sub_agents_are_no_divergence(agent, shared):
    """Under their parent's id: titles of a few tokens, and an agent that goes on."""
    for number in range(6):
        assert agent.turn() is None
        agent.grow()
        first = 20_000 + 1000 * number
        title = [*SYSTEM[:shared], *range(first, first + 20)]
        assert agent.turn(title) is None
    child = [*SYSTEM[:shared], *range(30_000, 30_050)]
    for number in range(4):
        assert agent.turn(child) is None
        child += [*agent.output(), number]
    assert agent.turn() is None
    assert agent.counted == {}


def test_a_title_first_does_not_make_the_conversation_a_divergence(agent):
    agent.turn([*range(40_000, 40_012)])
    for _ in range(4):
        agent.turn()
        agent.grow()
    assert agent.counted == {}
    # And its head is its own, not the title's.
    agent.turns_of_a_changing_head(4)
    assert agent.counted == {"head": 3}


def test_a_retry_is_no_divergence(agent):
    agent.turn()
    assert agent.turn() is None
    assert agent.turn(agent.context[:-5]) is None
    assert agent.counted == {}


def test_parallel_turns_are_not_compared():
    agent = Agent(KEPT)
    agent.turn()
    agent.engine.arrive("a", [*range(300, 400)], program="job")
    record = agent.engine.arrive("b", [*range(400, 500)], program="job")
    assert record.divergence is None


def test_a_recording_and_a_live_listing_name_the_cause(tmp_path):
    telemetry = Telemetry(recorder=Recorder(tmp_path, {}, run="1-1"))
    agent = Agent(KEPT, telemetry=telemetry)
    agent.turns_of_a_changing_head(4)
    listing = obey(agent.engine.controller, {"do": "programs"}, 0.0)
    (line,) = divergence_lines(listing)
    assert line.startswith("2 turns")
    assert "CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off" in line
    telemetry.close()
    (log,) = load(tmp_path).programs
    assert [turn.divergence is not None for turn in log.turns] == [False, *[True] * 3]
    text = str(log.turns[-1].divergence)
    assert text.startswith("prompt diverged at token 20 of ")
    assert "the head of the prompt changes" in text
