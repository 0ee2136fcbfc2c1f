# Of docs/conformance.md: the tests that the third column names, one a line; with -v results=FILE, which has "program:test" of every test
# that passed, the table again with its last column filled in.
BEGIN { FS = "|"; while (results != "" && (getline line < results) > 0) passed[line] = 1 }
function tests(cell, out,   n, i, part) {
    n = split(cell, part, "`")
    for (i = 2; i <= n; i += 2) out[++out[0]] = part[i]
}
!/^\| [0-9]/ { if (results != "") print; next }
{
    delete out; out[0] = 0
    tests($4, out)
    verdict = out[0] ? "pass" : "fail"
    for (i = 1; i <= out[0]; i++) {
        if (results == "") print out[i]
        else if (!(out[i] in passed)) verdict = "fail"
    }
    if (results != "") print "|" $2 "|" $3 "|" $4 "| " verdict " |"
}
