#!/bin/sh
# Installs what `cargo build --release --workspace` has made, or takes it away again.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

usage() {
    cat <<END
usage: install.sh [TARGET_DIRECTORY]   install what is built there (default: $here/../target/release)
       install.sh --uninstall          take it away again; /etc/kvcachefs and the stores stay
As root. DESTDIR and PREFIX (/usr/local) as usual; with another PREFIX the path in the unit is changed to it.
END
}

prefix=${PREFIX:-/usr/local}
dest=${DESTDIR:-}
unit=$dest/etc/systemd/system/kvcachefs@.service
programs="kvcachefs kvctl mount-kvcachefs"
# mount(8) looks for its helpers in /sbin and nowhere else: for -t kvcachefs, and for -t fuse.kvcachefs.
helpers="mount.kvcachefs mount.fuse.kvcachefs"

# systemd reads a changed unit only when it is told to.
reload() {
    if [ -z "$dest" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
}

case ${1:-} in
-h | --help) usage; exit ;;
--uninstall)
    for name in $programs; do rm -fv "$dest$prefix/sbin/$name"; done
    for name in $helpers; do rm -fv "$dest/sbin/$name"; done
    rm -fv "$unit"
    reload
    exit
    ;;
-*) echo "install.sh: $1: unknown option; --help shows how" >&2; exit 1 ;;
esac

built=${1:-$here/../target/release}
for name in $programs; do
    [ -x "$built/$name" ] || {
        echo "install.sh: $built/$name: not there; build it first: cargo build --release --workspace" >&2
        exit 1
    }
done
for name in $programs; do
    install -D -m 755 "$built/$name" "$dest$prefix/sbin/$name"
    echo "installed $dest$prefix/sbin/$name"
done
mkdir -p "$dest/sbin"
for name in $helpers; do
    ln -sf "$prefix/sbin/mount-kvcachefs" "$dest/sbin/$name"
    echo "installed $dest/sbin/$name"
done
mkdir -p "$dest/etc/kvcachefs" "$(dirname "$unit")"
sed "s|/usr/local/sbin|$prefix/sbin|" "$here/kvcachefs@.service" > "$unit"
echo "installed $unit"
reload
echo "next: kvctl mount --help, or write $dest/etc/kvcachefs/NAME.toml and run: systemctl enable --now kvcachefs@NAME"
