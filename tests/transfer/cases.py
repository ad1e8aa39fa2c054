"""Random layouts and block lists with their expected bytes, computed plainly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ttlcache.transfer.layout import BlockLayout, Plane
from ttlcache.transfer.plan import CopyPlan, Direction, plan_copies

Bytes = NDArray[np.uint8]
ARENA_BYTES = 1 << 20
PIECES = st.one_of(st.integers(1, 300), st.sampled_from([16, 64, 1024, 4096, 5000]))
ARRANGEMENTS = ("layers outside", "blocks outside", "padded", "scattered", "mixed")


@dataclass(frozen=True)
class Case:
    """A plan's input. `planes` are (offset in the paged arena, stride, piece bytes)."""

    direction: Direction
    planes: tuple[tuple[int, int, int], ...]
    num_blocks: int
    ids: tuple[int, ...]
    blocks_per_chunk: int
    chunk_offsets: tuple[int, ...]
    paged_address: int
    host_address: int
    skip_blocks: int = 0
    seed: int = 0

    def plan(self, owners: tuple[Any, ...] = ()) -> CopyPlan:
        planes = [Plane(self.paged_address + b, s, p) for b, s, p in self.planes]
        return plan_copies(
            self.direction,
            BlockLayout.from_planes("case", self.num_blocks, planes),
            self.ids,
            [self.host_address + offset for offset in self.chunk_offsets],
            self.blocks_per_chunk,
            skip_blocks=self.skip_blocks,
            owners=owners,
        )

    @property
    def moved(self) -> list[tuple[int, int]]:
        """(position, block id) of each block that is copied."""
        return list(enumerate(self.ids))[self.skip_blocks :]

    @property
    def num_bytes(self) -> int:
        return len(self.moved) * sum(piece for _, _, piece in self.planes)

    @property
    def _joined(self) -> list[tuple[int, int, int]]:
        """Planes that adjoin inside every block count as one."""
        joined = [self.planes[0]]
        for base, stride, piece in self.planes[1:]:
            before, same, size = joined[-1]
            if base == before + size and stride == same:
                joined[-1] = (before, stride, size + piece)
            else:
                joined.append((base, stride, piece))
        return joined

    def expected(self, paged: Bytes, host: Bytes) -> tuple[Bytes, Bytes]:
        """Both sides afterwards: block by block, plane by plane, no planner."""
        paged, host = paged.copy(), host.copy()
        for at, block in self.moved:
            chunk, slot = divmod(at, self.blocks_per_chunk)
            place = self.chunk_offsets[chunk]
            for base, stride, piece in self._joined:
                here = slice(base + block * stride, base + block * stride + piece)
                start = place + slot * piece
                there = slice(start, start + piece)
                if self.direction is Direction.STORE:
                    host[there] = paged[here]
                else:
                    paged[here] = host[there]
                place += self.blocks_per_chunk * piece
        return paged, host


def example_case(
    paged_address, host_address, ids=(3, 4, 5, 9, 1), direction=Direction.STORE
):
    """Three layers of 12 blocks of 1,040 bytes, in chunks of two blocks."""
    planes = tuple((layer * 16_384, 1_040, 1_040) for layer in range(3))
    offsets = tuple(place * 8_192 for place in range(-(-len(ids) // 2)))
    sides = (paged_address, host_address)
    return Case(direction, planes, 12, tuple(ids), 2, offsets, *sides)


@st.composite
def cases(draw: st.DrawFn, paged_address: int, host_address: int) -> Case:
    """Layouts of every arrangement; odd sizes; adjacent and repeated ids."""
    num_blocks = draw(st.integers(1, 12))
    planes = draw(_planes(num_blocks))
    direction = draw(st.sampled_from(Direction))
    ids = draw(_ids(num_blocks, direction is Direction.LOAD))
    blocks_per_chunk = draw(st.integers(1, 5))
    chunk_bytes = blocks_per_chunk * sum(piece for _, _, piece in planes)
    gap = draw(st.sampled_from([0, 0, 1, 7, 16, 4096]))
    num_chunks = -(-len(ids) // blocks_per_chunk)
    places = draw(st.permutations(range(num_chunks)))
    lead = draw(st.integers(0, 17))
    return Case(
        direction,
        planes,
        num_blocks,
        tuple(ids),
        blocks_per_chunk,
        tuple(lead + place * (chunk_bytes + gap) for place in places),
        paged_address,
        host_address,
        skip_blocks=draw(st.sampled_from([0, 0, 1, 3])),
        seed=draw(st.integers(0, 5)),
    )


@st.composite
def _planes(draw: st.DrawFn, num_blocks: int) -> tuple[tuple[int, int, int], ...]:
    arrangement = draw(st.sampled_from(ARRANGEMENTS))
    count, piece = draw(st.integers(1, 5)), draw(PIECES)
    lead = draw(st.integers(0, 17))
    if arrangement == "blocks outside":
        stride = count * piece + draw(st.sampled_from([0, 0, 32]))
        return tuple((lead + i * piece, stride, piece) for i in range(count))
    if arrangement == "mixed":
        pieces = [draw(PIECES) for _ in range(count)]
    else:
        pieces = [piece] * count
    pad = draw(st.integers(1, 64)) if arrangement == "padded" else 0
    gap = draw(st.integers(0, 40)) if arrangement == "layers outside" else 0
    planes, at = [], lead
    for size in pieces:
        planes.append((at, size + pad, size))
        at += num_blocks * (size + pad) + gap
        if arrangement == "scattered":
            at += draw(st.integers(0, 99))
    if arrangement == "scattered":
        planes = list(draw(st.permutations(planes)))
    return tuple(planes)


def _ids(num_blocks: int, unique: bool) -> st.SearchStrategy[list[int]]:
    """Single blocks and stretches of adjacent ones, in any order."""
    block = st.integers(0, num_blocks - 1)
    stretch = st.tuples(block, st.integers(1, 6)).map(
        lambda run: [b for b in range(run[0], run[0] + run[1]) if b < num_blocks]
    )
    joined = st.lists(stretch, max_size=4).map(
        lambda runs: [b for run in runs for b in run]
    )
    return joined.map(lambda ids: list(dict.fromkeys(ids))) if unique else joined
