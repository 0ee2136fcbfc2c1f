# The mix of scripts/checks/load for a few seconds: right and wrong requests and clients that leave.
. "$(dirname "$0")/../tools/cli.bash"
. "$(dirname "$0")/serve.bash"
trap '[ -z "${pid-}" ] || kill "$pid"; rm -rf "$tmp"' EXIT
serve_on --threads 1 --kv-size 4096 --slots 3 --queue 6 --prefix-cache-dir "$tmp/cache" --prefix-cache-gib 1 --prefix-cache-block 64 || exit 1
"$bin/../tests/load_server" "$port" "$pid" 4 12 1 nomemory || fail "load_server"
serve_off || fail "the server ended with code $?: $(cat "$tmp/said")"
finish
