"""Conservation laws, checked after every cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # whoever raises the error need not know them
    from vllm.v1.core.sched.scheduler import Scheduler

    from ttlcache_connector.connector import TTLConnector
    from ttlcache_sim.load.workload import Workload
    from ttlcache_sim.recorder import Recorder


class SimulationError(RuntimeError):
    """A cell that cannot go on, or broke a conservation law."""


def check(
    workload: Workload,
    recorder: Recorder,
    scheduler: Scheduler,
    connector: TTLConnector | None,
) -> None:
    """All programs finished, tokens in = tokens out, no block leaked, no fault.

    Releases all pins.

    Raises:
        SimulationError: naming every law that is broken.
    """
    broken = [*_check_turns(workload, recorder), *_check_engine(scheduler, connector)]
    if broken:
        raise SimulationError("; ".join(broken))


def _check_engine(scheduler: Scheduler, connector: TTLConnector | None) -> list[str]:
    """Laws of one engine that has nothing left to do. Releases all pins."""
    broken = []
    if connector is not None and connector.scheduler_role is not None:
        connector.scheduler_role.teardown.release_all()
        faults = connector.scheduler_role.parts.faults.total
        if faults:
            broken.append(f"{faults} exceptions in the connector's hooks")
    if scheduler.requests:
        broken.append(f"{len(scheduler.requests)} requests are left in the engine")
    pool = scheduler.kv_cache_manager.block_pool
    free, usable = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
    if free != usable:
        broken.append(f"{usable - free} of {usable} blocks leaked")
    return broken


def _check_turns(workload: Workload, recorder: Recorder) -> list[str]:
    """Every turn of every program finished once, with the tokens it should have."""
    broken = []
    expected = {
        (program.program_id, index): turn
        for program in workload.programs
        for index, turn in enumerate(program.turns)
    }
    seen = {(turn.program_id, turn.turn): turn for turn in recorder.turns}
    if len(seen) != len(recorder.turns):
        broken.append(f"{len(recorder.turns) - len(seen)} turns finished twice")
    if seen.keys() != expected.keys():
        broken.append(f"{len(expected.keys() - seen.keys())} turns never finished")
        return broken
    context: dict[str, int] = {}
    for key in sorted(expected):
        want, got = expected[key], seen[key]
        before = context.get(key[0], 0)
        if got.prompt_tokens != before + want.new_prompt_tokens:
            broken.append(f"turn {key}: prompt of {got.prompt_tokens} tokens")
        if len(got.output_token_ids) != want.output_tokens:
            broken.append(f"turn {key}: {len(got.output_token_ids)} output tokens")
        context[key[0]] = got.context_tokens
    return broken
