#!/bin/sh
# Installs what `cargo build --release --workspace` has made: install.sh [TARGET_DIRECTORY], as root.
# DESTDIR and PREFIX (/usr/local) as usual. With another PREFIX the path in the unit file is changed to it.
set -eu
built=${1:-target/release}
prefix=${PREFIX:-/usr/local}
dest=${DESTDIR:-}
here=$(dirname "$0")

install -D -m 755 -t "$dest$prefix/sbin" "$built/kvcachefs" "$built/kvctl" "$built/mount-kvcachefs"
# mount(8) looks for its helpers here and nowhere else: for -t kvcachefs, and for -t fuse.kvcachefs.
mkdir -p "$dest/sbin"
ln -sf "$prefix/sbin/mount-kvcachefs" "$dest/sbin/mount.kvcachefs"
ln -sf "$prefix/sbin/mount-kvcachefs" "$dest/sbin/mount.fuse.kvcachefs"
mkdir -p "$dest/etc/systemd/system"
sed "s|/usr/local/sbin|$prefix/sbin|" "$here/kvcachefs@.service" > "$dest/etc/systemd/system/kvcachefs@.service"
