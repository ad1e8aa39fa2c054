"""vLLM's own options beside TTLConnector: what works, what is refused, what is said.

docs/vllm-options.md has a row for each, which tests/test_vllm_options_page.py reads.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.platforms import current_platform
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.connector.conftest import ASKING, HOLD_5S, VLLM_OWN, pinned, totals
from ttlcache.config import load_config
from ttlcache.errors import ConfigError
from ttlcache_connector import plugin, vllm_options
from ttlcache_connector.engine import requirements
from ttlcache_connector.scheduler import TTLScheduler
from ttlcache_sim.harness import EngineSpec, build_vllm_config

TTL = {"kv_connector": "TTLConnector", "kv_role": "kv_both"}
OTHER = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}

TIER = {"lower_tier": "lmcache"}
HINTS = {"program_id": "p", "tool": "bash"}
PROMPT = list(range(1, 161))
EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def multi(*children: dict[str, Any], role: str = "kv_both") -> EngineSpec:
    # Our plugin fills in what a child lacks.
    extra = {"connectors": [dict(child) for child in children]}
    return transferring("MultiConnector", role, extra)


def transferring(connector: str, role: str, extra: dict[str, Any]) -> EngineSpec:
    transfer = KVTransferConfig(
        kv_connector=connector, kv_role=role, kv_connector_extra_config=extra
    )
    return EngineSpec(connector=False, engine_args={"kv_transfer_config": transfer})


def documented_multi_connector() -> EngineSpec:
    text = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    *_, example = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    transfer = KVTransferConfig(**json.loads(example))
    return EngineSpec(connector=False, engine_args={"kv_transfer_config": transfer})


# --- refused ------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "lmcache"])
@pytest.mark.parametrize("size_gib", [0.0, 2.5])
@pytest.mark.parametrize("inside", [False, True])
def test_vllms_offloading_does_not_replace_us_silently(backend, size_gib, inside):
    spec = multi(TTL, OTHER) if inside else EngineSpec()
    flags = {"kv_offloading_size": size_gib, "kv_offloading_backend": backend}
    with pytest.raises(ConfigError) as caught:
        build_vllm_config(replace(spec, engine_args={**spec.engine_args, **flags}))
    for part in ("--kv-offloading-size", "--kv-transfer-config", '"lower_tier"'):
        assert part in str(caught.value)


def test_without_us_its_offloading_is_vllms_business():
    flags = {"kv_offloading_size": 1.0}
    config = build_vllm_config(EngineSpec(connector=False, engine_args=flags))
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"


def test_two_of_ours_are_refused():
    with pytest.raises(ConfigError, match="names 2 TTLConnectors, expected: one"):
        build_vllm_config(multi(TTL, TTL))


@pytest.fixture
def untested_lmcache(monkeypatch) -> None:
    monkeypatch.setattr(requirements, "check_lmcache_tier", lambda *_, **__: None)


def test_a_producer_with_a_lower_tier_is_refused(untested_lmcache):
    child = TTL | {"kv_connector_extra_config": dict(TIER)}
    with pytest.raises(ConfigError, match="kv_role has value 'kv_producer'"):
        build_vllm_config(multi(child, OTHER, role="kv_producer"))
    build_vllm_config(multi(child, OTHER, role="kv_consumer"))


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        (EngineSpec(), "fail"),
        (EngineSpec(extra_config=TIER), "recompute"),
        (documented_multi_connector(), "recompute"),
    ],
    ids=["no tier", "a tier", "docs/tiers.md"],
)
def test_a_failed_load_is_computed_again(untested_lmcache, spec, policy):
    config = build_vllm_config(spec)
    assert config.kv_transfer_config.kv_load_failure_policy == policy
    assert config.scheduler_config.scheduler_cls == plugin.SYNC_SCHEDULER


def test_priorities_of_clients_and_admission_are_refused():
    extra = {"admission": "room-to-grow"}
    with pytest.raises(ConfigError, match="--scheduling-policy priority"):
        build_vllm_config(EngineSpec(policy="priority", extra_config=extra))
    build_vllm_config(EngineSpec(policy="priority"))


def test_ranks_that_schedule_for_themselves_are_refused():
    config = build_vllm_config(EngineSpec())
    config.parallel_config.distributed_executor_backend = "external_launcher"
    vllm_options.check(config, load_config({}))
    config.parallel_config.data_parallel_size = 2
    vllm_options.check(config, load_config({}))
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ConfigError, match="external_launcher with 2 ranks"):
        vllm_options.check(config, load_config({}))


def test_expandable_segments_are_refused_by_vllm(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ValueError, match="expandable_segments"):
        build_vllm_config(EngineSpec())


# --- async scheduling -----------------------------------------------------------


@pytest.fixture
def platform_with_async(monkeypatch) -> None:
    """A platform that, unlike the CPU one, leaves async scheduling as it is."""
    hook = current_platform.check_and_update_config

    def leave_async(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        hook(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    monkeypatch.setattr(current_platform, "check_and_update_config", leave_async)


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
ASYNC = {
    "default": ({}, True),
    "on": ({"async_scheduling": True}, True),
    "off": ({"async_scheduling": False}, False),
    "ngram": ({"speculative_config": NGRAM}, False),
    "pipeline": ({"pipeline_parallel_size": 2}, False),
}


@pytest.mark.parametrize("case", ASYNC)
def test_async_scheduling_is_what_it_would_be_without_us(case, platform_with_async):
    arguments, expected = ASYNC[case]
    flags = {"async_scheduling": None, **arguments}
    ours, plain = (
        build_vllm_config(EngineSpec(connector=connector, engine_args=flags))
        for connector in (True, False)
    )
    ours, plain = ours.scheduler_config, plain.scheduler_config
    assert ours.async_scheduling is plain.async_scheduling is expected
    assert issubclass(ours.get_scheduler_cls(), AsyncScheduler) is expected
    assert issubclass(ours.get_scheduler_cls(), plain.get_scheduler_cls())


@pytest.mark.parametrize("named", [plugin.SYNC_SCHEDULER, plugin.ASYNC_SCHEDULER])
def test_our_own_class_named_by_hand_does_not_turn_it_off(named, platform_with_async):
    for wanted in (True, False):
        flags = {"async_scheduling": wanted, "scheduler_cls": named}
        config = build_vllm_config(EngineSpec(engine_args=flags)).scheduler_config
        assert issubclass(config.get_scheduler_cls(), AsyncScheduler) is wanted


# --- said at start ---------------------------------------------------------------


@pytest.fixture
def said(monkeypatch, our_log) -> Callable[..., list[str]]:
    """What is logged while a configuration is built."""

    def build(spec: EngineSpec, *argv: str, **environ: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", list(argv or ("a_test.py",)))
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        arguments = {"disable_log_stats": False, **spec.engine_args}
        build_vllm_config(replace(spec, engine_args=arguments))
        lines, our_log[:] = our_log.copy(), []
        return lines

    return build


def test_nothing_is_missing_by_default(said):
    assert said(EngineSpec(), "vllm", "serve", "MODEL") == []
    assert said(EngineSpec(), "api_server.py", VLLM_USE_RUST_FRONTEND="1") == []


def test_of_several_api_servers_one_says_it(said):
    flags = {"disable_log_stats": True, "_api_process_count": 3}
    for rank, lines in ((-1, 1), (0, 1), (1, 0), (2, 0)):
        spec = EngineSpec(engine_args=flags | {"_api_process_rank": rank})
        assert len(said(spec)) == lines


@pytest.mark.parametrize(
    ("arguments", "argv", "environ", "expected"),
    [
        ({"disable_log_stats": True}, (), {}, "no ttlcache_* metrics"),
        ({"scheduler_cls": VLLM_OWN}, (), {}, "programs are not ordered"),
        ({"runner": "pooling"}, (), {}, "none is pinned"),
        ({}, ("vllm", "serve"), {"VLLM_USE_RUST_FRONTEND": "1"}, "the Rust API server"),
        ({}, ("vllm", "serve", "M", "--grpc"), {}, "the gRPC server"),
        ({}, ("launchers/grpc_server.py",), {}, "the gRPC server"),
    ],
)
def test_what_does_not_work_is_said(said, arguments, argv, environ, expected):
    (sentence,) = said(EngineSpec(engine_args=arguments), *argv, **environ)
    assert expected in sentence


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_that_we_do_not_play_is_said(said, role):
    alone = KVTransferConfig(kv_connector="TTLConnector", kv_role=role)
    arguments = {"kv_transfer_config": alone}
    (sentence,) = said(EngineSpec(connector=False, engine_args=arguments))
    assert f"{role!r} does what 'kv_both' does" in sentence
    assert said(multi(TTL, OTHER, role=role)) == []


def test_a_synchronous_class_of_the_users_is_said(said, platform_with_async):
    flags = {"scheduler_cls": VLLM_OWN, "async_scheduling": True}
    first, second = said(EngineSpec(engine_args=flags))
    assert "programs are not ordered" in first
    assert "not scheduled ahead although async scheduling is on" in second


def test_what_vllm_leaves_out_beside_any_connector_is_said(said, monkeypatch):
    monkeypatch.setattr(current_platform, "is_rocm", lambda: True)
    (sentence,) = said(EngineSpec())
    assert "ROCM_ATTN" in sentence


@pytest.mark.parametrize("hashes_ahead", [False, True])
def test_a_block_that_eagle_costs_is_said_where_it_does(hashes_ahead):
    """vLLM 0.33 hashes ahead, but not beside a connector."""
    drafts = SimpleNamespace(method="eagle3", use_eagle=lambda: True)
    about = SimpleNamespace(speculative_config=drafts)
    if hashes_ahead:
        about.num_hash_lookahead_tokens = 0
    told = list(vllm_options._missing_of_vllm(about))
    assert len(told) == hashes_ahead


class Derived(TTLScheduler):
    """A user's own scheduler, made from ours."""


def test_a_class_derived_from_ours_lacks_nothing(said):
    assert said(EngineSpec(engine_args={"scheduler_cls": Derived})) == []


@pytest.mark.parametrize(
    ("flags", "tier"),
    [
        ({"enable_lora": True}, "LMCache"),
        ({"enable_prompt_embeds": True}, "LMCache"),
        ({"kv_events_config": EVENTS}, "the lower tier"),
    ],
    ids=["lora", "prompt-embeds", "kv-events"],
)
def test_what_never_goes_to_the_lower_tier_is_said(flags, tier, said, untested_lmcache):
    (sentence,) = said(EngineSpec(extra_config=TIER, engine_args=flags))
    assert tier in sentence
    assert said(EngineSpec(engine_args=flags)) == []
    in_the_box = said(EngineSpec(extra_config={"lower_tier": "cpu"}, engine_args=flags))
    assert len(in_the_box) == (tier != "LMCache")


# --- put right ---------------------------------------------------------------------

#: Of those whose module needs no torchvision, which breaks beside torch for CPUs.
AUDIO = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "audio_config": {"model_type": "qwen2_audio_encoder", "num_mel_bins": 16},
    "text_config": {
        "model_type": "qwen2",
        "vocab_size": 32_000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("asked", [False, True])
def test_embeddings_of_clients_are_taken_only_if_asked_for(tmp_path, asked):
    (tmp_path / "config.json").write_text(json.dumps(AUDIO))
    flags = {"model": str(tmp_path), "enable_mm_embeds": asked}
    for connector in (True, False):
        config = build_vllm_config(EngineSpec(connector=connector, engine_args=flags))
        mm_config = config.model_config.multimodal_config
        assert mm_config.enable_mm_embeds is asked
        assert mm_config.allow_missing_mm_embeddings is False


# --- works ---------------------------------------------------------------------------

HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
WORKS: dict[str, dict[str, Any]] = {
    **{f"hash-{name}": {"prefix_caching_hash_algo": name} for name in HASHES},
    "no-chunked-prefill": {"enable_chunked_prefill": False, "max_model_len": 512},
    "no-reserve-full-isl": {"scheduler_reserve_full_isl": False},
    "watermark": {"watermark": 0.1},
    "max-num-active-seqs": {"max_num_active_seqs": 2},
    "long-prefill-threshold": {"long_prefill_token_threshold": 64},
    "no-hybrid-manager": {"disable_hybrid_kv_cache_manager": True},
    "prefill-schedule-interval": {"prefill_schedule_interval": 4},
    "stream-interval": {"stream_interval": 8},
    "priority": {"scheduling_policy": "priority"},
    "vllm's own scheduler": {"scheduler_cls": VLLM_OWN},
    "a scheduler that asks": {"scheduler_cls": ASKING},
    "kv-events": {"kv_events_config": EVENTS},
    **{
        role: transferring("TTLConnector", role, dict(HOLD_5S)).engine_args
        for role in ("kv_producer", "kv_consumer")
    },
}


@pytest.mark.parametrize("name", WORKS)
def test_turns_are_pinned_claimed_and_let_go(name, make_engine, clock):
    pytest.importorskip("xxhash") if "xxhash" in name else None
    engine = make_engine(num_blocks=60, engine_args=WORKS[name])
    context = engine.turn("a", PROMPT, hints=HINTS)
    assert pinned(engine) == 10
    for other in range(4):  # 40 blocks: A's would have been the first to go
        start = 1000 * (other + 1)
        engine.add(f"other-{other}", range(start, start + 150))
    engine.run()
    engine.turn("b", [*context, 7], hints=HINTS | {"is_last_step": True})
    assert totals(engine)["pins:claimed"] == 1
    clock.advance(6.0)
    engine.step()
    assert pinned(engine) == 0


def test_kv_events_tell_what_is_in_gpu_memory(make_engine):
    """A router that counts them knows what a replica holds, pins or not."""
    engine = make_engine(num_blocks=40, engine_args=WORKS["kv-events"])
    published: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = published.append
    for turn in range(6):
        engine.turn(f"{turn}", range(500 * turn, 500 * turn + 150), hints=HINTS)
    known: set[Any] = set()
    for event in (event for batch in published for event in batch.events):
        if isinstance(event, BlockStored):
            known.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            known.difference_update(event.block_hashes)
    cached = [block for block in engine.pool.blocks if block.block_hash is not None]
    assert pinned(engine) > 0
    assert len(known) == len(cached) > 30


def adapter(number: int) -> dict[str, Any]:
    return {"lora_request": LoRARequest(f"adapter-{number}", number, "/nowhere")}


def image(number: int) -> dict[str, Any]:
    place = PlaceholderRange(offset=4, length=16)
    name = f"image-{number}"
    return {"mm_features": [MultiModalFeatureSpec(None, "image", name, place)]}


@pytest.mark.parametrize("about", [adapter, image])
def test_the_same_tokens_are_not_the_same_context(about, make_engine):
    engine = make_engine(num_blocks=60)
    # What a multimodal model would have brought with it.
    engine.scheduler.max_num_encoder_input_tokens = 64
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    context = engine.turn("a", PROMPT, **about(1))
    for number, found in ((2, 0), (1, 1)):
        engine.turn(f"b{number}", [*context, 6 + number], **about(number))
        assert totals(engine).get("turns_identified:prefix", 0) == found
        assert totals(engine).get("pins:claimed", 0) == found
