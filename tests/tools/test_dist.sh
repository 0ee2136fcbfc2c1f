# dist/Dockerfile.*: package lists are those of scripts/lib.sh, instructions are well formed, what they copy and call exists. Needs no docker.
. "$(dirname "$0")/cli.bash"

# The arrays of scripts/lib.sh, without what it does when it is sourced.
eval "$(sed -n '/^[a-z]*_packages=(/,/)$/p' "$src/scripts/lib.sh")"
[ ${#build_packages[@]} -gt 5 ] && [ ${#runtime_packages[@]} -gt 3 ] && [ ${#amd_packages[@]} -gt 1 ] || fail "no package lists in scripts/lib.sh"

# Every library that the program is linked to is in some package of the runtime: libNAME.so.N of libNAMEN or libNAMEN with a suffix.
for lib in jansson xxhash uring microhttpd ncursesw edit; do
    printf '%s\n' "${runtime_packages[@]}" | grep -qE "^lib$lib[0-9]" || fail "runtime_packages has no lib$lib"
done

check() {
    local file=$1 name line stages=0 lists=0 want got word
    name=$(basename "$file")
    # Lines that end in a backslash joined, comments out.
    sed -e '/^[[:space:]]*#/d' -e ':a' -e '/\\$/{N;s/\\\n[[:space:]]*/ /;ba' -e '}' "$file" | sed '/^[[:space:]]*$/d' >"$tmp/lines"
    local known=' ARG '
    while IFS= read -r line; do
        word=${line%% *}
        case $word in
        ARG) [[ $line =~ ^ARG\ [A-Z]+=[a-z0-9./:-]+$ ]] || fail "$name: $line" ;;
        FROM)
            stages=$((stages + 1))
            [[ $line =~ ^FROM\ \$\{([A-Z]+)\}(\ AS\ ([a-z]+))?$ ]] || fail "$name: $line"
            grep -q "^ARG ${BASH_REMATCH[1]}=" "$tmp/lines" || fail "$name: FROM an unknown argument: $line"
            known="$known${BASH_REMATCH[3]-} " ;;
        RUN) bash -n <<<"${line#RUN }" || fail "$name: not a command: $line" ;;
        COPY)
            if [[ $line =~ ^COPY\ --from=([a-z]+)\ /[^\ ]+\ /[^\ ]+$ ]]; then
                [[ $known == *" ${BASH_REMATCH[1]} "* ]] || fail "$name: no such stage: $line"
            elif ! [[ $line =~ ^COPY\ ([^\ /-][^\ ]*)\ /[^\ ]+$ && -e $src/${BASH_REMATCH[1]} ]]; then
                fail "$name: $line"
            fi ;;
        WORKDIR | USER | EXPOSE | STOPSIGNAL) [ "$(wc -w <<<"$line")" -eq 2 ] || fail "$name: $line" ;;
        ENTRYPOINT) [ "$line" = 'ENTRYPOINT ["affinity"]' ] || fail "$name: $line" ;;
        *) fail "$name: unknown instruction: $line" ;;
        esac
    done <"$tmp/lines"
    [ $stages -eq 2 ] || fail "$name: expected 2 stages, got $stages"
    [[ $(head -n 1 "$tmp/lines") == ARG* ]] || fail "$name: expected ARG first"
    # A comment "# packages: NAME ..." names the lists that the next RUN installs.
    while IFS= read -r line; do
        lists=$((lists + 1))
        want=$(for word in $line; do
            declare -n list=$word
            printf '%s\n' "${list[@]}"
        done | sort)
        got=$(awk -v n=$lists '/^# packages:/ {k++} k == n && /^    [a-z&]/ {if ($1 == "&&") exit; print}' "$file" | tr -d '\\' | xargs -n 1 | sort)
        [ "$want" = "$got" ] || fail "$name: packages of '$line' differ from scripts/lib.sh: $(diff <(echo "$want") <(echo "$got"))"
    done < <(sed -n 's/^# packages: //p' "$file")
    [ $lists -eq 2 ] || fail "$name: expected 2 lists of packages, got $lists"
    for option in $(grep -oE -- '-D[A-Z_]+' "$file" | sed 's/^-D//' | sort -u); do
        grep -q "$option" "$src/CMakeLists.txt" || fail "$name: CMake has no $option"
    done
    for option in $(sed -n '/^#/p' "$file" | grep -oE -- ' --(serve|host|api-key-file|device|port)' | sort -u); do
        grep -q -- "$option" "$tmp/help" || fail "$name: affinity has no $option"
    done
}
runs --serve --help
cp "$tmp/out" "$tmp/help"
check "$src/dist/Dockerfile.cuda"
check "$src/dist/Dockerfile.rocm"
finish
