# lib.sh - what the scripts share: the source tree's place, installing packages, building. Sourced, not run.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

say() { printf '\n== %s\n' "$*" >&2; }
die() { printf '%s\n' "$*" >&2; exit 1; }

# Installs the Debian or Ubuntu packages named, if any is missing: as root or through sudo. Elsewhere it prints the list and stops.
need_packages() {
    local missing=()
    if command -v dpkg-query >/dev/null; then
        for p in "$@"; do
            [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null || true)" = installed ] || missing+=("$p")
        done
    else
        missing=("$@")
    fi
    [ ${#missing[@]} -eq 0 ] && return
    local apt=(apt-get)
    if ! command -v apt-get >/dev/null || { [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null; }; then
        printf 'These packages (Debian names) are needed and cannot be installed from here:\n' >&2
        printf '  %s\n' "${missing[@]}" >&2
        exit 1
    fi
    [ "$(id -u)" -eq 0 ] || apt=(sudo apt-get)
    say "installing: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${apt[@]}" update -qq
    "${apt[@]}" install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

build_packages=(gcc libc6-dev cmake ninja-build pkg-config libjansson-dev libxxhash-dev liburing-dev libmicrohttpd-dev
    libncurses-dev libedit-dev)
# clang-19 with its linker compiles the AMD kernels, llvm-19 reads what came out. nvcc is taken from the PATH where it is.
amd_packages=(clang-19 lld-19 llvm-19)
test_packages=("${build_packages[@]}" libcmocka-dev libvterm-dev spin "${amd_packages[@]}")
# What the installed programs need, by the names of Ubuntu 24.04: for the images of dist/.
runtime_packages=(libjansson4 libxxhash0 liburing2 libmicrohttpd12t64 libncursesw6 libedit2)

# configure_and_build PRESET [cmake option ...]
configure_and_build() {
    local preset=$1
    shift
    say "building ($preset)"
    cmake --preset "$preset" "$@" >/dev/null
    cmake --build --preset "$preset" -- -k 0 >"$root/build-log.txt" 2>&1 || { tail -n 60 "$root/build-log.txt" >&2; exit 1; }
    rm -f "$root/build-log.txt"
}

# configure_programs [cmake option ...]: a release build in which tests stay on where what they need is installed.
configure_programs() {
    local tests=OFF
    ! pkg-config --exists cmocka || tests=ON
    configure_and_build release -DAFF_TESTS=$tests "$@"
}
