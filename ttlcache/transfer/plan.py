"""Block ids to copies: few and large, computed in numpy.

Host memory holds blocks in *chunks*: `blocks_per_chunk` blocks packed plane by plane
(all blocks of plane 0, then of plane 1, …), so that a run of adjacent block ids is one
stretch on both sides and one 2-D copy takes it through all planes of a group. For
layer-outermost layouts with tokens outside heads this is the order of LMCache's own
memory objects.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ttlcache.errors import TransferError
from ttlcache.transfer.layout import BlockLayout, PlaneGroup

Addresses = NDArray[np.uint64]
Counts = NDArray[np.int64]


class Direction(enum.Enum):
    """Which way the bytes go."""

    STORE = "store"
    """From the engine's paged memory to host memory."""
    LOAD = "load"
    """From host memory into the engine's paged memory."""


@dataclass(frozen=True)
class Pieces:
    """One-dimensional copies: `size[i]` bytes from `src[i]` to `dst[i]`."""

    src: Addresses
    dst: Addresses
    size: Counts


@dataclass(frozen=True)
class CopyPlan:
    """2-D copies: `rows[i]` rows of `width[i]` bytes, pitches apart on each side.

    All arrays have shape [num_copies]. `owners` are kept alive by the engine until
    the outcome.
    """

    direction: Direction
    src: Addresses
    dst: Addresses
    width: Counts
    rows: Counts
    src_pitch: Counts
    dst_pitch: Counts
    owners: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def num_copies(self) -> int:
        return len(self.src)

    @cached_property
    def num_bytes(self) -> int:
        return int((self.width * self.rows).sum())

    @cached_property
    def num_pieces(self) -> int:
        """Stretches of memory: what a 1-D copy engine has to be told."""
        return int(self.rows.sum())

    @property
    def mean_piece_bytes(self) -> float:
        return self.num_bytes / self.num_pieces if self.num_pieces else 0.0

    @property
    def host(self) -> Addresses:
        """The side in host memory."""
        return self.dst if self.direction is Direction.STORE else self.src

    @property
    def host_pitch(self) -> Counts:
        store = self.direction is Direction.STORE
        return self.dst_pitch if store else self.src_pitch

    @cached_property
    def pieces(self) -> Pieces:
        """Every row as a copy of its own."""
        copy = np.repeat(np.arange(self.num_copies), self.rows)
        first = np.repeat(np.cumsum(self.rows) - self.rows, self.rows)
        row = np.arange(len(copy)) - first
        return Pieces(
            self.src[copy] + (row * self.src_pitch[copy]).astype(np.uint64),
            self.dst[copy] + (row * self.dst_pitch[copy]).astype(np.uint64),
            self.width[copy],
        )

    def parts(self, max_bytes: int) -> Iterator[CopyPlan]:
        """The same copies in plans of up to about twice `max_bytes`, without owners.

        At least one; it may be empty.
        """
        columns = self._cut(max_bytes)
        sizes = columns[2] * columns[3]
        part = (np.cumsum(sizes) - sizes) // max_bytes
        bounds = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(sizes)]
        for first, end in itertools.pairwise(bounds):
            yield CopyPlan(self.direction, *(column[first:end] for column in columns))

    def _cut(self, max_bytes: int) -> tuple[Any, ...]:
        """The columns, larger copies as several: of fewer rows, or of shorter ones."""
        if (self.width * self.rows).max(initial=0) <= max_bytes:
            pitches = self.src_pitch, self.dst_pitch
            return self.src, self.dst, self.width, self.rows, *pitches
        width = np.minimum(self.width, max_bytes)
        across = -(-self.width // width)
        rows = np.where(across > 1, 1, np.maximum(1, max_bytes // width))
        counts = across * -(-self.rows // rows)
        copy = np.repeat(np.arange(self.num_copies), counts)
        step = np.arange(len(copy)) - np.repeat(np.cumsum(counts) - counts, counts)
        row = step // across[copy] * rows[copy]
        column = step % across[copy] * width[copy]
        return (
            self.src[copy] + (row * self.src_pitch[copy] + column).astype(np.uint64),
            self.dst[copy] + (row * self.dst_pitch[copy] + column).astype(np.uint64),
            np.minimum(width[copy], self.width[copy] - column),
            np.minimum(rows[copy], self.rows[copy] - row),
            self.src_pitch[copy],
            self.dst_pitch[copy],
        )


def plan_copies(
    direction: Direction,
    layout: BlockLayout,
    block_ids: ArrayLike,
    chunks: ArrayLike,
    blocks_per_chunk: int,
    *,
    skip_blocks: int = 0,
    owners: tuple[Any, ...] = (),
) -> CopyPlan:
    """Copies of `block_ids[i]` to or from place `i % blocks_per_chunk` of its chunk.

    Args:
        block_ids: shape [n]; a store may name a block twice, a load may not.
        chunks: shape [ceil(n / blocks_per_chunk)], host addresses, each of
            `layout.chunk_bytes(blocks_per_chunk)` bytes.
        skip_blocks: so many leading positions are left alone.

    Cost: O(n) numpy work, one copy per run of adjacent ids and plane group.

    Raises:
        TransferError: an id outside the layout, too few chunks, a null or doubled
            destination.
    """
    ids: Counts = np.asarray(block_ids, dtype=np.int64).reshape(-1)
    bases: Addresses = np.asarray(chunks, dtype=np.uint64).reshape(-1)
    _check(layout, ids, bases, blocks_per_chunk, skip_blocks)
    place: Counts = np.arange(len(ids))
    ids, place = ids[skip_blocks:], place[skip_blocks:]
    _refuse_doubles(direction, ids, bases)
    starts, lengths = _runs(ids, place, blocks_per_chunk)
    run_ids, slot = ids[starts], place[starts] % blocks_per_chunk
    chunk = bases[place[starts] // blocks_per_chunk]
    parts, offset = [], 0
    for group in layout.groups:
        host = chunk + (offset + slot * group.piece_bytes).astype(np.uint64)
        parts.append(_copies(group, run_ids, lengths, host, blocks_per_chunk))
        offset += group.block_bytes * blocks_per_chunk
    paged, host, width, rows, paged_pitch, host_pitch = _flattened(
        *(np.concatenate(columns) for columns in zip(*parts, strict=True))
    )
    if direction is Direction.STORE:
        sides = (paged, host, width, rows, paged_pitch, host_pitch)
    else:
        sides = (host, paged, width, rows, host_pitch, paged_pitch)
    return CopyPlan(direction, *sides, owners)


def _check(
    layout: BlockLayout,
    ids: Counts,
    chunks: Addresses,
    blocks_per_chunk: int,
    skip_blocks: int,
) -> None:
    if blocks_per_chunk < 1 or skip_blocks < 0:
        raise TransferError(
            f"blocks_per_chunk {blocks_per_chunk} < 1 or skip_blocks {skip_blocks} < 0"
        )
    if len(chunks) < -(-len(ids) // blocks_per_chunk):
        raise TransferError(
            f"{len(ids)} blocks need more than {len(chunks)} chunks of "
            f"{blocks_per_chunk} blocks"
        )
    if (chunks == 0).any():
        raise TransferError("null address of a chunk")
    outside = ids[(ids < 0) | (ids >= layout.num_blocks)]
    if len(outside):
        raise TransferError(
            f"block id {outside[0]} outside 0 … {layout.num_blocks - 1} of "
            f"layout {layout.name}"
        )


def _refuse_doubles(direction: Direction, ids: Counts, chunks: Addresses) -> None:
    """Two writers of one place: which one wins would be chance."""
    target = chunks if direction is Direction.STORE else ids
    if len(np.unique(target)) != len(target):
        what = "chunk" if direction is Direction.STORE else "block id"
        raise TransferError(f"a {what} is named twice as destination of a copy")


def _runs(ids: Counts, place: Counts, blocks_per_chunk: int) -> tuple[Counts, Counts]:
    """First index and length of each run of ids that adjoin on both sides."""
    follows = (np.diff(ids) == 1) & (np.diff(place) == 1)
    follows &= place[1:] % blocks_per_chunk != 0
    starts = np.flatnonzero(np.concatenate(([True], ~follows))[: len(ids)])
    return starts, np.diff(np.append(starts, len(ids)))


def _copies(
    group: PlaneGroup,
    ids: Counts,
    lengths: Counts,
    host: Addresses,
    blocks_per_chunk: int,
) -> tuple[Any, ...]:
    """Columns (paged, host, width, rows, paged pitch, host pitch) of one group."""
    paged = np.uint64(group.base) + (ids * group.block_stride).astype(np.uint64)
    piece, host_row = group.piece_bytes, blocks_per_chunk * group.piece_bytes
    if group.is_dense:
        width, rows = lengths * piece, np.full_like(lengths, group.rows)
        pitches = (group.row_pitch, host_row)
    elif group.rows == 1:
        width, rows = np.full_like(lengths, piece), lengths
        pitches = (group.block_stride, piece)
    elif len(ids) * group.rows < lengths.sum():  # long runs: a copy a plane
        plane = np.tile(np.arange(group.rows), len(ids))
        paged = np.repeat(paged, group.rows)
        paged += (plane * group.row_pitch).astype(np.uint64)
        host = np.repeat(host, group.rows) + (plane * host_row).astype(np.uint64)
        rows = np.repeat(lengths, group.rows)
        width = np.full_like(rows, piece)
        pitches = (group.block_stride, piece)
    else:  # short runs: a copy a block
        step = np.arange(lengths.sum()) - np.repeat(
            np.cumsum(lengths) - lengths, lengths
        )
        paged = np.repeat(paged, lengths)
        paged += (step * group.block_stride).astype(np.uint64)
        host = np.repeat(host, lengths) + (step * piece).astype(np.uint64)
        width, rows = np.full_like(step, piece), np.full_like(step, group.rows)
        pitches = (group.row_pitch, host_row)
    return paged, host, width, rows, *(np.full_like(width, p) for p in pitches)


def _flattened(
    paged: Any, host: Any, width: Any, rows: Any, paged_pitch: Any, host_pitch: Any
) -> tuple[Any, ...]:
    """Rows that adjoin on both sides become one; then copies that do, too."""
    solid = rows == 1
    if not solid.all():
        solid |= (paged_pitch == width) & (host_pitch == width)
        width, rows = np.where(solid, width * rows, width), np.where(solid, 1, rows)
    step = width[:-1].astype(np.uint64)
    joins = (paged[:-1] + step == paged[1:]) & (host[:-1] + step == host[1:])
    joins &= solid[:-1] & solid[1:]
    if joins.any():
        first = np.flatnonzero(np.concatenate(([True], ~joins)))
        width = np.add.reduceat(width, first)
        paged, host, rows, solid = paged[first], host[first], rows[first], solid[first]
        paged_pitch, host_pitch = paged_pitch[first], host_pitch[first]
    # A single row has no pitch; its width is the one that every copy API accepts.
    paged_pitch = np.where(solid, width, paged_pitch)
    host_pitch = np.where(solid, width, host_pitch)
    return paged, host, width, rows, paged_pitch, host_pitch
