"""A real `lmcache server` with our plugins, and a real client.

The client speaks LMCache's protocol without a model (`bench.lmcache.engine`) and
compares every byte that it gets. One server serves all tests but the
last, and is killed by the one before it.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.serve.lmcache_server import LMCacheOptions, LMCacheServer, ttl_l2_adapter
from bench.serve.server import by_label, total

pytest.importorskip("lmcache", reason="LMCache is an extra")

from bench.lmcache.engine import LMCacheEngine
from tests import waiting
from ttlcache_lmcache.client import HintClient
from ttlcache_lmcache.hints import Hint

pytestmark = pytest.mark.e2e

CHUNK = 32
becomes = partial(waiting.becomes, patience_s=60.0)
connect = partial(LMCacheEngine, chunk_tokens=CHUNK, hidden=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lmcache")


@pytest.fixture(scope="module")
def server(folder):
    options = LMCacheOptions(
        l1_gb=1 / 64,
        chunk_tokens=CHUNK,
        ttl_module={},
        l2_adapter=ttl_l2_adapter(path=str(folder / "kv"), disk_bytes=1 << 28),
    )
    with LMCacheServer(options, folder / "lmcache.log") as running:
        yield running


@pytest.fixture
def engine(server):
    connected = connect(server.url)
    yield connected
    connected.close()


def context(name: str, chunks: int) -> list[int]:
    seed = sum(name.encode()) * 7919
    return [5 + (seed + i * i * 31) % 2000 for i in range(chunks * CHUNK)]


def chunks_of(server: LMCacheServer, engine: LMCacheEngine, share: float) -> int:
    """So many chunks are this share of L1."""
    l1_bytes: int = server.status()["storage_manager"]["l1_usage"][1]
    return int(l1_bytes / engine.chunk_bytes * share)


def stats(server: LMCacheServer) -> dict[str, Any]:
    found: dict[str, Any] = server.status()["ttlcache"]
    assert found["errors"] == {}
    return found


def counts(server: LMCacheServer) -> Counter[str]:
    return Counter(stats(server)["counts"])


def test_turns_are_recognised_and_every_byte_comes_back(server, engine):
    prompt = context("grow", 3)
    assert engine.turn(prompt, context("a", 1)) == 0
    prompt += context("a", 1) + context("result", 2)
    assert engine.turn(prompt, []) == 4 * CHUNK
    assert becomes(lambda: counts(server)["turns_continued"] == 1)


def test_a_salt_keeps_programs_apart_and_stores_alone_make_turns(server, engine):
    before = stats(server)
    salted = connect(server.url, salt="~new")
    assert salted.turn(context("grow", 3), [], request_id="salted-1") == 0
    assert becomes(lambda: stats(server)["programs"] == before["programs"] + 1)
    # A turn that looked nothing up, as one that claims a pin, goes on with it.
    salted.store("salted-2", context("grow", 5), 3 * CHUNK)
    salted.end("salted-2")
    shown = stats(server)["recent_turns"][0]
    assert (shown["request_id"], shown["chunks"]) == ("salted-2", 5)
    assert stats(server)["programs"] == before["programs"] + 1
    # Nothing of it looked like a further turn of the program without a salt.
    assert counts(server)["turns_continued"] == 1
    salted.close()


def test_hints_over_the_rpc_decide(server, engine):
    names = ("untold", "kept", "short", "ended")
    for name in names:
        engine.turn(context(name, 3), [], request_id=name)
    client = HintClient(engine.client)
    hints = [
        Hint(request_id="kept", ttl_s=200.0),
        Hint(request_id="short", ttl_s=0.1),
        Hint(request_id="ended", is_last_step=True),
    ]
    assert client.send(hints)
    assert becomes(lambda: counts(server)["expired"] >= 1)
    turns = {t["request_id"]: t for t in stats(server)["recent_turns"]}
    assert [turns[name]["is_told"] for name in names] == [False, True, True, False]
    assert [turns[name]["is_kept"] for name in names] == [False, True, False, False]
    assert turns["ended"]["is_finished"]
    client.poll()
    assert client.refusal is None


def test_a_malformed_hint_is_refused_and_nothing_else(engine):
    from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

    request = ServerModuleCallRequest(
        method="ttlcache.set_ttl", payload=b'[{"request": "x"}]'
    )
    answer = engine.client.server_module_call(request).result(timeout=60.0)
    assert not answer.success
    assert "request_id" in answer.error
    assert engine.turn(context("grow", 3), []) == 3 * CHUNK


def test_under_pressure_what_expired_goes_and_what_is_kept_stays(server, engine):
    """Eight programs of a fifth of L1 each, after one whose TTL a hint made long: LRU
    would evict that one first."""
    chunks = chunks_of(server, engine, 1 / 5)
    client, first = HintClient(engine.client), context("first", chunks)
    client.send([Hint(request_id="first", ttl_s=250.0)])
    engine.turn(first, [], request_id="first")
    for index in range(8):
        request_id = f"later-{index}"
        client.send([Hint(request_id=request_id, ttl_s=0.0)])
        engine.turn(context(request_id * 3, chunks), [], request_id=request_id)
        time.sleep(0.2)  # LMCache drops stores that find no room; so may we
    assert counts(server)["evicted"] > 4 * chunks
    loads = _loads(server)
    assert engine.turn(first, []) == len(first)
    assert _loads(server) == loads, "it was in L1"
    assert engine.turn(context("later-0" * 3, chunks), []) == len(first)
    assert _loads(server) == loads + chunks, "this one was not"
    samples = server.metrics()
    assert by_label(samples, "lmcache_mp_ttlcache_hook_errors_total", "hook") == {}
    assert total(samples, "lmcache_mp_ttlcache_evicted_total") > 4 * chunks


def test_sigkill_loses_nothing_and_a_file_that_was_cut_off_is_a_miss(
    server, engine, folder
):
    whole, cut = context("whole", 4), context("to-be-cut", 2)
    engine.turn(whole, [])
    assert becomes(lambda: len(_files(folder)) == _adapter(server)["objects"])
    known = _files(folder)
    engine.turn(cut, [])
    assert becomes(lambda: len(_files(folder)) == len(known) + 2)
    for path in _files(folder) - known:
        path.write_bytes(path.read_bytes()[:-100])
    server.kill()
    server.start()
    again = connect(server.url)
    assert _adapter(server)["objects"] == len(known)
    assert again.turn(whole, []) == len(whole)
    assert again.turn(cut, []) == 0
    again.close()


def _files(folder: Path) -> set[Path]:
    return set((folder / "kv").glob("??/*.kv"))


def _adapter(server: LMCacheServer) -> dict[str, Any]:
    (found,) = server.status()["storage_manager"]["l2_adapters"]
    adapter: dict[str, Any] = found
    return adapter


def _loads(server: LMCacheServer) -> int:
    found = Counter(_adapter(server)["counts"])
    return found["disk_hits"]


def test_without_l2_what_takes_turns_stays_and_the_end_makes_room(tmp_path):
    """Three contexts of half of L1 each take turns: last use would lose them all."""
    options = LMCacheOptions(l1_gb=1 / 64, chunk_tokens=CHUNK, ttl_module={})
    with LMCacheServer(options, tmp_path / "lmcache.log") as server:
        engine = connect(server.url)
        chunks = chunks_of(server, engine, 1 / 2)
        prompts = [context(name, chunks) for name in ("a", "b", "c")]
        hits = 0
        for round_ in range(6):
            for prompt in prompts:
                found = engine.turn(prompt, [])
                hits += found if round_ >= 3 else 0
        used, size = server.status()["storage_manager"]["l1_usage"]
        assert used > 0.95 * size, "LMCache alone keeps a fifth of it empty"
        assert hits >= 0.4 * 9 * len(prompts[0])
        assert counts(server)["refused"] > 0

        # A finished program makes room at once, with no look in between.
        client = HintClient(engine.client)
        for number, prompt in enumerate(prompts):
            client.send([Hint(request_id=f"last-{number}", is_last_step=True)])
            engine.turn(prompt, [], request_id=f"last-{number}")
        assert becomes(lambda: counts(server)["programs_finished"] >= 3)
        new = context("new", 2 * chunks)
        engine.turn(new, [])
        assert engine.turn(new, []) >= 0.95 * len(new)
        engine.close()
