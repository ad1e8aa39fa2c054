"""Every KV layout of vLLM: vLLM's own allocator and views, our addresses."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from bench.surface.vllm_moved import find
from ttlcache.errors import TransferError
from ttlcache.transfer import Direction
from ttlcache_connector.copy.engines import make_engines
from ttlcache_connector.copy.kv_layouts import namespace, read_layout, whole_blocks
from ttlcache_connector.tiers.cpu.budget import block_bytes
from ttlcache_connector.tiers.lmcache.copier import ChunkCopier

BLOCKS, LAYERS, PER_CHUNK = 11, 3, 4
CPU = torch.device("cpu")
MLA = MLAAttentionSpec(
    block_size=16, num_kv_heads=1, head_size=72, dtype=torch.bfloat16
)
_HEADS = {"num_kv_heads": 4, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **_HEADS)
WINDOW = SlidingWindowSpec(block_size=16, **_HEADS, sliding_window=64)
LAYOUTS = list(KVCacheLayout)


def registered(layout, groups, kernel_block_sizes=None, device="cpu"):
    """What vLLM would allocate and register: its own functions."""
    page = max(
        group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups
    )
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=BLOCKS,
        prefix_cache_retention_interval=None,
    )
    vllm_config = SimpleNamespace(
        cache_config=cache_config,
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    configure = find("get_kv_cache_config_from_groups")
    config = configure(vllm_config, groups, page * BLOCKS)
    config.kv_cache_layout = layout.name
    on = torch.device(device)
    caches = allocate_kv_cache(config, on, layout, kernel_block_sizes)
    return caches, config


def one_group(spec, num_layers=LAYERS):
    return [KVCacheGroupSpec([f"l{i}" for i in range(num_layers)], spec)]


def fill(caches):
    """Every byte of the one buffer random."""
    storage = next(iter(caches.values())).untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
    raw.random_(0, 256, generator=torch.Generator().manual_seed(1))
    return raw


def blocks_of(caches, names, config, ids):
    """The logical bytes of blocks, by vLLM's own views."""
    views = (group_kernel_blocks(caches[name], config.num_blocks) for name in names)
    return [view[ids].contiguous().view(torch.uint8).clone() for view in views]


def chunks_for(group, count):
    nbytes = group.layout.chunk_bytes(PER_CHUNK)
    shape = (1, PER_CHUNK * 16, nbytes // (PER_CHUNK * 16))
    return [torch.zeros(shape, dtype=torch.uint8) for _ in range(count)]


def check_round_trip(caches, config, group):
    """Store blocks, load them into others; nothing else changes."""
    raw, (old, new) = fill(caches), ([7, 2, 3, 4, 9], [1, 10, 5, 6, 8])
    kept = [b for b in range(BLOCKS) if b not in new]

    def bytes_of(ids):
        return blocks_of(caches, list(caches), config, ids)

    before, wanted, others = raw.clone(), bytes_of(old), bytes_of(kept)
    copier = ChunkCopier(group, make_engines(CPU))
    try:
        chunks = chunks_for(group, 2)
        copier.copy(Direction.STORE, [*old, 0, 0, 0], PER_CHUNK, chunks)
        assert torch.equal(raw, before)
        # The tail of the last chunk is block 0 three times over; leave it there.
        copier.copy(Direction.LOAD, new, PER_CHUNK, chunks)
    finally:
        copier.close()
    pairs = zip(wanted + others, bytes_of(new) + bytes_of(kept), strict=True)
    assert all(torch.equal(was, now) for was, now in pairs)
    changed = int((raw != before).sum())
    assert changed <= len(new) * group.layout.block_bytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", [FULL, MLA], ids=["attention", "mla"])
def test_every_layout(layout, spec):
    caches, config = registered(layout, one_group(spec))
    group = read_layout(caches, config)
    assert group.layout.name == layout.name
    assert group.layout.block_bytes == LAYERS * spec.page_size_bytes
    check_round_trip(caches, config, group)


def mixed_group(*names):
    """Layers of two page sizes: of MLA, and of an index beside it."""
    index = dataclasses.replace(MLA, head_size=24)
    specs = {name: index if name.endswith("index") else MLA for name in names}
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    return [KVCacheGroupSpec(list(specs), both)]


PADDED = dataclasses.replace(FULL, page_size_padded=FULL.page_size_bytes + 256)
LARGE = dataclasses.replace(FULL, block_size=64)  # of four kernel blocks


#: Groups, sizes of kernel blocks, bytes of a block, layouts.
PARTS = {
    "different pages": (
        mixed_group("l0", "l0.index", "l1", "l1.index"),
        None,
        2 * MLA.page_size_bytes * (72 + 24) // 72,
        ["LBNHC", "BLNHC", "BLHNC"],
    ),
    "kernel blocks": (
        *(one_group(LARGE), [16], LAYERS * LARGE.page_size_bytes),
        ["LBNHC", "LBHNC"],
    ),
    "padding": (
        *(one_group(PADDED), None, LAYERS * FULL.real_page_size_bytes),
        ["LBNHC", "LBHNC", "BLNHC"],
    ),
}


@pytest.mark.parametrize(
    ("part", "layout"), [(part, each) for part in PARTS for each in PARTS[part][-1]]
)
def test_blocks_of_several_parts(part, layout):
    groups, kernel_block_sizes, block_bytes, _ = PARTS[part]
    caches, config = registered(KVCacheLayout[layout], groups, kernel_block_sizes)
    group = read_layout(caches, config)
    assert group.layout.num_blocks == BLOCKS
    assert group.layout.block_bytes == block_bytes
    check_round_trip(caches, config, group)


def test_scheduler_and_worker_count_the_same_blocks():
    """vLLM tells the scheduler of one layer's shape only."""
    caches, config = registered(KVCacheLayout.BLNHC, mixed_group("l.index", "l0", "l1"))
    told = generate_scheduler_kv_cache_config([config])
    assert told.kv_cache_groups != config.kv_cache_groups
    size = whole_blocks(caches, config.num_blocks).block_bytes
    assert block_bytes(told) == block_bytes(config) == size


def test_several_groups_are_refused():
    layers = {"full": FULL, "window": WINDOW}
    groups = [KVCacheGroupSpec([f"{n}0", f"{n}1"], s) for n, s in layers.items()]
    caches, config = registered(KVCacheLayout.LBNHC, groups)
    with pytest.raises(TransferError, match="2 KV cache groups"):
        read_layout(caches, config)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_lmcaches_own_order_needs_no_namespace(layout):
    """LMCache's gather and ours: the same bytes exactly where we say so."""
    base = pytest.importorskip("lmcache.v1.multiprocess.transfer_context.base")
    caches, config = registered(KVCacheLayout[layout], one_group(FULL))
    fill(caches)
    group = read_layout(caches, config)
    assert group.token_major == (layout == "LBNHC")
    assert (namespace(config) == "") == group.token_major
    ids = [7, 2, 3, 4]
    ours = chunks_for(group, 1)
    copier = ChunkCopier(group, make_engines(CPU))
    copier.copy(Direction.STORE, ids, PER_CHUNK, ours)
    copier.close()
    hints = {"kv_layout": "NHD" if layout == "LBNHC" else "HND"}
    theirs = base.gather_paged_kv_to_cpu(caches, ids, PER_CHUNK, layout_hints=hints)
    same = torch.equal(
        ours[0].flatten(), theirs[0].contiguous().view(torch.uint8).flatten()
    )
    assert same == group.token_major


def test_namespaces_are_one_for_scheduler_and_workers():
    names = {
        (layout.name, spec): namespace(registered(layout, one_group(spec))[1])
        for layout, spec in itertools.product(LAYOUTS, (FULL, MLA))
    }
    assert names["LBNHC", FULL] == names["LBNHC", MLA] == ""
    others = [name for (layout, _), name in names.items() if layout != "LBNHC"]
    assert len(set(others)) == len(others)
    assert all(name.startswith("##ttlcache-raw-v1-") for name in others)


def test_our_order_under_lmcaches_name_is_refused():
    """Pages of two sizes: no namespace by the layout's name, yet not LMCache's bytes.

    Padding and kernel blocks change nothing in the order of a stored block.
    """
    padded = registered(KVCacheLayout.LBNHC, one_group(PADDED))
    assert namespace(padded[1]) == ""
    kernel = registered(KVCacheLayout.LBNHC, one_group(LARGE), [16])
    assert read_layout(*padded).token_major
    assert read_layout(*kernel).token_major
    mixed = registered(KVCacheLayout.LBNHC, mixed_group("l0", "l0.index"))
    assert not read_layout(*mixed).token_major
    with pytest.raises(TransferError, match="another order"):
        ChunkCopier.of(*mixed, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.clear(), "no KV tensors"),
        (lambda c: c.pop("l1"), "no KV tensor for"),
        (lambda c: c.update(l1=[c["l1"]]), "not a tensor of blocks"),
        (lambda c: c.update(l1=c["l1"].flatten()[:99]), "not a tensor of blocks"),
        (lambda c: c.update(l1=c["l1"][:5]), "does not count 11 blocks"),
        (lambda c: c.update(l1=c["l1"].transpose(0, 1)), "does not count 11 blocks"),
        (lambda c: c.update(l1=c["l1"][:, :1].expand(-1, 4, -1, -1)), "axes overlap"),
        (lambda c: c.update(l1=c["l0"]), "overlap"),
        (lambda c: c.update(l1=c["l1"].to("meta")), "several devices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_we_cannot_serve_is_refused_with_its_reason(change, reason):
    caches, config = registered(KVCacheLayout.LBNHC, one_group(FULL))
    change(caches)
    with pytest.raises(TransferError, match=reason):
        read_layout(caches, config)


def test_other_devices_have_no_engine():
    with pytest.raises(TransferError, match="xpu"):
        make_engines(torch.device("xpu"))
    if not torch.cuda.is_available():
        with pytest.raises(TransferError, match=r"no CUDA device|cupy"):
            make_engines(torch.device("cuda", 0))


def test_a_failed_copy_is_an_error_and_small_chunks_are_refused():
    caches, config = registered(KVCacheLayout.LBNHC, one_group(FULL))
    copier = ChunkCopier(read_layout(caches, config), make_engines(CPU))
    with pytest.raises(TransferError, match="a chunk of"):
        copier.copy(
            Direction.STORE, [1], PER_CHUNK, [torch.zeros(1, 16, 8, dtype=torch.uint8)]
        )
    with pytest.raises(TransferError, match="block id 99"):
        copier.copy(Direction.STORE, [99], PER_CHUNK, chunks_for(copier.group, 1))
    copier.close()
    with pytest.raises(TransferError, match="closed"):
        copier.copy(Direction.STORE, [1], PER_CHUNK, chunks_for(copier.group, 1))
