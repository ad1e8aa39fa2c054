"""One real vLLM OpenAI server as a context manager: start, wait, read, stop."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.serve.ports import free_ports
from bench.serve.process import ServerProcess
from bench.serve.tiny_model import DEFAULT_SHAPE

#: A level at the line's start, or an uncaught exception; vLLM puts "(EngineCore
#: pid=1) " before it, and colour codes when the terminal asks for them.
_COLOUR = r"(?:\x1b\[[\d;]*m)*"
_ERROR_LINE = re.compile(
    rf"^{_COLOUR}(?:\([^)]*\)\s*)?{_COLOUR}(?:(?:ERROR|CRITICAL)\b|Traceback \()"
)
#: vLLM's API server may notice that its engine left first when both are told to.
_SHUTDOWN_RACE = "[async_llm.py:"

#: The model in the engine's own process, as on one GPU. On a CPU vLLM would start
#: another one to set its threads, which `environment` does: 20 s more a start, and one
#: more process that waits by spinning.
_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

#: Writes down every step, into the file that the environment variable names.
STEP_LOG_SCHEDULER = "bench.serve.step_log.LoggedScheduler"
STEP_LOG_VARIABLE = "TTLCACHE_BENCH_STEP_LOG"

#: One sample of /metrics: ``(name, ((label, value), …))``, labels sorted.
SampleKey = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What is asked of ``vllm.entrypoints.openai.api_server``."""

    num_blocks: int
    """KV pool, in blocks; one of them is vLLM's null block."""
    block_size: int = 32
    """Tokens a block; the CPU attention kernel takes multiples of 32."""
    max_model_len: int = 32768
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    kv_transfer_config: Mapping[str, Any] | None = None
    """Also decides whether vLLM's plugins load: without one they do not."""
    extra_args: tuple[str, ...] = field(default=())
    extra_env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_tiny_model(
        cls, num_blocks: int, kv_transfer_config: Mapping[str, Any] | None = None
    ) -> ServerOptions:
        """Sequences as long as pool and tiny model allow."""
        # One block is vLLM's null block; a longer sequence could never be served.
        room = (num_blocks - 1) * cls(num_blocks).block_size
        return cls(
            num_blocks=num_blocks,
            max_model_len=min(room, DEFAULT_SHAPE.max_position),
            kv_transfer_config=kv_transfer_config,
        )

    def arguments(self, model: Path, port: int) -> list[str]:
        """The server's command line after ``python -m <module>``."""
        # float32: batches of different shape then round alike to about 1e-5.
        args = [
            *("--model", str(model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", "--seed", "0"),
            *("--num-gpu-blocks-override", str(self.num_blocks)),
            *("--block-size", str(self.block_size)),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--enable-prompt-tokens-details", "--enable-per-request-metrics"),
            *("--disable-uvicorn-access-log", "--shutdown-timeout", "10"),
            *("--distributed-executor-backend", _EXECUTOR),
        ]
        if self.kv_transfer_config is not None:
            args += ["--kv-transfer-config", json.dumps(dict(self.kv_transfer_config))]
        return [*args, *self.extra_args]

    def environment(self) -> dict[str, str]:
        """This process's environment with what the CPU backend needs."""
        plugins = {} if self.kv_transfer_config is not None else {"VLLM_PLUGINS": ""}
        return {
            **os.environ,
            **plugins,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # the other core is for the HTTP side
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "NO_COLOR": "1",
            **self.extra_env,
        }


class VLLMServer(ServerProcess):
    """Runs one server for the length of a ``with`` block; its engines are children.

    Args:
        model: folder with weights and tokenizer.
        options: what to ask of the server.
        log_path: file that gets its stdout and stderr.
        start_timeout_s: deadline for ``/health`` to answer 200.
    """

    grace_s = 15.0

    def __init__(
        self,
        model: Path,
        options: ServerOptions,
        log_path: Path,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.options = options
        self.port = free_ports(1)[0]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._served_log_bytes: int | None = None
        super().__init__(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *options.arguments(model, self.port),
            ],
            f"{self.base_url}/health",
            log_path,
            start_timeout_s,
            options.environment(),
            "the vLLM server",
        )

    def stop(self) -> None:
        if self._process is not None:
            self._served_log_bytes = self.log_path.stat().st_size
        super().stop()

    def metrics(self) -> dict[SampleKey, float]:
        """All samples of ``/metrics`` now."""
        response = httpx.get(f"{self.base_url}/metrics", timeout=30.0, verify=False)
        response.raise_for_status()
        return parse_metrics(response.text)

    def ask(
        self,
        prompt: Sequence[int],
        hints: Mapping[str, object] | None = None,
        max_tokens: int = 1,
        **sampling: Any,
    ) -> dict[str, Any]:
        """One completion with our hints; `sampling`: more members of the request.

        Raises:
            httpx.HTTPError: it was not answered 200.
        """
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            **sampling,
        }
        if hints is not None:
            body["kv_transfer_params"] = {"ttlcache": hints}
        url = f"{self.base_url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=600.0).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def errors_in_log(self) -> list[str]:
        """Lines of the log that report an error, shutdown included.

        Only the API server's report that its engine left is let pass, and only
        after :meth:`stop` was called.
        """
        log = self.log_path.read_bytes()
        end = len(log) if self._served_log_bytes is None else self._served_log_bytes
        served = log[:end].decode(errors="replace").splitlines()
        rest = log[end:].decode(errors="replace").splitlines()
        lines = [*served, *(line for line in rest if _SHUTDOWN_RACE not in line)]
        return [line for line in lines if _ERROR_LINE.search(line)]


def parse_metrics(text: str) -> dict[SampleKey, float]:
    """Prometheus exposition text to samples, ``_created`` ones left out."""
    samples: dict[SampleKey, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                key = (sample.name, tuple(sorted(sample.labels.items())))
                samples[key] = sample.value
    return samples


def total(samples: Mapping[SampleKey, float], name: str) -> float:
    """Sum of a metric over all its label sets; 0 when it is absent."""
    return sum(value for (key, _), value in samples.items() if key == name)


def by_label(
    samples: Mapping[SampleKey, float], name: str, label: str
) -> dict[str, float]:
    """A metric summed per value of one label."""
    sums: dict[str, float] = {}
    for (key, labels), value in samples.items():
        if key == name:
            group = dict(labels).get(label, "")
            sums[group] = sums.get(group, 0.0) + value
    return sums
