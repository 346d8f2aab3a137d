#!/usr/bin/env bash
# prepare.sh [CMAKE OPTIONS]: installs what is missing (Debian 12, Ubuntu 24.04) and builds into build/.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need cc gcc
need c++ g++
need cmake cmake
need ninja ninja-build
need pkg-config pkg-config
need clang-format-14 clang-format-14 # scripts/check.sh: the format differs between versions
need clang-14 clang-14             # scripts/fuzz.sh, and the runtime of its sanitizers:
[ -e /usr/lib/llvm-14/lib/clang/14.0.6/lib/linux/libclang_rt.fuzzer-x86_64.a ] || missing+=(libclang-rt-14-dev)
pkg-config --exists criterion 2>/dev/null || missing+=(libcriterion-dev)

if [ ${#missing[@]} -eq 0 ]; then
    echo "Nothing to install."
elif ! command -v apt-get >/dev/null; then
    echo "Not installed: ${missing[*]}. There is no apt-get here, so please install them; going on without."
else
    sudo=()
    [ "$(id -u)" -eq 0 ] || sudo=(sudo)
    echo "Installing ${missing[*]}"
    "${sudo[@]}" apt-get -qq update
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}"
fi

cmake -S . -B build -G Ninja "$@"
cmake --build build
