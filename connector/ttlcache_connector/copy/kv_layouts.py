"""vLLM's KV tensors as addresses and strides, for our transfer path.

vLLM places layer `l` of block `b` in one buffer at constant strides and hands out a
view `[block, head, token, content]` a layer; the physical order of these axes and of
the layers is the layout ("LBNHC": layer, block, token, head, content). We read the
strides of the views themselves, so every order is served as long as a block is the
first axis and no bytes are shared. What does not fit is refused with its reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ttlcache.errors import TransferError
from ttlcache.transfer.layout import BlockLayout, Plane, planes_of

if TYPE_CHECKING:
    import torch

#: Raise when the order of bytes in a stored block changes.
FORMAT_VERSION = 1
#: The layout whose chunks have LMCache's own order of bytes.
LMCACHE_ORDER = "LBNHC"


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group: layers that share their block ids."""

    layout: BlockLayout
    token_major: bool
    """Whether a stored chunk is [layer, token, head x content]: LMCache's own order."""


def read_layout(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any
) -> GroupLayout:
    """The layout of the one transferable group of vLLM's `register_kv_caches`.

    Args:
        kv_caches: layer name to view.
        kv_cache_config: vLLM's KVCacheConfig.

    Raises:
        TransferError: a layout that our path does not serve, or several groups, whose
            chunks have no common blocks; the text says which layer and why.
    """
    if not kv_caches:
        raise TransferError("vLLM registered no KV tensors")
    devices = {str(c.device) for c in kv_caches.values() if hasattr(c, "device")}
    if len(devices) != 1:
        raise TransferError(f"KV tensors on several devices: {sorted(devices)}")
    groups = kv_cache_config.kv_cache_groups
    moved = [g for g in groups if getattr(g, "enable_kv_transfer", True)]
    if len(moved) != 1:
        raise TransferError(f"{len(moved)} KV cache groups, our path serves one")
    return _read_group(moved[0], kv_caches, kv_cache_config)


def whole_blocks(kv_caches: Mapping[str, Any], num_blocks: int) -> BlockLayout:
    """All bytes of a block id, whichever cache group it is allocated to.

    Layers of several groups share memory, so their views overlap; the order of bytes
    holds for this process only.

    Args:
        kv_caches: layer name to view, or to the views of a layer with several states.

    Raises:
        TransferError: a layout that our path does not serve; the text says why.
    """
    views = [
        _View.of(name, cache, num_blocks)
        for name, caches in kv_caches.items()
        for cache in (caches if isinstance(caches, list | tuple) else (caches,))
    ]
    if not views:
        raise TransferError("vLLM registered no KV tensors")
    planes = sorted(
        {plane for view in views for plane in view.planes},
        key=attrgetter("base", "block_stride"),
    )
    union = [planes[0]]
    for plane in planes[1:]:
        last = union[-1]
        end = last.base + last.piece_bytes
        if plane.block_stride == last.block_stride and plane.base < end:
            size = max(end, plane.base + plane.piece_bytes) - last.base
            union[-1] = replace(last, piece_bytes=size)
        else:
            union.append(plane)
    return BlockLayout.from_planes("whole blocks", num_blocks, union)


def namespace(kv_cache_config: Any) -> str:
    """Suffix for a cache's model name under which our blocks are stored.

    From the configuration alone, which scheduler and workers share. Empty for vLLM's
    default on CUDA, whose order of bytes is LMCache's own; elsewhere LMCache orders
    tokens before heads and our blocks must not be taken for its.

    Which model it is need not be told: LMCache's keys begin with the path that vLLM was
    started with, and hold the rank and the number of ranks. They hold no dtype; the
    digest does, and where there is none it is as with LMCache alone.
    """
    name = _layout_name(kv_cache_config)
    if name == LMCACHE_ORDER:
        return ""
    specs = [
        (type(spec).__name__, spec.block_size, spec.page_size_bytes, str(dtype))
        for spec in map(_first_spec, kv_cache_config.kv_cache_groups)
        for dtype in [getattr(spec, "dtype", None)]
    ]
    digest = hashlib.blake2b(repr(specs).encode(), digest_size=4).hexdigest()
    return f"##ttlcache-raw-v{FORMAT_VERSION}-{name}-{digest}"


def _first_spec(group: Any) -> Any:
    """The group's spec as the scheduler sees it: one of several like it."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return next(iter(specs.values())) if specs else group.kv_cache_spec


def _layout_name(kv_cache_config: Any) -> str:
    name = getattr(kv_cache_config, "kv_cache_layout", None) or "unnamed"
    return str(getattr(name, "name", name))


def _read_group(
    group: Any, kv_caches: Mapping[str, torch.Tensor], config: Any
) -> GroupLayout:
    if getattr(group, "host_resident", False):
        raise TransferError("its blocks lie in host memory")
    names = tuple(group.layer_names)
    missing = [name for name in names if name not in kv_caches]
    if missing or not names:
        raise TransferError(f"no KV tensor for {missing or 'layers'}")
    views = [_View.of(name, kv_caches[name], config.num_blocks) for name in names]
    planes = _in_order(views)
    layout = BlockLayout.from_planes(
        _layout_name(config),
        config.num_blocks,
        planes,
    )
    token_major = len(planes) == len(views) == sum(g.rows for g in layout.groups)
    token_major &= all(view.is_token_major for view in views)
    token_major &= len({view.shape for view in views}) == 1
    return GroupLayout(layout, token_major)


@dataclass(frozen=True, slots=True)
class _View:
    """A layer's KV tensor with manager blocks as first axis; strides in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    planes: tuple[Plane, ...]

    @classmethod
    def of(cls, name: str, cache: Any, num_blocks: int) -> _View:
        """
        Raises:
            TransferError: not a tensor of blocks, or shared bytes inside a block.
        """
        shape = tuple(getattr(cache, "shape", ()))
        if len(shape) < 2:
            raise TransferError(
                f"layer {name}: {type(cache).__name__} of shape {shape}, "
                "not a tensor of blocks"
            )
        if shape[0] == 0 or shape[0] % num_blocks:
            raise TransferError(
                f"layer {name}: first axis of {shape} does not count "
                f"{num_blocks} blocks"
            )
        item_bytes = cache.element_size()
        strides = tuple(stride * item_bytes for stride in cache.stride())
        ratio = shape[0] // num_blocks
        if ratio > 1:  # a block is several kernel blocks, one after the other
            shape = (num_blocks, ratio, *shape[1:])
            strides = (ratio * strides[0], *strides)
        try:
            found = planes_of(cache.data_ptr(), shape, strides, item_bytes)
            planes = tuple(found)
        except TransferError as error:
            raise TransferError(f"layer {name}: {error}") from error
        storage = cache.untyped_storage().data_ptr()
        return cls(shape, strides, storage, planes)

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes inside a block, outermost in memory first; those of size 1 left out."""
        inner = [a for a in range(1, len(self.shape)) if self.shape[a] != 1]
        return tuple(sorted(inner, key=lambda a: -self.strides[a]))

    @property
    def is_token_major(self) -> bool:
        """[token, head, content] in one piece: LMCache's order of a block."""
        order: tuple[int, ...]
        if len(self.shape) == 5:  # (block, kernel block, head, token, content)
            order = (1, 3, 2, 4)
        elif len(self.shape) == 4:
            order = (2, 1, 3)
        else:
            return False
        expected = tuple(axis for axis in order if self.shape[axis] != 1)
        return self.axes == expected and len(self.planes) == 1


def _in_order(views: Sequence[_View]) -> list[Plane]:
    """Layer by layer; where all layers of a block lie within one stride, as in memory.

    Their order in memory is part of the layout then, and sorted they merge.
    """
    planes = [plane for view in views for plane in view.planes]
    if _is_block_outermost(views, planes):
        planes.sort(key=lambda plane: plane.base)
    return planes


def _is_block_outermost(views: Sequence[_View], planes: Sequence[Plane]) -> bool:
    strides = {plane.block_stride for plane in planes}
    if len({view.storage for view in views}) != 1 or len(strides) != 1:
        return False
    first = min(plane.base for plane in planes)
    return max(p.base + p.piece_bytes for p in planes) - first <= strides.pop()
