#!/usr/bin/env bash
# sanitize.sh [BUILD FOLDER]: compute-sanitizer's four tools over small calls of every engine, one line a tool and call,
# GDELTA_SANITIZE_JOBS (default 8) side by side. Needs a GPU and a build; the folder has tests/gdelta-replay and
# bench/gdelta-bench, default build, and in racecheck/ the same with GDELTA_RACECHECK. That is brought up to date where
# the folder is one of CMake's; else it must be there.
# GDELTA_SANITIZE_SECONDS: a call's time limit under a tool, default 120. A call without a verdict counts as a report.
# Exit status: 0 if there were no reports.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
build=${1:-build}
sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer) || {
    echo "sanitize.sh: there is no compute-sanitizer here"
    exit 2
}
if [ -e "$build/CMakeCache.txt" ]; then
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
    cmake -S . -B "$build/racecheck" -G Ninja -DGDELTA_RACECHECK=ON -DGDELTA_CUDA=ON -DGDELTA_INSTALL=OFF \
        "-DCMAKE_CUDA_ARCHITECTURES=${arch/90/90a}-real" >/dev/null &&
        cmake --build "$build/racecheck" --target gdelta-bench gdelta-replay || exit
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# Small shapes: ragged with an empty sequence, a tail after whole chunks, K and V apart, odd sizes, segments, more
# pieces than places in a step, checkpoints, more heads than places in a ring, more chunks than blocks, slices of heads.
replay="$build/tests/gdelta-replay"
bench="$build/bench/gdelta-bench --repeats 1"
calls=(
    "$replay --engine recurrent tests/golden/ragged_with_empty tests/golden/k96_v192 tests/golden/fp32_io"
    "$replay --engine hopper tests/golden/ragged_with_empty tests/golden/one_chunk_plus_tail"
    "$bench --op all --engine recurrent --hq 1 --hv 2 --k 64 --v 64 --seqlens 5,0,70 --batch 3 --tokens 2"
    "$bench --op step --engine recurrent --hq 1 --hv 2 --k 128 --v 128 --batch 3 --tokens 4"
    "$bench --op step --engine recurrent --hq 1 --hv 8 --k 64 --v 64 --batch 180 --tokens 2"
    "$bench --op forward --engine hopper --hq 1 --hv 2 --seqlens 70,0,130"
    "$bench --op forward --engine hopper --hq 1 --hv 1 --seqlens 2048"
    "$bench --op forward --engine hopper --hq 1 --hv 2 --seqlens 70,0,130 --checkpoint-every 64"
    "$bench --op backward --engine hopper --hq 1 --hv 2 --seqlens 70,0,130"
    "$bench --op backward --engine hopper --hq 1 --hv 1 --seqlens 2048"
    "$bench --op backward --engine hopper --hq 1 --hv 8 --seqlens 130"
    "$bench --op backward --engine hopper --hq 8 --hv 8 --seqlens 1340"
    "$bench --op backward --engine hopper --hq 4 --hv 8 --seqlens 70,0,130 --small-workspace"
)
plain="$bench --op backward --engine hopper --hq 1 --hv 2 --seqlens 70,0,130"

# run_call TOOL CALL GOOD: its line and, unless a line of its log matches GOOD, the log's first reports; then a file in
# $logs/reports too. All in one write, for lines of several mix.
run_call() {
    local log status text began=$SECONDS
    log=$(mktemp "$logs/$1.XXXXXX")
    # shellcheck disable=SC2086 # the words of a call
    timeout "${GDELTA_SANITIZE_SECONDS:-120}" "$sanitizer" --tool "$1" $2 >"$log" 2>&1
    status=$?
    text=$(printf '%-9s rc=%d %d s %s: %s' "$1" $status $((SECONDS - began)) \
        "$(grep -o 'SUMMARY: .*' "$log" | tail -n 1)" "${2#"$build"/}")
    # rc 1 is a tolerance of replay or bench, which the tests judge: no report.
    if [ $status -le 1 ] && grep -qE "$3" "$log"; then
        echo "$text"
    else
        echo "$text"$'\n'"$(grep '=========' "$log" | head -n "${GDELTA_SANITIZE_LINES:-12}")"
        touch "$logs/reports/${log##*/}"
    fi
}
export -f run_call
export logs build sanitizer
mkdir "$logs/reports"

# The slowest tool first, its slowest calls, which are the last ones, before the others.
{
    # The plain build races, to racecheck (ring.cuh says why): where it finds nothing there, it looked at nothing.
    printf '%s\0' racecheck "$plain" 'RACECHECK SUMMARY: [1-9]'
    for tool in racecheck memcheck synccheck initcheck; do
        for ((i = ${#calls[@]} - 1; i >= 0; --i)); do
            call=${calls[i]}
            [ $tool = racecheck ] && call=${call/"$build"/"$build/racecheck"}
            printf '%s\0' $tool "$call" 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards'
        done
    done
} | xargs -0 -n 3 -P "${GDELTA_SANITIZE_JOBS:-8}" bash -c 'run_call "$@"' run_call
reports=$(find "$logs/reports" -type f | wc -l)
echo "$reports calls with reports"
[ "$reports" -eq 0 ]
