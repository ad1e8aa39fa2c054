#!/bin/bash
# bash boot.sh [arguments of `bench gpu`]: unpacks the bundle once and runs the stages.
# Results: gpu-results.tar.gz in $OUT, else here; one that lies here is resumed.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=${TTLCACHE_GPU_ROOT:-/tmp/ttlcache-gpu}
results=$root/results
if [ ! -f "$root/.unpacked" ]; then
    mkdir -p "$results"
    python3 - "$here/bundle.tar.xz" "$root" <<'P'
import sys, tarfile
with tarfile.open(sys.argv[1]) as bundle:
    bundle.extractall(sys.argv[2], filter="fully_trusted")
P
    [ ! -f "$here/gpu-results.tar.gz" ] || tar -C "$results" -xzf "$here/gpu-results.tar.gz"
    python3 -m compileall -q -j 0 "$root/site" "$root/checkout" >/dev/null || true
    touch "$root/.unpacked"
fi
export PYTHONPATH=$root/checkout:$root/checkout/connector:$root/site${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export TOKENIZERS_PARALLELISM=false CUDA_MODULE_LOADING=LAZY PYTHONUNBUFFERED=1
# one process a GPU and no network
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
# kernels that are not in the bundle
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_MOE_USE_DEEP_GEMM=0
torch=$(python3 -c 'import importlib.util as u; print(*u.find_spec("torch").submodule_search_locations)')
if ! grep -q NotImplementedErrorC1ENS_14SourceLocation "$torch/lib/libc10.so"; then
    export LD_LIBRARY_PATH=$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_PRELOAD=$root/lmcache_shim.so
fi
for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib; do # not always known to the loader
    [ ! -e $folder/libcuda.so.1 ] || export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
done
cd "$root/checkout"
pack() {
    tar -C "$results" --exclude 'model-*' --exclude disk -czf "$root/packed" . &&
        cp "$root/packed" "${OUT:-$here}/gpu-results.tar.gz"
}
# Ends, packed, before a lender's limit of ten minutes does.
python3 -m bench gpu --out "$results" --limit-s 480 "$@" &
while kill -0 $! 2>/dev/null; do
    sleep 10
    pack || true
done
status=0
wait $! || status=$?
pack
exit $status
