#!/usr/bin/env bash
# languages.sh LIBRARY CC: what docs/calling.md shows. Its blocks are the bytes of examples/; the ctypes structs are
# C's; the programs compile and run on the CPU reference. A language whose compiler is not here is skipped, loudly. Run
# from the root of the source tree.
set -euo pipefail
library=$1 cc=$2 cxx=${CXX:-c++}
folder=$(dirname "$library")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export LD_LIBRARY_PATH=$folder PYTHONPYCACHEPREFIX=$scratch PYTHONPATH=examples
warnings=(-Wall -Wextra -Wpedantic -Werror)

skip() { echo "**** SKIPPED: $1"; }

# The program says what the reference computes: 8 equal terms of 1/8 of 1/8.
check() {
    echo "-- $1"
    "$2" | tee "$scratch/output"
    grep -qx 'o\[0\] = 0\.125' "$scratch/output"
}

"$cxx" -std=c++17 "${warnings[@]}" -Iinclude examples/example.cpp -L"$folder" -lgdelta -o "$scratch/cpp"
check C++ "$scratch/cpp"

if command -v python3 >/dev/null; then
    echo "-- Python"
    python3 - docs/calling.md <<'END'
import re, sys
blocks = re.findall(r"^```\w+ (examples/\S+)\n(.*?)^```$", open(sys.argv[1]).read(), re.S | re.M)
assert len(blocks) >= 4, "docs/calling.md shows too little"
for path, shown in blocks:
    assert shown == open(path).read(), f"docs/calling.md does not show {path} as it is"
END
    python3 -m py_compile examples/*.py bench/peers/*.py
    python3 tests/ctypes_layouts.py "$library" include >"$scratch/layouts.c"
    "$cc" -std=c11 "${warnings[@]}" -fsyntax-only -Iinclude "$scratch/layouts.c"
else
    skip "Python and docs/calling.md; there is no python3"
fi

if command -v rustc >/dev/null && command -v bindgen >/dev/null; then
    bindgen include/gdelta/reference.h -o "$scratch/gdelta.rs" --allowlist-function 'gdelta.*' \
        --allowlist-type 'gdelta.*' --allowlist-var 'GDELTA.*' -- -Iinclude
    GDELTA_BINDINGS=$scratch/gdelta.rs rustc --edition 2021 examples/example.rs -L "$folder" -l gdelta \
        -o "$scratch/rust"
    check Rust "$scratch/rust"
else
    skip "Rust; there is no rustc with bindgen"
fi

if command -v go >/dev/null; then
    printf 'Name: gdelta\nDescription: as built\nVersion: 0\nCflags: -I%s/include\nLibs: -L%s -lgdelta\n' \
        "$PWD" "$(realpath "$folder")" >"$scratch/gdelta.pc"
    PKG_CONFIG_PATH=$scratch GOCACHE=$scratch/go go build -o "$scratch/go-example" examples/example.go
    check Go "$scratch/go-example"
else
    skip "Go; there is no go"
fi
