// Copies runs of strided memory: what a copy engine is too slow for when pieces are
// small. Raw addresses, strides and counts; no torch, no Python, no CUDA headers.
//
// Compiled at run time (NVRTC) for the device at hand, and as plain C++ (any host
// compiler) for tests: the host build walks the same warps and lanes one by one, so
// that it checks the index arithmetic of the device build.
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

struct alignas(16) Wide16 {
    u64 low, high;
};

#if defined(__CUDACC__)
#define TTLCACHE_DEVICE __device__ __forceinline__
#define TTLCACHE_UNROLL _Pragma("unroll")
// Each byte is touched once: keep it out of the way of the model's working set.
TTLCACHE_DEVICE Wide16 load_once(const Wide16* at) {
    ulonglong2 both = __ldcs(reinterpret_cast<const ulonglong2*>(at));
    return Wide16{both.x, both.y};
}
TTLCACHE_DEVICE void store_once(Wide16* at, Wide16 value) {
    __stcs(reinterpret_cast<ulonglong2*>(at), make_ulonglong2(value.low, value.high));
}
#else
#define TTLCACHE_DEVICE static inline
#define TTLCACHE_UNROLL
// A device faults on what most hosts forgive: count it and copy nothing.
static i64 misaligned_items = 0;
extern "C" i64 ttlcache_misaligned() { return misaligned_items; }
TTLCACHE_DEVICE Wide16 load_once(const Wide16* at) { return *at; }
TTLCACHE_DEVICE void store_once(Wide16* at, Wide16 value) { *at = value; }
#endif

template <typename T>
TTLCACHE_DEVICE T load_once(const T* at) {
    return *at;
}
template <typename T>
TTLCACHE_DEVICE void store_once(T* at, T value) {
    *at = value;
}

// `depth` loads of a lane are under way before its first store: over a host link a
// load takes microseconds.
template <typename T, int depth>
TTLCACHE_DEVICE void copy_items(u64 dst, u64 src, i64 count, int lane, int lanes) {
    const T* from = reinterpret_cast<const T*>(src);
    T* to = reinterpret_cast<T*>(dst);
#if !defined(__CUDACC__)
    if ((dst | src) % sizeof(T) != 0) {
        misaligned_items += count;
        return;
    }
#endif
    for (i64 first = lane; first < count; first += static_cast<i64>(lanes) * depth) {
        T held[depth];
        TTLCACHE_UNROLL
        for (int k = 0; k < depth; ++k) {
            i64 at = first + static_cast<i64>(k) * lanes;
            if (at < count) held[k] = load_once(from + at);
        }
        TTLCACHE_UNROLL
        for (int k = 0; k < depth; ++k) {
            i64 at = first + static_cast<i64>(k) * lanes;
            if (at < count) store_once(to + at, held[k]);
        }
    }
}

// The widest items that both addresses are aligned for, then the bytes left over.
template <int depth>
TTLCACHE_DEVICE void copy_tile(u64 dst, u64 src, i64 bytes, int lane, int lanes) {
    u64 low = dst | src;
    i64 body = 0;
    if (low % 16 == 0) {
        body = bytes / 16 * 16;
        copy_items<Wide16, depth>(dst, src, body / 16, lane, lanes);
    } else if (low % 8 == 0) {
        body = bytes / 8 * 8;
        copy_items<u64, depth>(dst, src, body / 8, lane, lanes);
    } else if (low % 4 == 0) {
        body = bytes / 4 * 4;
        copy_items<unsigned int, depth>(dst, src, body / 4, lane, lanes);
    }
    copy_items<unsigned char, depth>(dst + body, src + body, bytes - body, lane, lanes);
}

// The last run whose first tile is not after `tile`.
TTLCACHE_DEVICE i64 run_of(const Run* runs, i64 num_runs, i64 tile) {
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
TTLCACHE_DEVICE void copy_runs(const Run* runs, i64 num_runs, i64 num_tiles,
                               i64 tile_bytes, i64 warp, i64 num_warps, int lane,
                               int lanes) {
    for (i64 tile = warp; tile < num_tiles; tile += num_warps) {
        const Run run = runs[run_of(runs, num_runs, tile)];
        i64 tiles_per_row = (run.width + tile_bytes - 1) / tile_bytes;
        i64 row = (tile - run.first_tile) / tiles_per_row;
        i64 start = (tile - run.first_tile) % tiles_per_row * tile_bytes;
        i64 bytes = run.width - start < tile_bytes ? run.width - start : tile_bytes;
        copy_tile<depth>(run.dst + row * run.dst_pitch + start,
                         run.src + row * run.src_pitch + start, bytes, lane, lanes);
    }
}

#if defined(__CUDACC__)
#define TTLCACHE_KERNEL(name, depth)                                              \
    extern "C" __global__ void __launch_bounds__(256)                             \
        name(const Run* runs, i64 num_runs, i64 num_tiles, i64 tile_bytes) {      \
        i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;     \
        i64 num_warps = static_cast<i64>(gridDim.x) * blockDim.x / 32;            \
        copy_runs<depth>(runs, num_runs, num_tiles, tile_bytes, thread / 32,      \
                         num_warps, static_cast<int>(thread % 32), 32);           \
    }
#else
#define TTLCACHE_KERNEL(name, depth)                                              \
    extern "C" void name##_host(const Run* runs, i64 num_runs, i64 num_tiles,     \
                                i64 tile_bytes, i64 num_warps) {                  \
        for (i64 warp = 0; warp < num_warps; ++warp)                              \
            for (int lane = 0; lane < 32; ++lane)                                 \
                copy_runs<depth>(runs, num_runs, num_tiles, tile_bytes, warp,     \
                                 num_warps, lane, 32);                            \
    }
#endif

// Paged device memory to host: loads are quick, stores over the link are posted.
TTLCACHE_KERNEL(ttlcache_gather, 4)
// Host to paged device memory: hide the link's latency behind eight loads a lane.
TTLCACHE_KERNEL(ttlcache_scatter, 8)
