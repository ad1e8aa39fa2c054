"""Steps of vLLM's real scheduler, as the price of a prefill is learnt from them."""

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.connector.conftest import totals

PROMPT = list(range(1, 1201))  # three steps of at most 512 tokens


@pytest.fixture
def run(make_engine, clock, async_scheduling):
    """Serves requests, each step's results a second after those before it."""

    def run(*requests):
        engine = make_engine(num_blocks=200, async_scheduling=async_scheduling)
        costs, seen = engine.controller.costs, []
        observe = costs.observe_step

        def observed(step, seconds, *, is_ahead):
            seen.append((step, seconds, is_ahead))
            observe(step, seconds, is_ahead=is_ahead)

        costs.observe_step = observed
        engine.worker_says = lambda: clock.advance(1.0)
        for name, prompt, max_tokens in requests:
            engine.add(name, prompt, max_tokens=max_tokens)
        engine.run()
        return engine, seen

    return run


def test_a_prompt_is_computed_in_parts_and_steps_last_from_results_to_results(
    run, async_scheduling
):
    _, seen = run(("r", PROMPT, 4))
    prompts = [list(step.prompts) for step, *_ in seen if step.prompts]
    assert prompts == [[("r", 0, 512)], [("r", 512, 1024)], [("r", 1024, 1200)]]
    decodes = [(step.decodes, step.decode_tokens) for step, *_ in seen if step.decodes]
    assert decodes == [(1, 1)] * 3
    # The results of a step that nothing was scheduled in are there with the last ones.
    steps = [told for told in seen if told[0].prompts or told[0].decodes]
    assert [seconds for _, seconds, _ in steps] == [1.0] * 6
    assert [ahead for *_, ahead in steps] == [False] + [async_scheduling] * 5


def test_a_claimed_turn_beside_another_s_chunk(run):
    engine, _ = run(("a", PROMPT[:170], 4))
    seen = []
    engine.controller.on_step = seen.append
    engine.add("b", [*range(5_000, 6_000)], max_tokens=1)
    engine.add("a2", PROMPT[:200], max_tokens=1)
    engine.run()
    parts = [part for step in seen for part in step.prompts]
    assert ("a2", 160, 200) in parts
    assert sum(after - before for name, before, after in parts if name == "b") == 1_000


def test_what_is_preempted_is_computed_again_as_a_prompt(make_engine, clock):
    engine = make_engine(num_blocks=40)
    engine.worker_says = lambda: clock.advance(1.0)
    seen = []
    engine.controller.on_step = seen.append
    for name in "ab":
        engine.add(name, [ord(name) * 1_000 + i for i in range(280)], max_tokens=120)
    engine.run()
    again = [part for step in seen for part in step.prompts if part[2] > 280]
    assert again, "nothing was preempted"
    assert all(after - before > 1 for _, before, after in again)
    assert all(step.decodes <= 2 for step in seen)


@pytest.mark.parametrize(("stood", "turn_s"), [(True, 5.0), (False, 155.0)])
def test_a_pause_is_neither_service_nor_waiting(make_engine, clock, stood, turn_s):
    extra = {"max_queue_wait_s": 10.0}
    engine = make_engine(num_blocks=40, max_num_seqs=1, extra_config=extra)
    engine.worker_says = lambda: clock.advance(1.0)
    for name in "ab":
        engine.add(name, PROMPT[:40], max_tokens=5)
    engine.step()
    state = PauseState.PAUSED_ALL if stood else PauseState.PAUSED_NEW
    engine.scheduler.set_pause_state(state)
    clock.advance(300.0)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    queue = engine.controller.queue
    assert queue.quantum.turn_seconds.value == turn_s
    assert queue.wait_bound._wait_s.value == 2.5
    assert "overdue_requests" not in totals(engine)
