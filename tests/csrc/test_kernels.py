"""The kernels' device code on the CPU: every item width, tails, 64-bit offsets.

A copy is right when the bytes are, when each byte was stored once and by the widest
item that fits, and when nothing else was touched: only the rows are live memory. Faults
planted in the source have to be found by the same checks.
"""

import ctypes
import mmap
from collections import Counter

import numpy as np
import pytest

from tests.csrc import ptx
from tests.csrc.ptx import DeviceCode, DeviceFault
from tests.faults import faults_of
from ttlcache.transfer.cuda import KERNELS, NVRTC_OPTIONS, TILE_BYTES, source_path
from ttlcache.transfer.plan import Direction

pytestmark = pytest.mark.skipif(bool(ptx.missing()), reason=ptx.missing())
NO_RESERVE = 0x4000  # MAP_NORESERVE: only the pages that are touched exist
SPACE_BYTES, NEAR_BYTES = 10 << 30, 1 << 18
WARPS = 8  # of a thread block
#: Bytes a row, around items, tiles and a warp's 32 lanes x 4 or 8 loads.
ROW_BYTES = (1, 2, 3, 7, 15, 16, 17, 31, 33, 127, 512, 1000, 2047, 4095, 4096, 4097)
ROW_BYTES += (5000, 8192, 9001)


class Space:
    """10 GiB of addresses."""

    def __init__(self):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._bytes = np.frombuffer(mmap.mmap(-1, SPACE_BYTES, flags=flags), np.uint8)
        self.address = self._bytes.ctypes.data

    def fill(self, random, size, start=0):
        self._bytes[start : start + size] = random.integers(0, 256, size, np.uint8)


@pytest.fixture(scope="module")
def spaces():
    return Space(), Space()


def check_copy(code, kernel, runs, ctas, tile_bytes=TILE_BYTES):
    """`runs` are (src, dst, src_pitch, dst_pitch, width, rows)."""
    tiles = [run[5] * -(-run[4] // tile_bytes) for run in runs]
    records = [(*run, sum(tiles[:number])) for number, run in enumerate(runs)]
    rows = [
        (src + row * src_pitch, dst + row * dst_pitch, width)
        for src, dst, src_pitch, dst_pitch, width, rows in runs
        for row in range(rows)
    ]
    stored = launch(code, kernel, records, rows, sum(tiles), ctas, tile_bytes)
    assert stored == widths_of(rows, tile_bytes)


def launch(code, kernel, records, rows, num_tiles, ctas, tile_bytes, first_cta=0):
    """Run thread blocks whose share is `rows`; bytes stored by item width."""
    wanted = [ctypes.string_at(src, size) for src, _, size in rows]
    words = np.array(records, np.uint64)
    live = [(words.ctypes.data, words.nbytes)]
    live += [(at, size) for src, dst, size in rows for at in (src, dst)]
    args = (words.ctypes.data, len(words), num_tiles, tile_bytes)
    stored = code.run(kernel, ctas, args, live, first_cta)
    assert [ctypes.string_at(dst, size) for _, dst, size in rows] == wanted
    return stored


def widths_of(rows, tile_bytes):
    widths = Counter()
    for src, dst, width in rows:
        for start in range(0, width, tile_bytes):
            bits, size = (src + start) | (dst + start), min(tile_bytes, width - start)
            item = min(bits & -bits, 16)
            widths[item] += size // item * item
            widths[1] += size % item
    return {width: num for width, num in widths.items() if num}


def random_runs(random, spaces, align):
    """Up to five runs, one behind the other on both sides, with gaps of their own."""
    ends, runs = [space.address for space in spaces], []
    for _ in range(random.integers(1, 6)):
        width, rows = int(random.choice(ROW_BYTES)), int(random.integers(1, 5))
        gaps = (random.integers(0, 9, 4) * align).tolist()
        pitches = [-(-width // align) * align + gap for gap in gaps[:2]]
        starts = [end + gap + align for end, gap in zip(ends, gaps[2:], strict=True)]
        runs.append((*starts, *pitches, width, rows))
        ends = [at + rows * p for at, p in zip(starts, pitches, strict=True)]
    return runs


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    return DeviceCode(tmp_path_factory.mktemp("csrc"))


@pytest.fixture(params=KERNELS.values())
def kernel(request):
    return request.param


def check_near(code, kernel, spaces):
    """Every item width by alignment, tails, unlike pitches, more and fewer warps."""
    random, seen = np.random.default_rng(0), set()
    for align, ctas in ((16, 1), (8, 3), (4, 1), (2, 3), (1, 1), (16, 40)):
        for tile_bytes in (TILE_BYTES, TILE_BYTES, 256):
            spaces[0].fill(random, NEAR_BYTES)
            runs = random_runs(random, spaces, align)
            check_copy(code, kernel, runs, ctas, tile_bytes)
        # The addresses of one side are aligned for more than the other's.
        near = [(space.address + 4096, 4096) for space in spaces]
        src, dst = near[0][0], near[1][0] + align
        check_copy(code, kernel, [(src, dst, 4096, 4096, 999, 2)], ctas)
        check_copy(code, kernel, [(dst, src, 4096, 4096, 999, 2)], ctas)
        seen.add(align)
    assert seen == set(ptx.WIDTHS)


def check_far(code, kernel, spaces):
    """Pitches, rows, tiles and threads beyond 32 bits."""
    random, pitch = np.random.default_rng(1), (4 << 30) + 64
    a, b = (space.address for space in spaces)
    for row in range(3):
        for space in spaces:
            space.fill(random, 300, row * pitch)
    check_copy(code, kernel, [(a, b, pitch, 4096, 200, 3)], 1)
    check_copy(code, kernel, [(b, a, 4096, pitch, 200, 3)], 1)
    # The last thread block of a large grid: the end of a row of 5 GiB …
    width = (5 << 30) + 100
    spaces[0].fill(random, 9 * TILE_BYTES, width - 9 * TILE_BYTES)
    tiles = -(-width // TILE_BYTES)
    ctas = -(-tiles // WARPS)
    first = (ctas - 1) * WARPS * TILE_BYTES
    rows = [(a + first, b + first, width - first)]
    records = [(a, b, 0, 0, width, 1, 0)]
    launch(code, kernel, records, rows, tiles, ctas, TILE_BYTES, ctas - 1)
    # … and a run whose tiles have numbers beyond 32 bits.
    records, tiles = (
        [(a, b, 0, 0, 1 << 45, 1, 0), (a, b, 0, 0, 333, 1, 1 << 33)],
        1 << 33,
    )
    ctas = tiles // WARPS + 1
    rows = [(a, b, 333)]
    launch(code, kernel, records, rows, tiles + 1, ctas, TILE_BYTES, ctas - 1)


@pytest.mark.parametrize("check", [check_near, check_far])
def test_items_of_every_width_tails_and_offsets_beyond_32_bits(
    check, code, kernel, spaces
):
    check(code, kernel, spaces)


FAULTS = faults_of("""
items wider than the alignment: low % 16 == 0 -> low % 8 == 0
pairs for odd addresses: low % 2 == 0 -> low % 2 == 1
alignment of one side only: low = dst | src -> low = dst
items narrower than they could be: low % 8 == 0 -> low % 32 == 0
one item too many: body / 4, lane -> body / 4 + 1, lane
a tile too many: (run.width + tile_bytes - 1) / tile_bytes -> run.width / tile_bytes + 1
a tile too few: tile < num_tiles -> tile < num_tiles - 1
a tail one short: bytes - body, lane -> bytes - body - 1, lane
a tail from the start: src + body -> src
a tile beyond its row: ? run.width - start : tile_bytes -> ? tile_bytes : tile_bytes
a lane too few: thread % kLanes -> thread % 31
lanes from 1: first = lane; -> first = lane + 1;
lanes that do the same: first = lane; -> first = 0;
rounds of one load: first += kLanes * depth -> first += kLanes
no guard on the loads: if (at < count) held -> held
no guard on the stores: if (at < count) __stcs -> __stcs
every warp from its tile on: tile += num_warps -> tile += 1
a warp too many: tile += num_warps -> tile += num_warps + 1
the other side's pitch: row * run.src_pitch -> row * run.dst_pitch
always the first row: i64 row = (tile - run.first_tile) -> i64 row = 0
tiles counted from 0: (tile - run.first_tile) / -> tile /
the run before: first_tile <= tile -> first_tile < tile
the search does not end: (low + high + 1) / 2 -> (low + high) / 2
source offset of 32 bits: row * run.src_pitch -> (int)(row * run.src_pitch)
target offset of 32 bits: row * run.dst_pitch -> (unsigned)(row * run.dst_pitch)
place in the row of 32 bits: i64 start = -> unsigned start =
thread number of 32 bits: static_cast<i64>(blockIdx.x) * -> blockIdx.x *
tile number of 32 bits: i64 tile = thread -> unsigned tile = thread
""")
FAULTS["swapped sides"] = (
    "copy_tile<depth>(run.dst + row * run.dst_pitch + start,\n"
    "                         run.src + row * run.src_pitch + start",
    "copy_tile<depth>(run.src + row * run.src_pitch + start,\n"
    "                         run.dst + row * run.dst_pitch + start",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path, spaces):
    right, wrong = FAULTS[fault]
    # One kernel, and two loads a lane: it compiles in a third of the time.
    source = source_path().read_text().partition("// Host to paged")[0]
    source = source.replace("copy_runs<4>", "copy_runs<2>")
    assert source.count(right) == 1
    code = DeviceCode(tmp_path, source.replace(right, wrong), optimise=False)
    checks = (check_near, check_far)
    with pytest.raises((AssertionError, DeviceFault)):
        all(check(code, KERNELS[Direction.STORE], spaces) is None for check in checks)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_kernel_compiles_for_the_gpus_that_we_name(arch):
    options = (*NVRTC_OPTIONS, f"--gpu-architecture=sm_{arch}", "-Werror=all-warnings")
    cubin, log = ptx.compiled(source_path().read_text(), options)
    assert log.strip("\0 \n") == ""
    assert cubin[:4] == b"\x7fELF"
    for name in KERNELS.values():
        assert f".text.{name}".encode() in cubin
