#!/bin/sh
# Runs the tests, on real mounts, as root.
#
#   tests/run.sh                     everything in the default mode, then the mounted tests in the other modes
#   tests/run.sh --modes "auto"      in these modes only (auto daemon threads memory striped block strict)
#   tests/run.sh --full              at full size: hours, and some ten GiB below $TMPDIR
#   tests/run.sh -- --test publish   what comes after -- goes to cargo test
set -eu
cd "$(dirname "$0")/.."

modes="auto daemon threads memory striped block strict"
while [ $# -gt 0 ]; do
    case $1 in
    --modes) [ $# -gt 1 ] || { echo "--modes: name some of: $modes" >&2; exit 1; }; modes=$2; shift 2 ;;
    --full) export KVCACHEFS_TEST_FULL=1 KVCACHEFS_TEST_KILLS=200 KVCACHEFS_TEST_CUTS=3000 KVCACHEFS_TEST_LIVES=20000 KVCACHEFS_TEST_FUZZ=20000000 KVCACHEFS_TEST_ROUNDS=500 KVCACHEFS_TEST_CYCLES=1000000 KVCACHEFS_TEST_SCHEDULES=20000 KVCACHEFS_TEST_MODEL=300; shift ;;
    --) shift; break ;;
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;;
    *) echo "$1: unknown; use --modes, --full or --" >&2; exit 1 ;;
    esac
done

if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "the tests mount, which takes root: run this as root, or install sudo" >&2; exit 1; }
    exec sudo -E env "PATH=$PATH" "$0" --modes "$modes" -- "$@"
fi

# What the tests call beside the shell: command and Debian package.
missing=
for need in cc:gcc python3:python3 setfattr:attr fusermount3:fuse3 losetup:mount setpriv:util-linux rsync:rsync; do
    command -v "${need%%:*}" >/dev/null || missing="$missing ${need##*:}"
done
if [ -n "$missing" ]; then
    command -v apt-get >/dev/null || { echo "please install:$missing" >&2; exit 1; }
    apt-get update -q
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $missing
fi
[ -e /dev/fuse ] || modprobe fuse || { echo "/dev/fuse: missing; load the kernel module fuse" >&2; exit 1; }

if [ $# -gt 0 ]; then
    for mode in $modes; do
        echo "== mode $mode"
        KVCACHEFS_TEST_MODE=$mode cargo test --locked --workspace "$@"
    done
    exit
fi

# Tests that mount are in tests/; what is left does not depend on the mode and runs once.
cargo test --locked --workspace --lib --bins --examples
cargo test --locked -p mount-tools
for mode in $modes; do
    echo "== mode $mode"
    for file in tests/*.rs; do
        name=$(basename "$file" .rs)
        # A child between fork and exec holds what other threads of the test have open: programs that are being written,
        # mounts that are being unmounted.
        case $name in lifecycle | wedge | without) threads=1 ;; *) threads=$(nproc) ;; esac
        RUST_TEST_THREADS=$threads KVCACHEFS_TEST_MODE=$mode cargo test --quiet --locked --test "$name"
    done
done
