#!/bin/sh
# Installs what is missing, builds, and replays a serving trace on a temporary mount. Arguments go to the replay:
# examples/quickstart.sh --help lists them.
set -eu
cd "$(dirname "$0")/.."

command -v cargo >/dev/null || { echo "cargo: not found; install Rust from your distribution or rustup.rs" >&2; exit 1; }
sudo=
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "mounting takes root: run this as root, or install sudo" >&2; exit 1; }
    sudo=sudo
fi
if ! command -v cc >/dev/null; then
    if ! command -v apt-get >/dev/null; then
        echo "cc: not found; install a C compiler and linker (gcc)" >&2
        exit 1
    fi
    $sudo apt-get update -q
    $sudo apt-get install -qy --no-install-recommends gcc libc6-dev
fi
[ -e /dev/fuse ] || $sudo modprobe fuse || { echo "/dev/fuse: missing; load the kernel module fuse" >&2; exit 1; }

cargo build --release --locked --bin kvcachefs --example trace_replay
exec $sudo target/release/examples/trace_replay --daemon-binary target/release/kvcachefs "$@"
