"""Plans and layouts by hand: few large copies, and clear refusals."""

import numpy as np
import pytest

from ttlcache.errors import TransferError
from ttlcache.transfer import BlockLayout, Direction, PlaneGroup, plan_copies
from ttlcache.transfer.cuda import RUN_BYTES, pack_runs
from ttlcache.transfer.layout import Plane, planes_of

STORE, LOAD = Direction.STORE, Direction.LOAD
PAGE, BLOCKS, LAYERS = 100, 10, 3


def layered(pad=0):
    """Three layers of ten blocks at 1,000,000, one after the other."""
    stride = PAGE + pad
    starts = range(1_000_000, 1_000_000 + LAYERS * BLOCKS * stride, BLOCKS * stride)
    planes = [Plane(start, stride, PAGE) for start in starts]
    return BlockLayout.from_planes("layers", BLOCKS, planes)


def rows(plan):
    names = ("src", "dst", "width", "rows", "src_pitch", "dst_pitch")
    return list(zip(*(getattr(plan, name).tolist() for name in names), strict=True))


def test_a_run_is_one_copy_through_all_layers():
    plan = plan_copies(STORE, layered(), [4, 5, 6], [50_000], 4)
    assert rows(plan) == [(1_000_400, 50_000, 300, 3, 1_000, 400)]
    assert (plan.num_bytes, plan.num_pieces, plan.mean_piece_bytes) == (900, 3, 300)


def test_runs_end_at_gaps_and_at_chunk_borders():
    plan = plan_copies(LOAD, layered(), [4, 5, 6, 8], [50_000, 70_000], 2)
    assert rows(plan) == [
        (50_000, 1_000_400, 200, 3, 200, 1_000),
        (70_000, 1_000_600, 100, 3, 200, 1_000),
        (70_100, 1_000_800, 100, 3, 200, 1_000),
    ]


def test_blocks_of_all_layers_together_merge_over_chunks():
    planes = [
        Plane(1_000_000 + layer * PAGE, LAYERS * PAGE, PAGE) for layer in range(3)
    ]
    together = BlockLayout.from_planes("together", BLOCKS, planes)
    assert together.groups == (PlaneGroup(1_000_000, 1, 300, 300, 300),)
    # Two chunks that adjoin: one copy of four blocks.
    plan = plan_copies(STORE, together, [4, 5, 6, 7], [50_000, 50_600], 2)
    assert rows(plan) == [(1_001_200, 50_000, 1_200, 1, 1_200, 1_200)]


@pytest.mark.parametrize(
    ("ids", "num_copies", "num_rows"), [(range(6), LAYERS, 6), ([0, 2], 2, LAYERS)]
)
def test_padded_pages_go_by_layers_or_by_blocks_whichever_is_less(
    ids, num_copies, num_rows
):
    plan = plan_copies(STORE, layered(pad=28), ids, [50_000], 6)
    assert plan.num_copies == num_copies
    assert set(plan.rows.tolist()) == {num_rows}
    assert plan.num_bytes == len(ids) * LAYERS * PAGE


@pytest.mark.parametrize(
    ("direction", "ids", "chunks", "reason"),
    [
        (STORE, [10], [5], "block id 10 outside 0 … 9"),
        (STORE, [-1], [5], "block id -1"),
        (STORE, [1, 2, 3], [5], "3 blocks need more than 1 chunks of 2 blocks"),
        (STORE, [1], [0], "null address"),
        (STORE, [1, 2, 3], [5, 5], "a chunk is named twice"),
        (LOAD, [1, 2, 1], [5, 500], "a block id is named twice"),
    ],
)
def test_what_would_corrupt_is_refused(direction, ids, chunks, reason):
    with pytest.raises(TransferError, match=reason):
        plan_copies(direction, layered(), ids, chunks, 2)


@pytest.mark.parametrize(("per_chunk", "skip_blocks"), [(0, 0), (2, -1)])
def test_counts_are_checked(per_chunk, skip_blocks):
    with pytest.raises(TransferError):
        plan_copies(STORE, layered(), [1], [5], per_chunk, skip_blocks=skip_blocks)


@pytest.mark.parametrize(
    ("planes", "reason"),
    [
        ([], "no planes"),
        ([Plane(0, 10, 10)], "null address"),
        ([Plane(5, 10, 0)], "empty piece"),
        ([Plane(5, 9, 10)], "blocks overlap"),
        ([Plane(1_000, -10, 10)], "run backwards"),
        ([Plane(1_000, 30, 10), Plane(1_005, 30, 10)], "overlap"),
        ([Plane(1_000, 10, 10), Plane(1_050, 10, 10)], "overlap"),
    ],
)
def test_layouts_that_share_bytes_are_refused(planes, reason):
    with pytest.raises(TransferError, match=reason):
        BlockLayout.from_planes("wrong", BLOCKS, planes)


def test_planes_with_unlike_strides_do_not_merge():
    planes = [Plane(1_000, 10, 10), Plane(1_010, 20, 10)]
    unlike = BlockLayout.from_planes("one", 1, planes)
    assert [g.rows for g in unlike.groups] == [1, 1]


def test_planes_of_a_strided_array():
    data = np.zeros((7, 4, 5, 6), np.uint16)
    assert planes_of(1, data.shape, data.strides, 2) == [Plane(1, 240, 240)]
    turned = data.transpose(0, 2, 1, 3)  # the same bytes in another logical order
    assert planes_of(1, turned.shape, turned.strides, 2) == [Plane(1, 240, 240)]
    part = data[:, 1:3, :, :4]
    found = planes_of(1, part.shape, part.strides, 2)
    bases = [1 + 60 * i + 12 * j for i in range(2) for j in range(5)]
    assert found == [Plane(base, 240, 8) for base in bases]
    for wrong in (data[:, ::-1], np.broadcast_to(data[:, :1], data.shape)):
        with pytest.raises(TransferError, match="axes overlap"):
            planes_of(1, wrong.shape, wrong.strides, 2)


def test_run_records_count_their_tiles():
    plan = plan_copies(STORE, layered(), [4, 5, 6, 9], [50_000], 4)
    runs, num_tiles = pack_runs(plan, tile_bytes=128)
    assert runs.nbytes == 2 * RUN_BYTES
    assert runs[:, -1].tolist() == [0, 9]  # 300 bytes are three tiles a row
    assert num_tiles == 9 + 3


def test_addresses_beyond_the_sign_bit_and_offsets_beyond_32_bits():
    far = BlockLayout.from_planes("far", 3, [Plane(1 << 63, 1 << 40, 64)])
    plan = plan_copies(STORE, far, [2], [(1 << 63) + (1 << 50)], 1)
    assert plan.src.tolist() == [(1 << 63) + (2 << 40)]
    assert plan.pieces.dst.tolist() == [(1 << 63) + (1 << 50)]


def each_byte(plan):
    columns = (plan.pieces.dst, plan.pieces.src, plan.pieces.size)
    return [
        (dst + at, src + at)
        for dst, src, size in zip(*(c.tolist() for c in columns), strict=True)
        for at in range(size)
    ]


@pytest.mark.parametrize("max_bytes", [1, 60, 150, 300, 700, 10_000])
def test_parts_copy_the_same_bytes(max_bytes):
    """Byte by byte: rows cut, copies of few rows, several copies in a part."""
    plan = plan_copies(LOAD, layered(pad=7), [4, 5, 6, 8, 1], [50_000, 70_000], 4)
    parts = list(plan.parts(max_bytes))
    assert all(0 < part.num_bytes < 2 * max_bytes for part in parts)
    assert [pair for part in parts for pair in each_byte(part)] == each_byte(plan)


def test_an_empty_plan_is_one_part():
    (part,) = plan_copies(LOAD, layered(), [], [], 4).parts(100)
    assert part.num_copies == 0
