#!/usr/bin/env bash
# run.sh [GDELTA-BENCH OPTIONS]: the main job. One Qwen3.5 layer, forward, backward and step, timed and checked against
# the CPU reference: on the GPU if there is one, else on the CPU reference with fewer tokens.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/prepare.sh -DGDELTA_BUILD_BENCH=ON

without=""
grep -q '^GDELTA_HAVE_CUDA:INTERNAL=TRUE' build/CMakeCache.txt || without="the kernels were not built (no nvcc 12.8)"
nvidia-smi -L 2>/dev/null | grep -q '^GPU' || without=${without:-"no GPU was found"}
if [ -n "$without" ]; then
    echo
    echo "**** CPU ONLY: $without. The CPU reference runs instead, with fewer tokens; no time below is a GPU's."
    size=(--engine reference --seqlens 1x512 --batch 4)
else
    size=(--engine auto --seqlens 1x8192 --batch 128)
fi
echo
build/bench/gdelta-bench --op all --hq 16 --hv 32 --k 128 --v 128 --dtype bf16 "${size[@]}" --check "$@"
