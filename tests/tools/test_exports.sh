#!/bin/bash
# The shared library exports what affinity.h declares and nothing else; the header stays small.
set -euo pipefail
lib=$(dirname "$1")/lib/libaffinity.so
header=$2/include/affinity.h

# Sanitizers add symbols of their own, which all start with two underscores.
exported=$(nm -D --defined-only "$lib" | awk '{print $3}' | sed 's/@.*//' | grep -v '^__' | sort -u)
declared=$(grep -E '^AFF_API' "$header" | grep -oE 'aff_[a-z_]+\(' | tr -d '(' | sort -u)
if [ "$exported" != "$declared" ]; then
    echo "exported (>) and declared (<) differ:"
    diff <(echo "$declared") <(echo "$exported") || true
    exit 1
fi
count=$(echo "$exported" | wc -l)
[ "$count" -ge 20 ] || { echo "expected at least 20 functions, got $count"; exit 1; }

size=$(wc -c <"$header")
[ "$size" -lt 10240 ] || { echo "$header: expected under 10240 bytes, got $size"; exit 1; }
