// Copies runs of strided memory: what a copy engine is too slow for when pieces are
// small. Raw addresses, strides and counts; no torch, no Python, no CUDA headers.
// Compiled at run time (NVRTC) for the device at hand; tests run its PTX on the CPU.
//
// A run is `rows` rows of `width` bytes. Rows are cut into tiles of `tile_bytes`; a
// warp takes a tile, then the next one `num_warps` further. All offsets are 64 bit:
// KV pools are larger than 4 GiB.

typedef unsigned long long u64;
typedef long long i64;

struct Run {
    u64 src;
    u64 dst;
    i64 src_pitch;
    i64 dst_pitch;
    i64 width;
    i64 rows;
    i64 first_tile;  // tiles of all runs before this one
};

constexpr int kLanes = 32;

// Each byte is touched once (.cs): keep it out of the way of the model's working set.
// `depth` loads of a lane are under way before its first store: over a host link a
// load takes microseconds.
template <typename T, int depth>
__device__ __forceinline__ void copy_items(u64 dst, u64 src, i64 count, int lane) {
    const T* from = reinterpret_cast<const T*>(src);
    T* to = reinterpret_cast<T*>(dst);
    for (i64 first = lane; first < count; first += kLanes * depth) {
        T held[depth];
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            i64 at = first + k * kLanes;
            if (at < count) held[k] = __ldcs(from + at);
        }
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            i64 at = first + k * kLanes;
            if (at < count) __stcs(to + at, held[k]);
        }
    }
}

// The widest items that both addresses are aligned for, then the bytes left over.
template <int depth>
__device__ __forceinline__ void copy_tile(u64 dst, u64 src, i64 bytes, int lane) {
    u64 low = dst | src;
    i64 body = 0;
    if (low % 16 == 0) {
        body = bytes / 16 * 16;
        copy_items<ulonglong2, depth>(dst, src, body / 16, lane);
    } else if (low % 8 == 0) {
        body = bytes / 8 * 8;
        copy_items<u64, depth>(dst, src, body / 8, lane);
    } else if (low % 4 == 0) {
        body = bytes / 4 * 4;
        copy_items<unsigned int, depth>(dst, src, body / 4, lane);
    } else if (low % 2 == 0) {
        body = bytes / 2 * 2;
        copy_items<unsigned short, depth>(dst, src, body / 2, lane);
    }
    copy_items<unsigned char, depth>(dst + body, src + body, bytes - body, lane);
}

// The last run whose first tile is not after `tile`.
__device__ __forceinline__ i64 run_of(const Run* runs, i64 num_runs, i64 tile) {
    i64 low = 0, high = num_runs - 1;
    while (low < high) {
        i64 middle = (low + high + 1) / 2;
        if (runs[middle].first_tile <= tile) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

template <int depth>
__device__ __forceinline__ void copy_runs(const Run* runs, i64 num_runs, i64 num_tiles,
                                          i64 tile_bytes) {
    i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    i64 num_warps = static_cast<i64>(gridDim.x) * blockDim.x / kLanes;
    int lane = static_cast<int>(thread % kLanes);
    for (i64 tile = thread / kLanes; tile < num_tiles; tile += num_warps) {
        const Run run = runs[run_of(runs, num_runs, tile)];
        i64 tiles_per_row = (run.width + tile_bytes - 1) / tile_bytes;
        i64 row = (tile - run.first_tile) / tiles_per_row;
        i64 start = (tile - run.first_tile) % tiles_per_row * tile_bytes;
        i64 bytes = run.width - start < tile_bytes ? run.width - start : tile_bytes;
        copy_tile<depth>(run.dst + row * run.dst_pitch + start,
                         run.src + row * run.src_pitch + start, bytes, lane);
    }
}

// Paged device memory to host: loads are quick, stores over the link are posted.
extern "C" __global__ void __launch_bounds__(256)
    ttlcache_gather(const Run* runs, i64 num_runs, i64 num_tiles, i64 tile_bytes) {
    copy_runs<4>(runs, num_runs, num_tiles, tile_bytes);
}

// Host to paged device memory: hide the link's latency behind eight loads a lane.
extern "C" __global__ void __launch_bounds__(256)
    ttlcache_scatter(const Run* runs, i64 num_runs, i64 num_tiles, i64 tile_bytes) {
    copy_runs<8>(runs, num_runs, num_tiles, tile_bytes);
}
