"""Real vLLM CPU servers over HTTP, with a tiny model of seeded random weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serve import server as server_module
from bench.serve import tiny_model as tiny_model_module
from bench.serve.server import ServerOptions, VLLMServer, by_label, total
from bench.serve.tiny_model import build
from tests.e2e import loads, mixed_load
from tests.e2e.loads import answers_to_broken, completion, record, two_turns, uncached
from tests.e2e.mixed_load import play
from tests.waiting import becomes
from ttlcache.analysis.reader import load
from ttlcache_connector.engine.requirements import vllm_version
from ttlcache_connector.role.steps import CHECK_INVARIANTS

#: Small enough to be under pressure within seconds; blocks hold 32 tokens.
POOL_BLOCKS = 140
#: TTL of the session's server in seconds. Tests that need a pin to live say so by a
#: wish; no test relies on one turn following the other within a time.
TTL_S = 30.0
#: Anything longer is a hang, on the slowest of machines.
HANG_S = 300.0
ROOT = Path(__file__).parents[2]
CPUINFO = Path("/proc/cpuinfo")
#: A server with /reset_prefix_cache, /sleep and /collective_rpc.
DEV_MODE = {
    "VLLM_SERVER_DEV_MODE": "1",
    CHECK_INVARIANTS: "1",
    # A client must not find its connection closed just as it asks again.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
}
#: Every turn is pinned, for as long as there is (`max_ttl_s`).
HOLD = {
    "policy": "fixed",
    "policy_options": {"ttl_s": 300.0},
    "max_pinned_fraction": 1.0,
}


class Agent:
    """A client: completions on token ids, and the numbers on /metrics."""

    def __init__(self, server: VLLMServer) -> None:
        self.server = server
        # A connection each: on a busy machine the server may close an idle one just
        # when a request is on its way.
        self.http = httpx.Client(
            base_url=server.base_url,
            timeout=HANG_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.recording = Path()

    def ask(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        hints: object = None,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> dict[str, Any]:
        """One turn; the answer's choice with `context` = prompt + output ids."""
        request = completion(prompt, hints, max_tokens) | {"logprobs": 1} | body
        response = self.http.post("/v1/completions", json=request, headers=headers)
        assert response.status_code == 200, response.text
        answer = response.json()
        choice = answer["choices"][0]
        usage = answer["usage"]
        choice["request_id"] = answer["id"]
        choice["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
        choice["context"] = [*prompt, *choice["token_ids"]]
        return choice

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer, which must be 200."""
        answer = self.http.post(path, json=body or None)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()) if answer.content else {}

    def count(self, name: str, label: str | None = None, value: str = "") -> float:
        """A metric's sum, or its value where `label` is `value`."""
        samples = self.server.metrics()
        if label is None:
            return total(samples, name)
        return by_label(samples, name, label).get(value, 0.0)

    def pins(self, outcome: str) -> float:
        return self.count("ttlcache_pins_total", "outcome", outcome)

    def reaches(self, condition: Callable[[], object]) -> bool:
        """Poll, and have the engine step meanwhile: an idle one tells nothing new."""
        return becomes(lambda: condition() or self.settle(), HANG_S)

    def empty_gpu(self) -> None:
        """Forget the prefix cache; vLLM refuses while a copy still holds blocks."""
        assert self.reaches(lambda: self.post("/reset_prefix_cache")["success"])

    def settle(self) -> None:
        """One turn of an ended program: the engine steps and reports."""
        self.ask([11, 12, 13], max_tokens=2, hints={"is_last_step": True})

    def load_weights(self, model: Path) -> None:
        """vLLM's RL flow: pause, other weights, resume."""
        self.post("/pause")
        load = {"weights_path": str(model)}
        self.post("/collective_rpc", method="reload_weights", kwargs=load)
        self.post("/resume")

    def is_unharmed(self, *refusals: str) -> None:
        """No error, and no block is referenced once all programs ended.

        refusals: what log lines of malformed requests have, which vLLM refuses itself.
        """
        self.empty_gpu()
        self.settle()
        assert self.count("ttlcache_hook_errors_total") == 0
        blocks = self.server.options.num_blocks
        assert self.count("ttlcache_free_blocks") == blocks - 1
        errors = self.server.errors_in_log()
        assert [e for e in errors if not any(r in e for r in refusals)] == []


class Serve(VLLMServer):
    """`vllm serve`, which alone starts several API servers, or the Rust one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.start_timeout_s = 1500.0  # six processes may import vLLM at once
        _, _, _, name, model, *rest = self.command
        assert name == "--model"
        main = "vllm.entrypoints.cli.main"
        self.command = (sys.executable, "-m", main, "serve", model, *rest)


def engine_pid(server: VLLMServer) -> int:
    text = server.log_path.read_text(errors="replace")
    (pid,) = set(re.findall(r"EngineCore pid=(\d+)", text))
    return int(pid)


def start_server(
    model: Path,
    log: Path,
    extra: dict[str, Any] | None,
    *,
    kind: type[VLLMServer] = VLLMServer,
    connector: str = "TTLConnector",
    module: str = "",
    **options: Any,
) -> VLLMServer:
    """`extra` is kv_connector_extra_config; None starts vanilla vLLM.

    connector, module: another one than ours.
    """
    transfer = None
    if extra is not None:
        transfer = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        } | ({"kv_connector_module_path": module} if module else {})
    settings = {"num_blocks": POOL_BLOCKS, "max_model_len": 4096, "max_num_seqs": 8}
    settings |= options
    settings["extra_env"] = DEV_MODE | options.get("extra_env", {})
    return kind(model, ServerOptions(**settings, kv_transfer_config=transfer), log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def vanilla(tiny_model, tmp_path_factory):
    """Recorded answers of vanilla vLLM: filled once, its server is gone then.

    They are the same every time, so a later run finds them in `out`.
    """
    kept = ROOT / "out/cache/vanilla" / f"{_what_vanilla_depends_on()}.pickle"
    if kept.exists():
        found: dict[str, Any] = pickle.loads(kept.read_bytes())
        return found
    log = tmp_path_factory.mktemp("vanilla") / "server.log"
    with start_server(tiny_model, log, None) as server:
        for _ in range(2):  # the first one compiles kernels
            Agent(server).http.post("/reset_prefix_cache").raise_for_status()
            answers = record(Agent(server))
        answers |= {
            "uncached": uncached(Agent(server)),
            "two_turns": [turn["token_ids"] for turn in two_turns(Agent(server))],
            "broken": answers_to_broken(Agent(server)),
            "mixed": play(Agent(server), identify=False),
        }
    kept.parent.mkdir(parents=True, exist_ok=True)
    new = kept.with_suffix(f".{os.getpid()}")
    new.write_bytes(pickle.dumps(answers))
    new.replace(kept)
    return answers


def _what_vanilla_depends_on() -> str:
    """The requests, the model, the server's options, vLLM and its kernels' machine."""
    sources = (loads, mixed_load, tiny_model_module, server_module)
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for module in sources:
        digest.update(Path(str(module.__file__)).read_bytes())
    versions = (vllm_version(), importlib.metadata.version("torch"))
    cpu = re.findall(r"^(?:model name|flags)\s*: (.*)", CPUINFO.read_text(), re.M)[:2]
    digest.update(repr((versions, cpu)).encode())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def agent(vanilla, tiny_model, tmp_path_factory):
    """A server whose every turn is pinned for `TTL_S`; checked at the very end."""
    folder = tmp_path_factory.mktemp("ttl")
    recording = folder / "recording"
    extra = {"policy_options": {"ttl_s": TTL_S}, "record_path": str(recording)}
    with start_server(tiny_model, folder / "server.log", HOLD | extra) as server:
        agent = Agent(server)
        agent.recording = recording
        yield agent
        agent.is_unharmed("[validation.py:", "[exception.py:")
        assert agent.count("ttlcache_pinned_blocks") == 0
    # SIGTERM: the end of every pin was still written.
    pins = [turn.pin for _, turn in load(recording).turns() if turn.pin]
    assert pins
    assert all(pin.outcome is not None for pin in pins)
