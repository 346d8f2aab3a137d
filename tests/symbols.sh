#!/usr/bin/env bash
# symbols.sh LIBRARY CC: libgdelta.so exports exactly the functions of host/gdelta.map, which are exactly the GDELTA_API
# functions of the public headers; the headers compile alone as C11 and C++17; every enumeration is four bytes wide.
# Run from the root of the source tree.
set -euo pipefail
library=$1 cc=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
headers=(include/gdelta/*.h)

nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort >"$scratch/exported"
grep -o 'gdelta_[a-z0-9_]*;' host/gdelta.map | tr -d ';' | sort >"$scratch/mapped"
grep -hv '^#' "${headers[@]}" | tr '\n' ' ' | grep -o 'GDELTA_API [^(]*(' | sed 's/.*[ *]\(gdelta_[a-z0-9_]*\)($/\1/' |
    sort >"$scratch/declared"
echo "$(wc -l <"$scratch/declared") functions declared, $(wc -l <"$scratch/exported") symbols exported"
test -s "$scratch/declared"
diff -u "$scratch/mapped" "$scratch/exported"
diff -u "$scratch/declared" "$scratch/mapped"

enumerations=$(grep -ho 'typedef int32_t gdelta_[a-z0-9_]*' "${headers[@]}" | awk '{ print $3 }')
test -n "$enumerations"
for header in "${headers[@]}"; do
    {
        echo "#include <gdelta/${header##*/}>"
        echo '#ifndef __cplusplus'
        echo '#define static_assert _Static_assert'
        echo '#endif'
        for name in $enumerations; do echo "static_assert(sizeof($name) == 4, \"$name\");"; done
        echo 'static_assert(sizeof(GDELTA_OK) == 4, "enumerators");'
    } >"$scratch/header.c"
    for language in 'c -std=c11' 'c++ -std=c++17'; do
        # shellcheck disable=SC2086
        "$cc" -x $language -Wall -Wextra -Wpedantic -Werror -Iinclude -fsyntax-only "$scratch/header.c"
        # shellcheck disable=SC2086
        if "$cc" -x $language -Iinclude -M "$scratch/header.c" | grep -i cuda; then
            echo "${header##*/} pulls in a CUDA header" && exit 1
        fi
        echo "${header##*/} compiles as $language"
    done
done
