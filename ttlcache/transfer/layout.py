"""Where the bytes of a block are: base addresses, strides, sizes. No tensors.

A block id stands for one *piece* of memory in each *plane*. A plane is what lies at a
constant stride from block to block: a layer for the usual layouts, a layer's head
where heads lie outside blocks, the whole block where all layers of a block adjoin.
Planes of equal pieces at equal distances form a `PlaneGroup`, so that one 2-D copy
moves a block through all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ttlcache.errors import TransferError


@dataclass(frozen=True, slots=True)
class Plane:
    """One piece of `piece_bytes` a block, at `base + block_id * block_stride`."""

    base: int
    block_stride: int
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class PlaneGroup:
    """`rows` planes, `row_pitch` bytes apart, with equal pieces and strides."""

    base: int
    rows: int
    row_pitch: int
    block_stride: int
    piece_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.rows * self.piece_bytes

    @property
    def is_dense(self) -> bool:
        """Whether block b + 1 follows block b without a gap."""
        return self.block_stride == self.piece_bytes


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """All planes of one set of layers that share their block ids."""

    name: str
    num_blocks: int
    groups: tuple[PlaneGroup, ...]

    @property
    def block_bytes(self) -> int:
        return sum(group.block_bytes for group in self.groups)

    def chunk_bytes(self, blocks_per_chunk: int) -> int:
        """Bytes of `blocks_per_chunk` blocks packed as `plan_copies` packs them."""
        return self.block_bytes * blocks_per_chunk

    @classmethod
    def from_planes(
        cls,
        name: str,
        num_blocks: int,
        planes: Sequence[Plane],
    ) -> BlockLayout:
        """Merge planes that adjoin, group those that are equally spaced.

        The order of `planes` is the order of bytes inside a stored block; it must not
        depend on addresses that change from run to run.

        Raises:
            TransferError: no blocks or planes, or pieces of a block that overlap.
        """
        if num_blocks < 1 or not planes:
            raise TransferError(f"{name}: no blocks or no planes")
        for plane in planes:
            if plane.base <= 0 or plane.piece_bytes < 1:
                raise TransferError(f"{name}: null address or empty piece: {plane}")
            if num_blocks > 1 and plane.block_stride < plane.piece_bytes:
                raise TransferError(f"{name}: blocks overlap or run backwards: {plane}")
        _refuse_overlap(name, num_blocks, planes)
        return cls(name, num_blocks, tuple(_group(_merge(planes))))


def planes_of(
    base: int, shape: Sequence[int], strides_bytes: Sequence[int], item_bytes: int
) -> list[Plane]:
    """The planes of one strided array whose first axis counts blocks.

    Args:
        base: address of element 0.
        shape: axis 0 counts blocks, any further axes.
        strides_bytes: of the same length, in bytes.
        item_bytes: size of an element.

    Raises:
        TransferError: elements that share bytes (expanded or reversed axes).
    """
    inner = sorted(
        (stride, size)
        for size, stride in zip(shape[1:], strides_bytes[1:], strict=True)
        if size != 1
    )
    piece = extent = item_bytes
    outer: list[tuple[int, int]] = []
    for stride, size in inner:
        if size < 1 or stride < extent:
            raise TransferError(
                f"axes overlap: shape {tuple(shape)}, strides {tuple(strides_bytes)} "
                f"bytes, elements of {item_bytes} bytes"
            )
        extent += stride * (size - 1)
        if stride == piece and not outer:
            piece *= size
        else:
            outer.append((stride, size))
    steps = [[stride * i for i in range(size)] for stride, size in reversed(outer)]
    return [
        Plane(base + sum(offsets), strides_bytes[0], piece)
        for offsets in itertools.product(*steps)
    ]


def _merge(planes: Sequence[Plane]) -> list[Plane]:
    """Join planes whose pieces adjoin inside every block."""
    merged = [planes[0]]
    for plane in planes[1:]:
        last = merged[-1]
        adjoins = plane.base == last.base + last.piece_bytes
        if adjoins and plane.block_stride == last.block_stride:
            piece_bytes = last.piece_bytes + plane.piece_bytes
            merged[-1] = Plane(last.base, last.block_stride, piece_bytes)
        else:
            merged.append(plane)
    return merged


def _group(planes: Sequence[Plane]) -> list[PlaneGroup]:
    groups: list[PlaneGroup] = []
    for plane in planes:
        last = groups[-1] if groups else None
        shape = (plane.block_stride, plane.piece_bytes)
        if last is not None and shape == (last.block_stride, last.piece_bytes):
            pitch = plane.base - (last.base + (last.rows - 1) * last.row_pitch)
            # A copy engine takes forward pitches only.
            fits = pitch >= plane.piece_bytes
            if fits and (last.rows == 1 or pitch == last.row_pitch):
                groups[-1] = PlaneGroup(last.base, last.rows + 1, pitch, *shape)
                continue
        groups.append(PlaneGroup(plane.base, 1, plane.piece_bytes, *shape))
    return groups


def _refuse_overlap(name: str, num_blocks: int, planes: Sequence[Plane]) -> None:
    """No two pieces of any two blocks may share a byte.

    Planes either lie apart as wholes, or interleave with one common block stride and
    disjoint places within it; nothing else is served.
    """
    cluster: list[Plane] = []
    end = 0
    for plane in sorted(planes, key=lambda plane: plane.base):
        if plane.base >= end:
            _refuse_shared(name, cluster)
            cluster = []
        cluster.append(plane)
        last = plane.base + (num_blocks - 1) * plane.block_stride
        end = max(end, last + plane.piece_bytes)
    _refuse_shared(name, cluster)


def _refuse_shared(name: str, cluster: Sequence[Plane]) -> None:
    if len(cluster) < 2:
        return
    first, stride = cluster[0].base, cluster[0].block_stride
    spans = sorted(((p.base - first) % stride, p.piece_bytes) for p in cluster)
    ends = [start + size for start, size in spans]
    starts = [*(start for start, _ in spans[1:]), stride]
    mixed = any(plane.block_stride != stride for plane in cluster)
    if mixed or any(end > start for end, start in zip(ends, starts, strict=True)):
        raise TransferError(f"{name}: pieces of a block overlap near {first:#x}")
