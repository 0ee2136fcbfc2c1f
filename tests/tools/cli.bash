# cli.bash - what the tests of programs share; sourced with the folder of the binaries and the source tree as $1 and $2.
set -uo pipefail
bin=$1
src=$2
affinity=$bin/affinity
tmp=$(mktemp -d "${TMPDIR:-/tmp}/aff_cli_XXXXXX")
trap 'rm -rf "$tmp"' EXIT
failures=0
[ -x "$affinity" ] || { echo "$affinity is missing"; exit 1; }

fail() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}

# refused CODE TEXT ARGS...: exits with CODE, nothing on stdout, one line on stderr (beside a memory plan) that holds TEXT.
refused() {
    local code=$1 text=$2 got
    shift 2
    "$affinity" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    got=$?
    [ $got -eq "$code" ] || fail "affinity $*: expected exit code $code, got $got"
    [ ! -s "$tmp/out" ] || fail "affinity $*: expected nothing on stdout, got: $(head -c 200 "$tmp/out")"
    sed -i '/^memory plan: /d; /^  /d' "$tmp/err"
    [ "$(wc -l <"$tmp/err")" -eq 1 ] || fail "affinity $*: expected one line on stderr, got: $(cat "$tmp/err")"
    grep -qF -- "$text" "$tmp/err" || fail "affinity $*: expected '$text', got: $(cat "$tmp/err")"
}

# runs ARGS...: must succeed; stdout and stderr in $tmp/out and $tmp/err.
runs() {
    "$affinity" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null || fail "affinity $*: $(tail -n 1 "$tmp/err")"
}

generated() { sed -n 's/^generated ids: //p' "$tmp/err"; }
# same WHAT A B: two strings or, as same_file, two files.
same() { [ "$2" = "$3" ] || fail "$1: expected '$2', got '$3'"; }
same_file() { cmp "$2" "$3" >/dev/null 2>&1 || fail "$1: $2 and $3 differ"; }

finish() {
    [ $failures -eq 0 ] || { echo "$failures failure(s)"; exit 1; }
    exit 0
}
