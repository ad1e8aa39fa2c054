"""One real vLLM OpenAI server as a context manager: start, wait, read, stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.ports import free_ports

_LOG_TAIL_LINES = 40
#: A level at the line's start, or an uncaught exception; vLLM puts "(EngineCore
#: pid=1) " before it, and colour codes when the terminal asks for them.
_COLOUR = r"(?:\x1b\[[\d;]*m)*"
_ERROR_LINE = re.compile(
    rf"^{_COLOUR}(?:\([^)]*\)\s*)?{_COLOUR}(?:(?:ERROR|CRITICAL)\b|Traceback \()"
)
#: "ValueError: …" or "ttlcache.errors.ConfigError: …", with or without the prefix.
_CAUSE_LINE = re.compile(r"(?:^|\] )[\w.]*(?:Error|Exception): ")
#: vLLM's API server may notice that its engine left first when both are told to.
_SHUTDOWN_RACE = "[async_llm.py:"

#: One sample of /metrics: ``(name, ((label, value), …))``, labels sorted.
SampleKey = tuple[str, tuple[tuple[str, str], ...]]


class ServerError(RuntimeError):
    """The server did not start, or died; the message ends with its log's tail."""


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
    dtype: str = "float32"
    """float32: batches of different shape then round alike to about 1e-5."""
    num_threads: int = 1
    """OpenMP threads of the worker; the other core is for the HTTP side."""
    kv_transfer_config: Mapping[str, Any] | None = None
    """Also decides whether vLLM's plugins load: without one they do not."""
    extra_args: tuple[str, ...] = field(default=())
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, model: Path, port: int) -> list[str]:
        """The server's command line after ``python -m <module>``."""
        args = [
            *("--model", str(model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", self.dtype, "--enforce-eager", "--seed", "0"),
            *("--num-gpu-blocks-override", str(self.num_blocks)),
            *("--block-size", str(self.block_size)),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--enable-prompt-tokens-details", "--enable-per-request-metrics"),
            *("--disable-uvicorn-access-log", "--shutdown-timeout", "10"),
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
            "OMP_NUM_THREADS": str(self.num_threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "NO_COLOR": "1",
            **self.extra_env,
        }


class VLLMServer:
    """Runs one server for the length of a ``with`` block.

    Args:
        model: folder with weights and tokenizer.
        options: what to ask of the server.
        log_path: file that gets its stdout and stderr.
        start_timeout_s: deadline for ``/health`` to answer 200.
    """

    def __init__(
        self,
        model: Path,
        options: ServerOptions,
        log_path: Path,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.model = model
        self.options = options
        self.log_path = log_path
        self.start_timeout_s = start_timeout_s
        self.port = free_ports(1)[0]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._served_log_bytes: int | None = None

    @property
    def command(self) -> list[str]:
        """The full command line."""
        module = "vllm.entrypoints.openai.api_server"
        return [
            *(sys.executable, "-m", module),
            *self.options.arguments(self.model, self.port),
        ]

    @property
    def pid(self) -> int:
        """The API server's process; the engine core is a child of it."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def __enter__(self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.options.environment(),
                start_new_session=True,
            )
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self, grace_s: float = 15.0) -> None:
        """SIGTERM to the server, then SIGKILL to what is left of its group."""
        process = self._process
        if process is None:
            return
        self._process = None
        self._served_log_bytes = self.log_path.stat().st_size
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill(self) -> None:
        """SIGKILL to the whole group, as a crash of the machine would end it."""
        os.killpg(self.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def metrics(self) -> dict[SampleKey, float]:
        """All samples of ``/metrics`` now."""
        response = httpx.get(f"{self.base_url}/metrics", timeout=30.0)
        response.raise_for_status()
        return parse_metrics(response.text)

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

    def log_tail(self) -> str:
        """The exceptions named in the log and its last lines, for error messages."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        causes = dict.fromkeys(line for line in lines if _CAUSE_LINE.search(line))
        tail = lines[-_LOG_TAIL_LINES:]
        return "\n".join([*(line for line in causes if line not in tail), "…", *tail])

    def _wait_healthy(self) -> None:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            code = process.poll()
            if code is not None:
                raise ServerError(
                    f"the vLLM server ended with exit status {code} before it was "
                    f"ready; {self.log_path} ends with:\n{self.log_tail()}"
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.base_url}/health", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.25)
        raise ServerError(
            f"the vLLM server was not ready after {self.start_timeout_s:g} s; "
            f"{self.log_path} ends with:\n{self.log_tail()}"
        )


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
