#!/usr/bin/env bash
# test.sh [CTEST OPTIONS]: builds and runs all tests. The last line counts the cases.
# Without a usable GPU the tests that need one say so and count as skipped; GDELTA_REQUIRE_GPU=1 fails them instead.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/prepare.sh -DGDELTA_BUILD_TESTS=ON

status=0
ctest --test-dir build --output-on-failure --no-tests=error "$@" || status=$?
log=build/Testing/Temporary/LastTest.log

echo
if skips=$(grep -o 'GPU SKIPPED:.*' "$log"); then
    echo "**** $(wc -l <<<"$skips") GPU TESTS WERE SKIPPED, because:"
    sed 's/[^(]* (\(.*\))$/\1/' <<<"$skips" | sort | uniq -c
fi
# A program's cases are those of Criterion's synthesis, or one where there is none: a script, or a program that died.
# Criterion leaves skipped cases out, and counts those that crash as failing.
awk '
    / Testing: / { passing = failing = synthesis = 0 }
    /GPU SKIPPED:/ { ++skipped }
    /Synthesis: Tested:/ { match($0, /Tested.*/); split(substr($0, RSTART), n, /[^0-9]+/)
                           synthesis = 1; passing = n[3]; failing = n[4] }
    /^Test (Passed|Failed)\./ {
        if (/Passed/ && !synthesis) ++passing
        if (!/Passed/ && !failing) ++failing
        passed += passing; failed += failing
    }
    END { printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }' "$log"
exit $status
