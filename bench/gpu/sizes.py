"""What a GPU and a rehearsal on CPUs differ in: device, model, sizes. Nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.compare.agents import CONNECTOR, LMCACHE, ComparisonOptions
from bench.compare.pin_vs_reload import PinVsReloadOptions
from bench.micro.transfer_cli import TransferOptions
from bench.serve.server import ServerOptions
from bench.serve.tiny_model import DEFAULT_SHAPE, LLAMA_8B, ModelShape

#: `kv_transfer_config` of each arm; None: vLLM without a connector. CPU memory has
#: `ServedAgents.cpu_gb`, with which LMCache's server is started.
ARMS: Mapping[str, Mapping[str, Any] | None] = {
    "vanilla": None,
    "pins": {**CONNECTOR, "kv_connector_extra_config": {"lower_tier": "none"}},
    "pins+cpu": {**CONNECTOR, "kv_connector_extra_config": {"lower_tier": "cpu"}},
    "pins+lmcache": {
        **CONNECTOR,
        "kv_connector_extra_config": {"lower_tier": "lmcache"},
    },
    "lmcache": LMCACHE,
    "offloading": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
}
#: Speed instead of equal tokens; graphs of decodes, which nothing is compiled for.
_FAST = (
    *("--load-format", "dummy", "--no-enforce-eager"),
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
)


@dataclass(frozen=True, slots=True)
class ServedAgents(ComparisonOptions):
    """The demo's agents on a model of this shape."""

    arms: tuple[str, ...] = ("vanilla", "pins", "pins+cpu", "pins+lmcache")
    """Tokens are compared with the first one's, speed with that of all without pins."""
    server_bytes: int = 0
    """GPU memory of a server: as many as fit are started together. 0: all."""
    loads: tuple[float, ...] = (1.0,)
    """Arrivals a second."""
    shape: ModelShape = DEFAULT_SHAPE
    extra_args: tuple[str, ...] = ()

    def server(self, kv_transfer_config: Mapping[str, Any] | None) -> ServerOptions:
        # No super(): a dataclass with slots is another class than the one written.
        server = ComparisonOptions.server(self, kv_transfer_config)
        # Triton's float32 is TF32 otherwise, whose tokens depend on the batch.
        exact = {"TRITON_F32_DEFAULT": "ieee"}
        return replace(server, extra_args=self.extra_args, extra_env=exact)

    def transfer(self, arm: str) -> Mapping[str, Any] | None:
        """The arm's `kv_transfer_config`."""
        found = ARMS[arm]
        if found is None:
            return None
        sizes: Mapping[str, Mapping[str, Any]] = {
            "pins+cpu": {"cpu_gb": self.cpu_gb},
            "offloading": {"cpu_bytes_to_use": round(self.cpu_gb * 1e9)},
        }
        extra: Mapping[str, Any] = found.get("kv_connector_extra_config", {})
        sized = {**extra, **sizes.get(arm, {})}
        return {**found, "kv_connector_extra_config": sized}


@dataclass(frozen=True, slots=True)
class Beside:
    """Streams that decode beside turns whose context comes back.

    Of these contexts one fits into the pool beside the streams, and all do not.
    """

    streams: int
    stream_turns: int
    stream_output_tokens: int
    contexts: int
    context_tokens: int
    turns: int
    gap_s: float
    """Between two turns of all contexts together."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of every stage."""

    on_device: bool
    pinned_bytes: int
    free_gpu_bytes: int
    transfer: TransferOptions
    tokens: ServedAgents
    serve: ServedAgents
    beside: Beside
    pin_vs_reload: PinVsReloadOptions

    def with_server_args(self, words: tuple[str, ...]) -> Sizes:
        """Every vLLM server gets these, too."""
        return replace(
            self,
            tokens=replace(self.tokens, extra_args=(*self.tokens.extra_args, *words)),
            serve=replace(self.serve, extra_args=(*self.serve.extra_args, *words)),
            pin_vs_reload=replace(
                self.pin_vs_reload,
                extra_args=(*self.pin_vs_reload.extra_args, *words),
            ),
        )


#: A head size that GPU and CPU backends have.
_HEADS_OF_64 = ModelShape(heads=4, kv_heads=2)


def _shared(kv_bytes: str) -> tuple[str, ...]:
    """Several servers share the GPU: none takes what the others are to have."""
    share = ("--gpu-memory-utilization", "0.05")
    return (*share, "--kv-cache-memory-bytes", kv_bytes)


_FAST_8B = (
    *(*_FAST, "--dtype", "bfloat16"),
    *("--max-num-batched-tokens", "8192", "--max-num-seqs", "64"),
    *_shared("5G"),
)

DEVICE = Sizes(
    on_device=True,
    pinned_bytes=1 << 30,
    free_gpu_bytes=40 << 30,
    transfer=TransferOptions(
        layouts=("BLNHC", "LBNHC"), pages_kib=(16, 64), mib=256, device="cuda"
    ),
    tokens=ServedAgents(
        programs=8,
        rate=2.0,
        gap_cap_s=1.0,
        shape=_HEADS_OF_64,
        extra_args=_shared("1G"),
    ),
    serve=ServedAgents(
        blocks=1024,  # 32,768 tokens, 4.3 GB: three agents
        token_scale=0.15,
        gap_cap_s=2.0,
        cpu_gb=20.0,
        arms=("vanilla", "pins+cpu", "pins", "lmcache", "offloading"),
        server_bytes=24 << 30,
        loads=(2.0, 1.0, 0.5),
        shape=LLAMA_8B,
        extra_args=_FAST_8B,
    ),
    beside=Beside(8, 24, 64, 4, 8192, 8, 0.4),
    pin_vs_reload=PinVsReloadOptions(
        lengths=(2048, 8192, 16384),
        repeats=2,
        blocks=1024,
        cpu_gb=16.0,
        disk_gb=32.0,
        shape=LLAMA_8B,
        extra_args=_FAST_8B,
    ),
)

_TINY = replace(_HEADS_OF_64, has_weights=False)
_FEW = ServedAgents(
    programs=4, rate=8.0, blocks=96, token_scale=0.02, gap_cap_s=0.2, cpu_gb=0.5
)
REHEARSAL = Sizes(
    on_device=False,
    pinned_bytes=1 << 20,
    free_gpu_bytes=1 << 20,
    transfer=TransferOptions(
        layouts=("BLNHC", "LBNHC"),
        pages_kib=(16,),
        runs=(1,),
        layers=4,
        mib=1,
        rounds=2,
        device="stand-in",
    ),
    tokens=replace(_FEW, arms=("vanilla", "pins+lmcache"), shape=_HEADS_OF_64),
    serve=replace(
        _FEW,
        programs=2,
        blocks=96,  # the warm-up of 3,000 tokens has to fit
        token_scale=0.008,
        arms=("vanilla", "pins", "pins+cpu"),
        loads=(8.0, 16.0),
        shape=_TINY,
        extra_args=_FAST,
    ),
    beside=Beside(2, 12, 16, 3, 1024, 3, 0.1),
    pin_vs_reload=PinVsReloadOptions(
        lengths=(1024,), repeats=1, blocks=96, shape=_TINY, extra_args=_FAST
    ),
)
