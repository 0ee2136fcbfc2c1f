# dist/affinity.service: systemd takes it without a word, and finds it hardened. Without systemd-analyze only that it names flags that exist.
. "$(dirname "$0")/../tools/cli.bash"
unit=$tmp/affinity.service
sed "s|/usr/local/bin/affinity|$affinity|" "$src/dist/affinity.service" >"$unit"
runs --serve --help
for flag in $(grep -oE -- '--[a-z-]+' "$unit" | sort -u); do
    grep -q -- "$flag" "$tmp/out" || fail "dist/affinity.service names $flag, which affinity --serve does not have"
done
if command -v systemd-analyze >/dev/null; then
    systemd-analyze verify "$unit" >"$tmp/said" 2>&1 || fail "systemd-analyze verify: $(cat "$tmp/said")"
    [ ! -s "$tmp/said" ] || fail "systemd-analyze verify says: $(cat "$tmp/said")"
fi
finish
