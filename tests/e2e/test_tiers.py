"""A vLLM server above LMCache: GPU, CPU memory, disk; deadlines; other weights.

Chunks are one block of 32 tokens, so that no tail is lost.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

from bench.serve.server import by_label
from bench.serve.tier_server import TierServer
from bench.serve.tiny_model import build
from tests.e2e.above_tier import AboveTier, serving
from tests.e2e.loads import BLOCK, KEPT, PROGRAMS, tool_result
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = pytest.mark.e2e

CHUNKS = KEPT // BLOCK


@pytest.fixture(scope="module")
def tiered(vanilla, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiers")
    options = TierOptions(
        cpu_gb=0.25,
        disk=folder / "disk",
        disk_gb=1.0,
        chunk_tokens=BLOCK,
        retention=True,
    )
    with TierServer(options, folder / "lmcache.log") as tiers:
        with serving(tiny_model, folder / "vllm.log", 700, {}, tiers=tiers) as agent:
            yield agent
        assert tiers.status()["ttlcache"]["errors"] == {}


def test_outputs_are_those_of_a_run_without_any_cache(tiered, vanilla):
    """Of 50 programs a third return late: to CPU memory, then to the disk."""
    expected = vanilla["uncached"]
    reloads = tiered.reloads()
    claimed = tiered.pins("claimed")
    later = list(range(0, PROGRAMS, 3))
    at_once = [index for index in range(PROGRAMS) if index not in later]

    def second(index: int) -> dict[str, Any]:
        return tiered.second(firsts[index], index, "same")

    with ThreadPoolExecutor(8) as pool:
        firsts = list(pool.map(lambda i: tiered.first(i, "same"), range(PROGRAMS)))
        answers = dict(zip(at_once, pool.map(second, at_once), strict=True))
        assert tiered.pins("claimed") == claimed + len(at_once)
        tiered.empty_gpu()
        half = len(later) // 2
        answers.update(zip(later[:half], pool.map(second, later[:half]), strict=True))
        assert tiered.tiers.clear_cpu()
        answers.update(zip(later[half:], pool.map(second, later[half:]), strict=True))
    for index in range(PROGRAMS):
        assert firsts[index]["token_ids"] == expected[index][0]
        assert answers[index]["token_ids"] == expected[index][1]
    assert [answers[i]["cached_tokens"] for i in later] == [KEPT] * len(later)
    wanted = reloads + len(later)
    assert tiered.reaches(lambda: tiered.reloads() == wanted)
    assert tiered.count("ttlcache_tier_bytes_total") > 0  # by our own copier


def test_flipped_bytes_on_disk_are_misses(tiered, vanilla):
    """4 KiB in every file, as a controller would: no wrong token, counted, one line."""
    contexts = range(0, PROGRAMS, 10)

    def corrupt() -> float:
        faults = "lmcache_mp_ttlcache_disk_faults_total"
        return by_label(tiered.tiers.metrics(), faults, "kind").get("corrupt", 0.0)

    firsts = {index: tiered.first(index, f"flipped-{index}") for index in contexts}
    for index in contexts:
        heard(tiered, f"flipped-{index}")
    tiered.empty_gpu()
    assert tiered.tiers.clear_cpu()
    disk: Path = tiered.tiers.options.disk
    files = {path for path in disk.rglob("*") if path.is_file()}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    folders = {disk, *(path.parent for path in files)}
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    for path in files:
        flip(path)
    before, reloads = corrupt(), tiered.reloads()
    for index in contexts:
        second = tiered.second(firsts[index], index, f"flipped-{index}")
        assert second["token_ids"] == vanilla["uncached"][index][1]
        assert second["cached_tokens"] == 0
    assert corrupt() - before == len(contexts) * CHUNKS
    assert tiered.reloads() == reloads
    assert tiered.tiers.log().count("a file is not what was written") == 1


def flip(path: Path, size: int = 4096) -> None:
    """Invert `size` bytes in the middle of a file."""
    with path.open("r+b") as file:
        middle = max(0, path.stat().st_size - size) // 2
        file.seek(middle)
        data = file.read(size)
        file.seek(middle)
        file.write(bytes(255 - byte for byte in data))


def heard(tiered: AboveTier, name: str) -> dict[str, Any]:
    """What the server says of a turn, once it knows all of its chunks."""
    found: dict[str, Any] = {}

    def is_there() -> bool:
        for turn in tiered.tiers.status()["ttlcache"]["recent_turns"]:
            if f"request-{name}-" in turn["request_id"]:
                found.update(turn)
        return found.get("chunks", 0) >= CHUNKS

    assert tiered.reaches(is_there), found
    return found


def test_the_server_below_is_told_clients_ttls_and_ends(tiered):
    """`serve-tiers --retention`: they decide what leaves CPU memory."""
    tiered.first(1, "policy")
    tiered.first(2, "wish", ttl="200s")
    tiered.first(3, "done", is_last_step=True)
    policy, wish, done = (heard(tiered, name) for name in ("policy", "wish", "done"))
    assert (policy["ttl_s"], policy["is_told"]) == (0.0, False)
    assert (wish["ttl_s"], wish["is_told"]) == (200.0, True)
    assert wish["is_kept"]
    assert 0.0 < wish["left_s"] <= 200.0
    assert done["is_finished"]
    assert not done["is_kept"]

    tiered.post("/ttlcache/programs/wish-2/end", cache_salt="wish")
    assert tiered.reaches(lambda: heard(tiered, "wish")["is_finished"])


def test_a_claimed_turn_renews_its_programs_deadline(tiered):
    """Its KV is in GPU memory: it looks nothing up, and only the hint tells."""
    first = tiered.first(4, "grows", ttl="150s")
    heard(tiered, "grows")
    claimed = tiered.pins("claimed")
    programs = tiered.tiers.status()["ttlcache"]["programs"]
    tiered.ask(
        [*first["context"], *tool_result(4)],
        hints={"program_id": "grows-4", "tool": "bash", "ttl": "250s"},
        headers={"X-Request-Id": "request-longer-4"},
        cache_salt="grows",
    )
    assert tiered.pins("claimed") == claimed + 1
    longer = heard(tiered, "longer")
    assert longer["ttl_s"] == 250.0
    assert longer["chunks"] > CHUNKS
    assert heard(tiered, "grows")["left_s"] > 150.0, "one program, one deadline"
    assert tiered.tiers.status()["ttlcache"]["programs"] == programs


def is_computed_anew(tiered: AboveTier, first: dict[str, Any], name: str) -> list[int]:
    """The tokens of the next turn, for which nothing was found."""
    second = tiered.second(first, 5, name)
    assert second["cached_tokens"] == 0
    tokens: list[int] = second["token_ids"]
    return tokens


@pytest.mark.parametrize("reset", ["reset_prefix_cache?reset_external=true", "sleep"])
def test_ways_to_say_that_all_kv_is_worthless(tiered, reset):
    """The reset that trainers call themselves, and the one that sleep implies."""
    way, ended = reset.partition("?")[0], tiered.pins("reset")
    first = tiered.first(5, f"before-{way}")
    heard(tiered, f"before-{way}")
    # It fails while a copy of the turn holds memory, and says so.
    assert tiered.reaches(lambda: tiered.post(f"/{reset}").get("success", True))
    if way == "sleep":
        tiered.post("/wake_up")
    tiered.settle()
    assert tiered.count("ttlcache_pins_active") == 0
    names = (f"before-{way}", f"fresh-{way}")
    again, fresh = (is_computed_anew(tiered, first, name) for name in names)
    assert again == fresh
    assert tiered.pins("reset") > ended


def test_after_a_weight_update_no_kv_of_the_old_weights_is_used(
    tiered, tiny_model, tmp_path
):
    """vLLM's RL flow: pause, other weights, resume."""
    below = tiered.first(5, "below")
    heard(tiered, "below")
    tiered.empty_gpu()
    assert tiered.tiers.clear_cpu()  # on disk
    pinned = tiered.first(5, "pinned")
    assert pinned["token_ids"] == below["token_ids"]
    assert tiered.count("ttlcache_pins_active") == 1

    new_weights = build(tmp_path / "new", seed=1)
    for update, weights in enumerate((new_weights, tiny_model)):
        before, reloads = tiered.first(5, "pinned"), tiered.reloads()
        tiered.load_weights(weights)
        turns = [is_computed_anew(tiered, before, n) for n in ("below", "pinned")]
        assert turns == [is_computed_anew(tiered, before, f"fresh-{update}")] * 2
        assert tiered.reloads() == reloads
        # These are other weights, or all of this says nothing.
        now = tiered.first(5, f"other-{update}")["token_ids"]
        assert (now == pinned["token_ids"]) == (weights == tiny_model)
