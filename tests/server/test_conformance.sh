# docs/conformance.md: 44 reports, each test that it names is there, and a row that names none does not say that it passes.
. "$(dirname "$0")/../tools/cli.bash"
table=$src/docs/conformance.md
same "rows" 44 "$(grep -c '^| [0-9]' "$table")"
same "numbers" "$(seq -s ' ' 44)" "$(sed -n 's/^| \([0-9]*\) .*/\1/p' "$table" | tr '\n' ' ' | sed 's/ $//')"
awk -f "$src/scripts/conformance.awk" "$table" >"$tmp/tests"
while IFS=: read -r program name; do
    grep -qs "cmocka_unit_test($name)" "$src"/tests/*/"$program.c" || fail "docs/conformance.md names $program:$name, which is not there"
done <"$tmp/tests"
while IFS= read -r row; do
    case $row in
    *'`'*'| pass |' | *'| fail |') ;;
    *) fail "a row without result: $row" ;;
    esac
done < <(grep '^| [0-9]' "$table")
finish
