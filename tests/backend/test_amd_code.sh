#!/usr/bin/env bash
# What the AMD code objects say about every kernel: no spills, no scratch memory, wave32, shared memory within 64 KB, every kernel of
# args.h there. With --write the table of gfx1201 goes into docs/amd.md.
# usage: test_amd_code.sh BIN SOURCE [--write]
set -eu
bin=$1 src=$2
objects=("$bin"/../gpu/kernels-gfx120[01].co)
[ -f "${objects[0]}" ] || { echo "SKIP: this build holds no AMD code"; exit 0; }
readelf=$(command -v llvm-readelf-19 || command -v llvm-readelf-22 || command -v llvm-readelf || true)
[ "$readelf" ] || { echo "no llvm-readelf: install llvm-19"; exit 1; }
names=$(sed -n '/define AFF_GPU_KERNELS/,/[^\\]$/p' "$src/src/backend/gpu/kernels/args.h" | grep -o 'X([a-z0-9_]*, *[0-9]*)' | sed 's/X(\(.*\), *\(.*\))/k_\1 \2/')
[ "$names" ] || { echo "no kernels found in args.h"; exit 1; }
table() {
    "$readelf" --notes "$1" | awk '
        function flush() { if (name) print name, vgpr, sgpr, vspill, sspill, scratch, lds, wave }
        /^ *- \.agpr_count|^  - \.args/ { flush(); name = "" }
        /\.name: +k_/ { name = $2 }
        /\.vgpr_count:/ { vgpr = $2 } /\.sgpr_count:/ { sgpr = $2 }
        /\.vgpr_spill_count:/ { vspill = $2 } /\.sgpr_spill_count:/ { sspill = $2 }
        /\.private_segment_fixed_size:/ { scratch = $2 } /\.group_segment_fixed_size:/ { lds = $2 }
        /\.wavefront_size:/ { wave = $2 }
        END { flush() }' | sort
}
bad=0
for o in "${objects[@]}"; do
    t=$(table "$o")
    while read -r name _; do
        grep -q "^$name " <<<"$t" || { echo "$o: kernel $name is missing"; bad=1; }
    done <<<"$names"
    while read -r name vgpr sgpr vspill sspill scratch lds wave; do
        [ "$vspill" = 0 ] && [ "$sspill" = 0 ] && [ "$scratch" = 0 ] && [ "$lds" -le 65536 ] && [ "$wave" = 32 ] && [ "$vgpr" -le 256 ] && continue
        echo "$(basename "$o"): $name: $vgpr VGPRs, spills $vspill/$sspill, scratch $scratch, LDS $lds, wave$wave: expected no spills, no scratch, at most 65536 bytes of LDS, wave32"
        bad=1
    done <<<"$t"
done
[ $bad = 0 ] || exit 1
t=$(table "$bin/../gpu/kernels-gfx1201.co")
echo "$(wc -l <<<"$t") kernels, no spills"
if [ "${3-}" = --write ]; then
    doc=$src/docs/amd.md
    {
        sed '/^<!-- table -->$/q' "$doc"
        echo
        echo "| kernel | threads | VGPRs | SGPRs | spills | scratch |"
        echo "|---|---|---|---|---|---|"
        while read -r name vgpr sgpr vspill sspill scratch lds wave; do
            echo "| \`$name\` | $(awk -v n="$name" '$1 == n { print $2 }' <<<"$names") | $vgpr | $sgpr | $((vspill + sspill)) | $scratch |"
        done <<<"$t"
    } >"$doc.tmp"
    mv "$doc.tmp" "$doc"
fi
