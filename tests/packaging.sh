#!/usr/bin/env bash
# packaging.sh BUILD CC: builds and runs two small programs, the C example of README.md and tests/consumer/consumer.cpp,
# against an installed tree through find_package and through pkg-config, shared and static, and against the source tree
# through FetchContent. Run from the root of the source tree.
set -euo pipefail
build=$1 cc=$2 cxx=${CXX:-c++}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
example=$scratch/example.c
warnings=(-Wall -Wextra -Wpedantic -Werror)

sed -n '/^```c$/,/^```$/{/^```/d;p}' README.md >"$example"
test -s "$example" || { echo "README.md has no C example" && exit 1; }

# The two programs in a folder, each run once.
check() {
    echo "-- $1"
    "$2/example" | tee "$scratch/output"
    grep -q '^o\[0\] = ' "$scratch/output"
    "$2/consumer"
}

# A moved tree must work as well as one that lies where it was installed.
cmake --install "$build" --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/prefix"

generator=$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' "$build/CMakeCache.txt")
cmake_build() {
    local name=$1
    shift
    cmake -S tests/consumer -B "$scratch/$name" -G "$generator" -DCMAKE_C_COMPILER="$cc" \
        -DGDELTA_EXAMPLE="$example" "$@" >"$scratch/log" 2>&1 &&
        cmake --build "$scratch/$name" >>"$scratch/log" 2>&1 || { cat "$scratch/log" && exit 1; }
}
for library in gdelta gdelta_static; do
    cmake_build "find_$library" -DCMAKE_PREFIX_PATH="$scratch/prefix" -DGDELTA_LIBRARY=$library
    check "find_package, gdelta::$library" "$scratch/find_$library"
done
cmake_build fetch -DGDELTA_SOURCE="$PWD" -DGDELTA_LIBRARY=gdelta -DGDELTA_CUDA=OFF
check "FetchContent (without CUDA)" "$scratch/fetch"

PKG_CONFIG_PATH=$(dirname "$(find "$scratch/prefix" -name gdelta.pc)")
LD_LIBRARY_PATH=$(pkg-config --variable=libdir "$PKG_CONFIG_PATH/gdelta.pc")
export PKG_CONFIG_PATH LD_LIBRARY_PATH
shared=$(pkg-config --libs gdelta)
static=$(pkg-config --static --libs gdelta | sed 's/-lgdelta/-l:libgdelta.a/')
for libraries in "$shared" "$static"; do
    # shellcheck disable=SC2046,SC2086
    "$cc" -std=c11 "${warnings[@]}" -Wl,-u,gdelta_forward "$example" $(pkg-config --cflags gdelta) $libraries \
        -o "$scratch/example"
    # shellcheck disable=SC2046,SC2086
    "$cxx" -std=c++17 "${warnings[@]}" tests/consumer/consumer.cpp $(pkg-config --cflags gdelta) $libraries \
        -o "$scratch/consumer"
    check "pkg-config, $libraries" "$scratch"
done
