#!/usr/bin/env bash
# check.sh: what no compiler checks. Formatting, line lengths, who includes whom, the documents' file names; and with
# nvcc, that every kernel compiles for every architecture without spills, stack frames or serialised wgmma.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export LC_ALL=C.UTF-8
failures=0

# verdict NAME FINDINGS: no findings is good.
verdict() {
    if [ -z "$2" ]; then
        echo "ok: $1"
    else
        echo "$2"
        echo "FAILED: $1"
        failures=$((failures + 1))
    fi
}

mapfile -t sources < <(find include host kernels tests bench examples -regex '.*\.\(c\|h\|cu\|cuh\|cpp\)' | sort)
mapfile -t kernels < <(find kernels -name '*.cu' | sort)
mapfile -t texts < <(ls CMakeLists.txt *.md docs/*.md .ci/run cmake/* scripts/* tests/*.{sh,py} examples/*.{py,rs,go} \
    bench/peers/*.py host/gdelta.map)

# ---- Text ----

if command -v clang-format-14 >/dev/null; then
    verdict "clang-format" "$(clang-format-14 --dry-run -Werror "${sources[@]}" 2>&1 | grep -o '.*error:' | uniq)"
else
    echo "**** SKIPPED: formatting; there is no clang-format-14 here"
fi
verdict "no line over 120 characters" "$(grep -nE '^.{121}' "${sources[@]}" "${texts[@]}")"
verdict "asm only in kernels/ptx" "$(grep -nwE 'asm|__asm|__asm__' "${sources[@]}" | grep -v '^kernels/ptx/')"
verdict "README.md and docs/ name files that exist" "$(
    grep -oE '`[A-Za-z0-9_.-]+/[A-Za-z0-9_./-]*`' README.md docs/*.md | tr -d '`' | grep -v ':build/' | sort -u |
        while IFS=: read -r text path; do [ -e "$path" ] || echo "$text: $path"; done
)"

# ---- Who includes whom ----

# Host, from the top: api, run, plan and tensor_map, then workspace, layout and validate, then device, status and
# convert; the reference stands beside run. A file includes its own level and those below. kernels/args.h is everyone's,
# launch.h is run.c's, config.h is for plan.c, workspace.c and tensor_map.c. Kernels: engine -> rule -> tile -> ptx.
# Tests and bench see what a user sees, and the small tables of host/convert.h and host/layout.h.
includes=$(grep -HoE '^ *# *include *[<"][^>"]+' "${sources[@]}" | sed -E 's/: *# *include *[<"]/ /')
verdict "include rules" "$(awk '
    function base(path) { sub(/.*\//, "", path); sub(/\..*/, "", path); return path }
    function folder(path) { return sub(/^kernels\//, "", path) && sub(/\/.*/, "", path) ? path : "" }
    function bad(rule) { print $1 " includes " $2 ": " rule }
    BEGIN {
        split("status 1 device 1 convert 1 workspace 2 layout 2 validate 2 plan 3 tensor_map 3 run 4 reference 4 api 5",
              n)
        for (i = 1; i in n; i += 2) level[n[i]] = n[i + 1]
        split("ptx 1 tile 2 rule 3", n)
        for (i = 1; i in n; i += 2) depth[n[i]] = n[i + 1]
    }
    $1 ~ /^include\// && $2 !~ /^(std(def|int)\.h|gdelta\/gdelta\.h)$/ { bad("stddef and stdint only") }
    $1 ~ /^host\// {
        from = base($1); to = base($2)
        if (!(from in level)) bad("scripts/check.sh does not know this file")
        if ($2 ~ /^host\// && level[to] > level[from]) bad("against the order of host/")
        if ($2 == "kernels/launch.h" && $1 != "host/run.c") bad("only run.c launches")
        if ($2 == "kernels/config.h" && $1 !~ /(plan|workspace|tensor_map)\.c$/) {
            bad("tile numbers are for plan.c, workspace.c and tensor_map.c")
        }
        if ($2 ~ /^kernels\// && $2 !~ /\/(args|launch|config)\.h$/) bad("only args.h, launch.h and config.h")
        if ($2 ~ /cuda/ && $1 != "host/device.c") bad("only device.c sees CUDA")
    }
    $1 ~ /^kernels\// {
        from = folder($1); to = folder($2)
        if ($2 ~ /^(host|tests|bench)\//) bad("kernels stand alone")
        if ($1 ~ /^kernels\/[a-z]*\.h$/ && $2 !~ /^(std|gdelta\/gdelta\.h|kernels\/args\.h)/) bad("plain data only")
        if (from == "ptx" && $2 ~ /^(kernels\/[^p]|gdelta\/)/) bad("ptx/ includes nothing of ours")
        if (to != "" && to != from && !(to in depth)) bad("an engine is included by nobody else")
        if (from in depth && to in depth && depth[to] > depth[from]) bad("engine -> rule -> tile -> ptx")
    }
    $1 ~ /^examples\// && $2 ~ /^(host|kernels|tests|bench)\// { bad("public headers only") }
    $1 ~ /^(bench|tests)\// && $1 !~ /test_(plan|workspace|tile)|fuzz_host/ && $2 ~ /^(host|kernels)\// &&
        $2 !~ /^host\/(convert|layout)\.h$/ {
        bad("public headers, convert.h and layout.h only, but for tests of the plan and of tiles, and the fuzzer")
    }' <<<"$includes")"

# ---- Kernels ----

nvcc=$(PATH=$PATH:/usr/local/cuda/bin command -v nvcc)
version=$("${nvcc:-false}" --version | grep -oP 'release \K[0-9.]+')
if [ "$(printf '%s\n' 12.8 "${version:-0}" | sort -V | head -n 1)" != 12.8 ]; then
    echo "**** SKIPPED: compiling the kernels for every architecture; there is no nvcc 12.8 or later here"
else
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    # compile ARCHITECTURES FILES
    compile() {
        local gencode=()
        for arch in $1; do gencode+=(-gencode "arch=compute_$arch,code=sm_$arch"); done
        shift
        echo "compiling $# files for $((${#gencode[@]} / 2)) architectures"
        printf '%s\n' "$@" | xargs -P 2 -I{} bash -c 'file=$1 scratch=$2; shift 2; name=$scratch/${file//\//_}
            "$@" "$file" -o "$name.o" >"$name.log" 2>&1 || { cat "$name.log"; touch "$scratch/failed"; }' _ {} \
            "$scratch" "$nvcc" -std=c++17 -O3 -I. -Iinclude -DGDELTA_HAVE_CUDA=1 -Xcompiler=-Wall,-Wextra \
            -Werror=all-warnings -Xptxas=-v "${gencode[@]}" -c
    }
    mapfile -t hopper < <(printf '%s\n' "${kernels[@]}" | grep '^kernels/hopper/')
    mapfile -t portable < <(printf '%s\n' "${kernels[@]}" | grep -v '^kernels/hopper/')
    compile "$(sed -n 's/-real//g; s/.*set(CMAKE_CUDA_ARCHITECTURES \([0-9].*\))/\1/p' CMakeLists.txt)" "${portable[@]}"
    compile 90a "${hopper[@]}"
    verdict "every kernel compiles for every architecture" "$(ls "$scratch/failed" 2>/dev/null)"
    cat "$scratch"/*.log | c++filt >"$scratch/ptxas"
    verdict "no serialised wgmma" "$(grep -E 'C7512|C7517' "$scratch/ptxas")"

    # One line a kernel: registers on each architecture. Then what is wrong.
    awk -v problems="$scratch/problems" '
        /Compiling entry function/ { split($0, q, "\047"); arch = q[4]
                                     if (!(arch in seen)) { seen[arch]; archs[++na] = arch } }
        /Function properties for/ { sub(/.*properties for /, ""); name = $0 }
        /bytes stack frame/ && ($1 + $5 + $9) { print arch " " name ": " $0 >problems }
        /Used [0-9]+ registers/ { match($0, /Used [0-9]+/); used[name, arch] = substr($0, RSTART + 5, RLENGTH - 5)
                                  if (!(name in known)) { known[name]; names[++nn] = name } }
        END {
            if (!nn) print "ptxas reported no kernel" >problems
            for (a = 1; a <= na; ++a) printf "%-8s", archs[a]
            print "registers of"
            for (i = 1; i <= nn; ++i) {
                for (a = 1; a <= na; ++a) printf "%-8s", used[names[i], archs[a]]
                print names[i]
            }
        }' "$scratch/ptxas"
    verdict "no spills, no stack frames" "$(cat "$scratch/problems" 2>/dev/null)"
fi

[ $failures -eq 0 ] && echo "all checks passed" || echo "$failures checks failed"
[ $failures -eq 0 ]
