#!/usr/bin/env bash
# fuzz.sh [SECONDS [LIBFUZZER OPTIONS]]: builds tests/fuzz/ with clang, address and undefined behaviour sanitizers into
# build/fuzz, and runs it, 60 seconds by default. What it finds is left as build/fuzz/crash-*; build/fuzz/fuzz_host runs
# such a file again.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true
cc=$(command -v clang-14 || command -v clang) || {
    echo "fuzz.sh: clang is needed (Debian and Ubuntu: clang-14 and libclang-rt-14-dev)"
    exit 2
}
cmake -S . -B build/fuzz -G Ninja -DCMAKE_C_COMPILER="$cc" -DGDELTA_FUZZ=ON -DGDELTA_CUDA=OFF -DGDELTA_OPENMP=OFF \
    -DGDELTA_BUILD_TESTS=OFF -DGDELTA_BUILD_BENCH=OFF -DGDELTA_INSTALL=OFF
cmake --build build/fuzz --target fuzz_host
mkdir -p build/fuzz/corpus
# The end of the output says how many inputs were run.
build/fuzz/fuzz_host -max_total_time="$seconds" -max_len=2048 -len_control=0 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix=build/fuzz/ build/fuzz/corpus "$@"
