"""vLLM's real scheduler and KV cache manager with our connector, no model.

For tests and simulations in virtual time: tokens are made up deterministically,
everything that schedules or holds blocks is vLLM's and ours, unchanged.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from ttlcache_connector.connector import TTLConnector, find_connector

VOCAB = 32_000

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}


@lru_cache(maxsize=1)
def _model_folder() -> str:
    folder = Path(tempfile.mkdtemp(prefix="ttlcache-harness-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(_MODEL))
    return str(folder)


@dataclass(frozen=True)
class EngineSpec:
    """What engine to build. Blocks are KV blocks of `block_tokens` tokens."""

    num_blocks: int = 64
    block_tokens: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    async_scheduling: bool = False
    sliding_window: int | None = None  # adds a second KV cache group
    mamba_mode: str | None = None  # adds a recurrent-state group: none, align, all
    scheduler_cls: str | None = None
    connector: bool = True
    kv_connector: str = "TTLConnector"
    policy: str = "fcfs"
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def build_vllm_config(spec: EngineSpec) -> VllmConfig:
    """A real VllmConfig through vLLM's own argument path, plugins included."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transfer = None
    if spec.connector:
        transfer = KVTransferConfig(
            kv_connector=spec.kv_connector,
            kv_role="kv_both",
            kv_connector_extra_config=dict(spec.extra_config),
        )
    arguments: dict[str, Any] = {
        "model": _model_folder(),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": spec.max_model_len,
        "block_size": spec.block_tokens,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "enable_prefix_caching": True,
        "async_scheduling": spec.async_scheduling,
        "scheduler_cls": spec.scheduler_cls,
        "scheduling_policy": spec.policy,
        "kv_transfer_config": transfer,
        "disable_log_stats": True,
    }
    config = EngineArgs(**(arguments | dict(spec.engine_args))).create_engine_config()
    config.cache_config.num_gpu_blocks = spec.num_blocks
    if spec.mamba_mode is not None:
        config.cache_config.mamba_cache_mode = cast(Any, spec.mamba_mode)
    # The CPU platform turns async scheduling off after our plugin has chosen.
    if spec.async_scheduling and not config.scheduler_config.async_scheduling:
        config.scheduler_config.async_scheduling = True
        if spec.connector and spec.scheduler_cls is None:
            config.scheduler_config.scheduler_cls = (
                "ttlcache_connector.scheduler.AsyncTTLScheduler"
            )
    return config


def build_kv_cache_config(spec: EngineSpec) -> KVCacheConfig:
    shape: dict[str, Any] = {
        "block_size": spec.block_tokens,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.bfloat16,
    }
    groups = [KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**shape))]
    if spec.sliding_window is not None:
        window = SlidingWindowSpec(**shape, sliding_window=spec.sliding_window)
        groups.append(KVCacheGroupSpec(["layer.1"], window))
    if spec.mamba_mode is not None:
        mamba = MambaSpec(
            block_size=spec.block_tokens,
            shapes=((8, 8),),
            dtypes=(torch.float32,),
            mamba_cache_mode=spec.mamba_mode,
            page_size_padded=groups[0].kv_cache_spec.page_size_bytes,
        )
        groups.append(KVCacheGroupSpec(["layer.2"], mamba))
    page_bytes = groups[0].kv_cache_spec.page_size_bytes
    tensors = [
        KVCacheTensor(
            size=page_bytes * spec.num_blocks,
            layers=group.layer_names,
            layer_stride=page_bytes * spec.num_blocks,
            block_stride=page_bytes,
        )
        for group in groups
    ]
    return KVCacheConfig(
        num_blocks=spec.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups
    )


def next_tokens(request: Request, count: int) -> list[int]:
    """Made-up samples: a fixed function of the context, like greedy decoding."""
    last, length = int(request.all_token_ids[-1]), request.num_tokens
    tokens = []
    for position in range(length, length + count):
        last = (last * 7919 + position * 104_729 + 1) % VOCAB
        tokens.append(last)
    return tokens


class EngineHarness:
    """Drives one scheduler: add requests, step, see what finished.

    Attributes:
        depth: steps in flight at once, 2 with async scheduling; more stand for the
            stages of a pipeline.
        on_step: called after every step.
        on_output: called with a step's live requests once its output is known.
        worker_says: called before a step's output is handed in; what the worker side
            of a connector reports with it.
    """

    def __init__(
        self,
        spec: EngineSpec,
        config: VllmConfig | None = None,
        depth: int | None = None,
    ) -> None:
        self.spec = spec
        self.config = config if config is not None else build_vllm_config(spec)
        self.config.cache_config.num_gpu_blocks = spec.num_blocks
        # The interface asks for more than vLLM's own schedulers do.
        scheduler_cls: Any = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler: Scheduler = scheduler_cls(
            vllm_config=self.config,
            kv_cache_config=build_kv_cache_config(spec),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=spec.block_tokens,
            log_stats=False,
        )
        algorithm = self.config.cache_config.prefix_caching_hash_algo
        hash_fn = get_hash_fn_by_name(algorithm)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(spec.block_tokens, hash_fn)
        self._in_flight: deque[tuple[SchedulerOutput, set[str]]] = deque()
        self.finished: dict[str, Request] = {}
        self.depth = depth if depth is not None else 1 + spec.async_scheduling
        self.on_step: Callable[[], None] | None = None
        self.on_output: Callable[[list[Request]], None] | None = None
        self.worker_says: Callable[[], KVConnectorOutput | None] = lambda: None

    @property
    def connector(self) -> TTLConnector:
        connector = find_connector(self.scheduler.connector)
        assert connector is not None
        return connector

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        hints: Mapping[str, Any] | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        session_id: str | None = None,
        **request_args: Any,
    ) -> Request:
        """Queue a request; `hints` go where clients put them."""
        if hints is not None:
            kv_transfer_params = {"ttlcache": dict(hints)}
        extra: dict[str, Any] = {}
        if kv_transfer_params is not None:
            extra["kv_transfer_params"] = dict(kv_transfer_params)
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=max_tokens,
            ignore_eos=True,
            temperature=0,
            extra_args=extra or None,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
            session_id=session_id,
            **request_args,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """One engine step; outputs lag `depth - 1` steps behind."""
        output = self.scheduler.schedule()
        # Asked now: with steps in flight the next schedule() changes the answer.
        requests = self.scheduler.requests
        samplers = {
            rid
            for rid in output.num_scheduled_tokens
            if not requests[rid].is_prefill_chunk
        }
        self._in_flight.append((output, samplers))
        # Nothing new was launched: wait for all that is under way.
        depth = self.depth if output.total_num_scheduled_tokens else 1
        while len(self._in_flight) >= depth:
            self._complete(*self._in_flight.popleft())
        if self.on_step is not None:
            self.on_step()
        return output

    def drain(self) -> None:
        """Complete every step in flight."""
        while self._in_flight:
            self._complete(*self._in_flight.popleft())

    def run(self, max_steps: int = 10_000) -> int:
        """Step until no request is left; returns the number of steps.

        Raises:
            RuntimeError: still not done after `max_steps`: a wedge.
        """
        for count in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self._in_flight:
                return count
            self.step()
        raise RuntimeError(f"not done after {max_steps} steps")

    def turn(self, request_id: str, prompt: Sequence[int], **kwargs: Any) -> list[int]:
        """Add a request, run to its end, return prompt + output tokens."""
        request = self.add(request_id, prompt, **kwargs)
        self.run()
        return list(request.all_token_ids)

    def execute(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """What a worker would do in this step; there is none."""
        return None

    def _complete(self, output: SchedulerOutput, samplers: set[str]) -> None:
        requests = self.scheduler.requests
        ids = list(output.num_scheduled_tokens)
        tracked = [requests[rid] for rid in ids if rid in requests]
        sampled = [
            _sample(requests[rid], output.scheduled_spec_decode_tokens.get(rid, ()))
            if rid in samplers and rid in requests
            else []
            for rid in ids
        ]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={rid: i for i, rid in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=self.worker_says() or self.execute(output),
            ),
        )
        for request in tracked:
            if request.is_finished():
                self.finished[request.request_id] = request
        if self.on_output is not None:
            self.on_output([r for r in tracked if not r.is_finished()])


def _sample(request: Request, drafts: Sequence[int]) -> list[int]:
    """What the model says next, with as many drafts as it agrees with."""
    true = next_tokens(request, len(drafts) + 1)
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == true[accepted]:
        accepted += 1
    return true[: accepted + 1]
