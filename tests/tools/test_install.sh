#!/bin/bash
# `cmake --install` to a folder that was not known when the build was configured: a program finds header and library through pkg-config.
. "$(dirname "$0")/cli.bash"
command -v pkg-config >/dev/null || { echo "pkg-config is missing"; exit 1; }
cmake --install "$bin/.." --prefix "$tmp/p q" >"$tmp/out" 2>&1 || fail "cmake --install: $(tail -n 3 "$tmp/out")"
pc=$(cd "$tmp/p q" && find "$PWD" -name affinity.pc)
export PKG_CONFIG_PATH=${pc%/*}
eval "lib=$(pkg-config --variable=libdir affinity)" # a folder with a space is quoted
[ -e "$lib/libaffinity.so" ] || { fail "pkg-config says the library is in $lib"; finish; }
cat >"$tmp/t.c" <<'C'
#include <affinity.h>
#include <stdio.h>
int main(void)
{
    aff_model *m;
    aff_error err = {0};
    puts(aff_version());
    return aff_model_open(&m, "/no/such/model", NULL, &err) != AFF_E_IO;
}
C
# The rest needs a library that a plain compiler can link: not one with a sanitizer.
if ! nm -D "$lib/libaffinity.so" | grep -E '__(asan|tsan|ubsan)_' >/dev/null; then
    readelf -d "$lib/libaffinity.so" | grep 'SONAME.*libaffinity\.so\.[0-9]*\.[0-9]*\]' >/dev/null || fail "libaffinity.so: no versioned SONAME"
    eval "flags=($(pkg-config --cflags --libs affinity))"
    cc "$tmp/t.c" "${flags[@]}" -o "$tmp/shared" 2>"$tmp/err" || fail "shared: $(cat "$tmp/err")"
    LD_LIBRARY_PATH=$lib "$tmp/shared" >"$tmp/out" || fail "a program with the shared library fails"
    mkdir "$tmp/only" && cp "$lib/libaffinity.a" "$tmp/only"
    eval "flags=($(pkg-config --static --cflags --libs affinity))"
    cc "$tmp/t.c" -L"$tmp/only" "${flags[@]}" -o "$tmp/static" 2>"$tmp/err" || fail "static: $(cat "$tmp/err")"
    "$tmp/static" >"$tmp/out" || fail "a program with the static library fails"
    same "version" "$("$bin/affinity" --version)" "affinity $(cat "$tmp/out")"
fi
finish
