"""Pins above a real LMCache server: GPU, CPU memory, disk, and a server that dies.

Pins last 1.5 s. Chunks are one block of 32 tokens, so that no tail is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bench.serve.server import by_label, total
from bench.serve.tier_server import TierServer
from tests.e2e.conftest import Agent, start_server
from tests.e2e.loads import BLOCK, KEPT, PROGRAMS, first_prompt, tool_result
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = pytest.mark.e2e
T = TypeVar("T")

TTL_S = 1.5
MAX_ATTEMPTS = 5


class Tiered:
    """The two servers and what a client does to them."""

    def __init__(self, agent: Agent, tiers: TierServer) -> None:
        self.agent = agent
        self.tiers = tiers

    def first(
        self, index: int, name: str, *, stays: bool = False, **body: Any
    ) -> dict[str, Any]:
        """A first turn; its pin lasts `TTL_S`, or for as long as the test does."""
        hints = {"program_id": f"{name}-{index}", "tool": "bash"}
        if stays:
            hints["ttl"] = "300s"
        return self.agent.ask(first_prompt(index), hints=hints, **body)

    def second(self, first: dict[str, Any], index: int, name: str, **body: Any) -> Any:
        hints = {"program_id": f"{name}-{index}", "is_last_step": True}
        return self.agent.ask(
            first["context"] + tool_result(index), hints=hints, **body
        )

    def let_expire(self) -> None:
        """All pins expire and are copied down; an idle engine does not step."""
        deadline = time.monotonic() + 120.0
        time.sleep(TTL_S)
        while time.monotonic() < deadline:
            self.agent.settle()
            samples = self.agent.server.metrics()
            if not total(samples, "ttlcache_pins_active") and not total(
                samples, "ttlcache_demoting_blocks"
            ):
                self.agent.settle()
                return
        raise AssertionError("pins did not expire")

    def empty_gpu(self) -> None:
        self.agent.empty_gpu()

    def reloads(self) -> tuple[int, int]:
        """So many from CPU memory, so many from disk; they are told a little later."""
        self.agent.settle()
        found = by_label(self.agent.server.metrics(), "ttlcache_reloads_total", "tier")
        assert not found["unknown"]
        return round(found["cpu"]), round(found["disk"])

    def misses(self) -> float:
        """Outages and failed reloads: a busy machine may have some by itself."""
        failed = self.agent.count("ttlcache_failed_reloads_total")
        return failed + self.agent.count("ttlcache_tier_outages_total")

    def reloads_become(self, cpu: int, disk: int) -> bool:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            if self.reloads() == (cpu, disk):
                return True
            time.sleep(0.1)
        return False


@pytest.fixture(scope="module")
def tiered(
    vanilla: dict[str, Any], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiered]:
    folder = tmp_path_factory.mktemp("tiers")
    options = TierOptions(
        cpu_gb=0.25, disk=folder / "disk", disk_gb=1.0, chunk_tokens=BLOCK
    )
    with TierServer(options, folder / "lmcache.log") as tiers:
        extra = {
            "policy": "fixed",
            "policy_options": {"ttl_s": TTL_S},
            "max_pinned_fraction": 1.0,
            "debug_invariants": True,
            "demote": "on-expiry",  # nobody needs the memory: turns would never go down
            **tiers.options.connector_config(),
        }
        with start_server(
            tiny_model, folder / "vllm.log", extra, num_blocks=700
        ) as server:
            agent = Agent(server)
            yield Tiered(agent, tiers)
            assert agent.count("ttlcache_hook_errors_total") == 0
            agent.empty_gpu()
            agent.settle()
            assert agent.count("ttlcache_free_blocks") == 699
            assert server.errors_in_log() == []
            log = server.log_path.read_text()
            assert log.count("takes no hints") == 1, "it runs without that module"


def undisturbed(tiered: Tiered, attempt: Callable[[int], T]) -> T:
    """What `attempt` saw, once the tier answered in time all the while.

    An answer that takes longer than 2 s is an outage, and a busy machine has some.
    """
    for number in range(MAX_ATTEMPTS):
        before = tiered.misses()
        seen = attempt(number)
        if tiered.misses() == before:
            return seen
    raise AssertionError("the tier is never there for long")


def test_each_tier_gives_back_the_same_bytes(tiered):
    """Equal contexts that share nothing: their salts differ."""

    def attempt(number: int) -> tuple[dict[str, Any], list[float]]:
        salts = {name: f"{name}-{number}" for name in ("gpu", "cpu", "disk")}
        firsts = {
            name: tiered.first(999, salt, stays=name == "gpu", cache_salt=salt)
            for name, salt in salts.items()
        }

        def second(name: str) -> dict[str, Any]:
            return tiered.second(firsts[name], 999, salts[name], cache_salt=salts[name])

        claimed = tiered.agent.pins("claimed")
        cpu, disk = tiered.reloads()
        seconds = {"gpu": second("gpu")}
        came = [tiered.agent.pins("claimed") == claimed + 1]
        came.append(tiered.reloads() == (cpu, disk))
        tiered.let_expire()
        tiered.empty_gpu()
        seconds["cpu"] = second("cpu")
        came.append(tiered.reloads_become(cpu + 1, disk))
        came.append(tiered.tiers.clear_cpu())
        seconds["disk"] = second("disk")
        came.append(tiered.reloads_become(cpu + 1, disk + 1))
        return seconds, came

    seconds, came = undisturbed(tiered, attempt)
    assert came == [True] * 5
    for second in seconds.values():
        assert second["cached_tokens"] == KEPT
        assert second["token_ids"] == seconds["gpu"]["token_ids"]
        logprobs = second["logprobs"]["token_logprobs"]
        assert logprobs == seconds["gpu"]["logprobs"]["token_logprobs"]


def test_outputs_are_those_of_a_run_without_any_cache(tiered, vanilla):
    expected = vanilla["uncached"]
    cpu, disk = tiered.reloads()
    misses = tiered.misses()
    claimed = tiered.agent.pins("claimed")

    later = list(range(0, PROGRAMS, 3))

    def first(index: int) -> dict[str, Any]:
        return tiered.first(index, "same", stays=index not in later)

    def second(index: int) -> dict[str, Any]:
        return tiered.second(firsts[index], index, "same")

    with ThreadPoolExecutor(8) as pool:
        # In reverse, so that the programs that go on at once are the newest.
        firsts = list(pool.map(first, range(PROGRAMS)))
        at_once = [i for i in range(PROGRAMS) if i not in later]
        answers = dict(zip(at_once[::-1], pool.map(second, at_once[::-1]), strict=True))
        tiered.let_expire()
        tiered.empty_gpu()
        half = len(later) // 2
        answers.update(zip(later[:half], pool.map(second, later[:half]), strict=True))
        emptied = tiered.tiers.clear_cpu()
        answers.update(zip(later[half:], pool.map(second, later[half:]), strict=True))
    for index in range(PROGRAMS):
        assert firsts[index]["token_ids"] == expected[index][0]
        assert answers[index]["token_ids"] == expected[index][1]
    if tiered.misses() == misses:  # none of the 2 s answers was late on this machine
        assert emptied
        assert [answers[i]["cached_tokens"] for i in later] == [KEPT] * len(later)
        assert tiered.reloads_become(cpu + half, disk + len(later) - half)
    assert tiered.agent.pins("claimed") == claimed + len(at_once)


def test_turns_past_their_time_stay_until_their_room_is_needed(
    tiered, vanilla, tiny_model, tmp_path
):
    """The default: who comes back late finds the context, above or below."""
    extra = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 0.1},
        "debug_invariants": True,
        **tiered.tiers.options.connector_config(),
    }
    expected = vanilla["uncached"]
    with start_server(tiny_model, tmp_path / "vllm.log", extra, num_blocks=160) as own:
        late = Tiered(Agent(own), tiered.tiers)

        def after(name: str, meanwhile: Callable[[], None]) -> dict[str, Any]:
            first = late.first(7, name, cache_salt=name)
            time.sleep(0.2)
            late.agent.settle()
            assert late.agent.count("ttlcache_lingering_blocks") >= KEPT // BLOCK
            meanwhile()
            second = late.second(first, 7, name, cache_salt=name)
            assert second["token_ids"] == expected[7][1]
            return second

        def big(seed: int) -> None:
            prompt = [5 + (seed * 7 + i * 13) % 2000 for i in range(3000)]
            late.agent.ask(prompt, hints={"is_last_step": True})

        def crowd() -> None:
            with ThreadPoolExecutor(3) as pool:  # each takes more than half
                list(pool.map(big, range(3)))

        def attempt(number: int) -> list[float]:
            moved = late.agent.count(*DEMOTED)
            cached = [after(f"stays-{number}", lambda: None)["cached_tokens"]]
            cached.append(late.agent.count(*DEMOTED) - moved)
            cpu, disk = late.reloads()
            cached.append(after(f"goes-{number}", crowd)["cached_tokens"])
            assert late.reloads_become(cpu + 1, disk)
            return cached

        assert undisturbed(late, attempt) == [KEPT, 0, KEPT]
        assert late.agent.count(*DEMOTED) > 0
        assert own.errors_in_log() == []


def test_what_is_below_is_not_written_again(tiered):
    """Turn by turn only the new chunks are copied down."""

    def attempt(number: int) -> list[float]:
        salt = f"grows-{number}"
        context = tiered.first(500, salt, cache_salt=salt)["context"]
        hints = {"program_id": f"{salt}-500", "tool": "bash"}
        moved = []
        for turn in range(3):
            before = tiered.agent.count(*DEMOTED)
            tiered.let_expire()
            moved.append(tiered.agent.count(*DEMOTED) - before)
            tiered.empty_gpu()
            prompt = context + tool_result(turn)
            answer = tiered.agent.ask(prompt, hints=hints, cache_salt=salt)
            context = answer["context"]
        tiered.agent.ask([9], max_tokens=1, hints=hints | {"is_last_step": True})
        return moved

    moved = undisturbed(tiered, attempt)
    chunk_bytes = moved[0] / (KEPT // BLOCK)
    # 48 tokens a turn are one block or two.
    assert all(1 <= m / chunk_bytes <= 2 for m in moved[1:])


def test_flipped_bytes_on_disk_are_misses(tiered, vanilla):
    """4 KiB in every file, as a controller would: no wrong token, counted, one line."""
    disk: Path = tiered.tiers.options.disk
    contexts = range(0, PROGRAMS, 10)
    chunks = len(contexts) * (KEPT // BLOCK)

    def corrupt() -> float:
        faults = "lmcache_mp_ttlcache_disk_faults_total"
        return by_label(tiered.tiers.metrics(), faults, "kind")["corrupt"]

    def attempt(number: int) -> list[Any]:
        names = {index: f"flipped-{number}-{index}" for index in contexts}
        firsts = {i: tiered.first(i, n, cache_salt=n) for i, n in names.items()}
        tiered.let_expire()
        emptied = tiered.tiers.clear_cpu()
        tiered.empty_gpu()
        files = {path for path in disk.rglob("*") if path.is_file()}
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        folders = {disk, *(path.parent for path in files)}
        assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
        for path in files:
            flip(path)
        seen, reloads = corrupt(), tiered.reloads()
        cached = []
        for index, name in names.items():
            second = tiered.second(firsts[index], index, name, cache_salt=name)
            assert second["token_ids"] == vanilla["uncached"][index][1]
            cached.append(second["cached_tokens"])
        return [emptied, cached, corrupt() - seen, tiered.reloads() == reloads]

    assert undisturbed(tiered, attempt) == [True, [0] * len(contexts), chunks, True]
    assert tiered.tiers.log().count("a file is not what was written") == 1


def flip(path: Path, size: int = 4096) -> None:
    """Invert `size` bytes in the middle of a file."""
    with path.open("r+b") as file:
        middle = max(0, path.stat().st_size - size) // 2
        file.seek(middle)
        data = file.read(size)
        file.seek(middle)
        file.write(bytes(byte ^ 0xFF for byte in data))


DEMOTED = ("ttlcache_tier_bytes_total", "direction", "demoted")


def test_a_server_that_stops_dies_and_comes_back(tiered, vanilla):
    """100 turns over one outage of each kind; then a full server."""
    expected = vanilla["uncached"]
    log = Path(tiered.agent.server.log_path)
    lines = log.read_text().count("the lower tier does not answer")
    outages = tiered.agent.count("ttlcache_tier_outages_total")
    seconds: list[float] = []

    def turn(index: int, name: str) -> dict[str, Any]:
        began = time.monotonic()
        answer = tiered.first(index % PROGRAMS, name)
        seconds.append(time.monotonic() - began)
        assert answer["token_ids"] == expected[index % PROGRAMS][0]
        return answer

    def load(begin: int, end: int) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: turn(i, f"out{i}"), range(begin, end)))

    load(0, 25)
    usual = max(seconds)
    with ThreadPoolExecutor(1) as other:
        running = other.submit(load, 25, 50)
        tiered.tiers.pause()  # answers nothing, is not gone
        running.result()
        tiered.tiers.resume()
        tiered.empty_gpu()
        running = other.submit(load, 50, 75)
        tiered.tiers.kill()
        running.result()
        load(75, 90)
        tiered.tiers.options = replace(tiered.tiers.options, cpu_gb=0.02, disk=None)
        tiered.tiers.start()
        load(90, 100)
    assert len(seconds) == 100
    # A slow machine is slow without an outage, too.
    assert max(seconds) < 5.0 + 5 * usual
    assert hits_resume(tiered, expected[3][1])
    told = log.read_text().count("the lower tier does not answer") - lines
    assert told == tiered.agent.count("ttlcache_tier_outages_total") - outages >= 1


def hits_resume(tiered: Tiered, expected: list[int]) -> bool:
    """The server came back empty, and evicts once a second while it is full."""
    deadline = time.monotonic() + 90.0
    number = 0
    while time.monotonic() < deadline:
        cpu, disk = tiered.reloads()
        number += 1
        first = tiered.first(3, f"back-{number}")
        tiered.let_expire()
        tiered.empty_gpu()
        second = tiered.second(first, 3, f"back-{number}")
        assert second["token_ids"] == expected
        time.sleep(0.5)
        if tiered.reloads() == (cpu + 1, disk):
            return True
    return False
