//! The tools that people use on any directory work on the mount as they are. What is not installed is left out.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::{Mount, bytes, memory_only};

fn installed(tool: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$0\" > /dev/null", tool]).status().unwrap();
    if !found.success() {
        eprintln!("left out: {tool} is not installed");
    }
    found.success()
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Runs a shell script in which `$M` is the mount and `$S` a directory beside it. It must not even warn.
fn shell(mount: &Mount, script: &str) -> String {
    let mut command = Command::new("bash");
    command.args(["-euo", "pipefail", "-c", script]);
    command.env("M", mount.path()).env("S", mount.scratch.path()).env("LC_ALL", "C");
    String::from_utf8(run(&mut command).stdout).unwrap()
}

/// A tree with what trees have: depth, links, modes, odd names, empty and larger files.
fn make_tree(root: &Path) {
    fs::create_dir_all(root.join("a/b c")).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    for (at, size) in [0, 1, 4096, 70_001, 1 << 20, (3 << 20) + 17].into_iter().enumerate() {
        fs::write(root.join(format!("a/f{at}")), bytes(at as u64, size)).unwrap();
        fs::write(root.join(format!("a/b c/g {at}")), bytes(at as u64 + 100, size)).unwrap();
    }
    std::os::unix::fs::symlink("a/f3", root.join("link")).unwrap();
    let script = std::os::unix::fs::PermissionsExt::from_mode(0o750);
    fs::set_permissions(root.join("a/f1"), script).unwrap();
}

#[test]
fn trees_are_copied_moved_and_compared() {
    let mount = Mount::new();
    make_tree(&mount.scratch.path().join("tree"));
    shell(
        &mount,
        r#"
        cp -a "$S/tree" "$M/in"
        diff -r --no-dereference "$S/tree" "$M/in"
        cp -a "$M/in" "$M/second"
        diff -r --no-dereference "$S/tree" "$M/second"
        mv "$M/second" "$M/moved"
        test ! -e "$M/second"
        cp -r "$M/moved" "$S/out"
        diff -r --no-dereference "$S/tree" "$S/out"
        mv "$S/out" "$M/returned"
        diff -r --no-dereference "$S/tree" "$M/returned"
        mv "$M/returned" "$S/again"
        diff -r --no-dereference "$S/tree" "$S/again"
        cmp "$S/tree/a/f5" "$M/moved/a/f5"
        # Times and modes came along.
        stat -c '%n %a %Y' "$S"/tree/a/* | sed 's|.*/||' > "$S/1"
        stat -c '%n %a %Y' "$M"/in/a/* | sed 's|.*/||' > "$S/2"
        diff "$S/1" "$S/2"
        rm -r "$M/moved"
        test ! -e "$M/moved"
        install -m 640 "$S/tree/a/f4" "$M/installed"
        test "$(stat -c %a "$M/installed")" = 640
        "#,
    );
    mount.check_quiet();
}

#[test]
fn archives_are_made_and_unpacked() {
    let mount = Mount::new();
    make_tree(&mount.at("tree"));
    shell(
        &mount,
        r#"
        tar -C "$M" -cf "$S/t.tar" tree
        mkdir "$M/out" "$S/out"
        tar -C "$M/out" -xf "$S/t.tar"
        tar -C "$S/out" -xf "$S/t.tar"
        diff -r --no-dereference "$M/tree" "$M/out/tree"
        diff -r --no-dereference "$M/tree" "$S/out/tree"
        tar -C "$M" -czf "$M/t.tar.gz" tree
        tar -C "$M" -xOzf "$M/t.tar.gz" tree/a/f5 | cmp - "$M/tree/a/f5"
        tar -C "$M" --sparse -cf "$M/s.tar" tree/a/f5
        tar -xOf "$M/s.tar" | cmp - "$M/tree/a/f5"
        "#,
    );
    if installed("rsync") {
        shell(
            &mount,
            r#"
            rsync -a "$M/tree/" "$M/synced/"
            echo more >> "$M/tree/a/f2"
            rsync -a --delete --checksum "$M/tree/" "$M/synced/"
            diff -r --no-dereference "$M/tree" "$M/synced"
            test -z "$(rsync -aniO "$M/tree/" "$M/synced/")"
            "#,
        );
    }
    mount.check_quiet();
}

#[test]
fn files_are_written_and_read_by_dd_and_friends() {
    let mount = Mount::new();
    fs::write(mount.scratch.path().join("src"), bytes(5, 5 << 20)).unwrap();
    shell(
        &mount,
        r#"
        for bs in 512 4k 1M 3000; do
            dd if="$S/src" of="$M/f" bs=$bs status=none
            cmp "$S/src" "$M/f"
        done
        dd if="$S/src" of="$M/synced" bs=64k conv=fsync status=none
        dd if="$S/src" of="$M/direct" bs=1M oflag=direct status=none
        cmp "$S/src" "$M/direct"
        dd if="$M/direct" bs=1M iflag=direct status=none | cmp - "$S/src"
        dd if=/dev/zero of="$M/f" bs=1k seek=100 count=1 conv=notrunc status=none
        dd if="$M/f" bs=1k skip=100 count=1 status=none | cmp - <(head -c 1024 /dev/zero)
        dd if="$M/f" bs=1k skip=101 status=none | cmp - <(tail -c +$((101 * 1024 + 1)) "$S/src")
        test "$(sha256sum < "$M/direct")" = "$(sha256sum < "$S/src")"
        (cd "$M" && sha256sum direct synced > sums && sha256sum -c --quiet sums)
        printf 'one\ntwo\nthree\n' > "$M/text"
        sed -i s/two/zwei/ "$M/text"
        sort -r "$M/text" -o "$M/text"
        test "$(tr '\n' ' ' < "$M/text")" = "zwei three one "
        echo four >> "$M/text"
        test "$(tail -n 1 "$M/text")" = four
        test "$(head -c 4 "$M/text")" = zwei
        test "$(wc -c < "$M/text")" = 20
        split -b 1M "$S/src" "$M/part."
        cat "$M"/part.* | cmp - "$S/src"
        truncate -s 1234 "$M/text"
        test "$(stat -c %s "$M/text")" = 1234
        touch -d '2001-02-03 04:05:06.789 UTC' "$M/text"
        test "$(TZ=UTC stat -c %y "$M/text")" = "2001-02-03 04:05:06.789000000 +0000"
        touch "$M/lock"
        (flock -n 9 && ! flock -n "$M/lock" true) 9> "$M/lock"
        "#,
    );
    mount.check_quiet();
}

#[test]
fn trees_are_searched_and_measured() {
    let mount = Mount::new();
    make_tree(&mount.at("tree"));
    mount.drain();
    let found =
        shell(&mount, r#"cd "$M"; find . -type f -size +1M | sort; find . -type l; find . -name .ctl"#);
    assert_eq!(found, "./tree/a/b c/g 5\n./tree/a/f5\n./tree/link\n");
    assert_eq!(shell(&mount, r#"find "$M" -mindepth 1 | wc -l"#).trim(), "17");
    let sizes = (1u64 + 4096 + 70_001 + (1 << 20) + (3 << 20) + 17) * 2;
    let apparent = shell(&mount, r#"find "$M/tree" -type f -print0 | du -bc --files0-from=- | tail -n 1"#);
    assert_eq!(apparent.split_whitespace().next().unwrap(), sizes.to_string());
    let pages: u64 = [1u64, 4096, 70_001, 1 << 20, (3 << 20) + 17].iter().map(|s| s.div_ceil(4096) * 8).sum();
    let taken = shell(&mount, r#"find "$M/tree" -type f -print0 | du -kc --files0-from=- | tail -n 1"#);
    assert_eq!(taken.split_whitespace().next().unwrap(), pages.to_string());
    assert_eq!(
        shell(&mount, r#"grep -rl one "$M" || true; echo one > "$M/g"; grep -rl one "$M""#).lines().count(),
        1
    );
    // The mount says what it is.
    let df = shell(&mount, r#"df -T "$M" | tail -n 1"#);
    let fields: Vec<_> = df.split_whitespace().collect();
    assert_eq!(fields[1], "fuse.kvcachefs", "{df}");
    assert_eq!(fields[6], mount.path().to_str().unwrap(), "{df}");
    assert_eq!(shell(&mount, r#"stat -f -c '%S %T' "$M""#).split_whitespace().next(), Some("4096"));
    assert!(shell(&mount, r#"df -i "$M""#).lines().count() == 2);
    if installed("findmnt") {
        let options = shell(&mount, r#"findmnt -n -o FSTYPE,OPTIONS "$M""#);
        assert!(options.starts_with("fuse.kvcachefs"), "{options}");
        for option in ["nosuid", "nodev", "default_permissions"] {
            assert!(options.contains(option), "{options}");
        }
    }
}

#[test]
fn attributes_are_shown_and_set() {
    if !installed("getfattr") || !installed("setfattr") {
        return;
    }
    let mount = Mount::new();
    fs::write(mount.at("f"), bytes(1, 100_000)).unwrap();
    mount.drain();
    let shown = shell(
        &mount,
        r#"
        cd "$M"
        setfattr -n user.model -v qwen3-8b f
        getfattr -d f
        sync f
        for name in tier blocks durable; do getfattr -n user.kv.$name f; done
        getfattr --only-values -n user.model f
        setfattr -x user.model f
        ! getfattr -n user.model f 2> /dev/null
        ! setfattr -n user.kv.tier -v l2 f 2> /dev/null
        "#,
    );
    for line in ["user.model=\"qwen3-8b\"", "user.kv.tier=\"l1\"", "user.kv.blocks=\"1\""] {
        assert!(shown.contains(line), "{line} in:\n{shown}");
    }
    assert!(shown.contains(if memory_only() { "durable=\"0\"" } else { "durable=\"1\"" }), "{shown}");
    assert!(shown.ends_with("qwen3-8b"), "{shown}");
}

#[test]
fn copies_with_attributes_go_both_ways() {
    if !installed("setfattr") || !installed("rsync") {
        return;
    }
    let mount = Mount::new();
    fs::create_dir(mount.at("d")).unwrap();
    fs::write(mount.at("d/f"), bytes(1, 700_000)).unwrap();
    let shown = shell(
        &mount,
        r#"
        cd "$M"
        setfattr -n user.model -v qwen3-8b d/f
        rsync -aX d/ rsynced/
        cp -a d copied
        rsync -aX d/ "$S/outside/"
        rsync -aX "$S/outside/" back/
        for at in rsynced copied "$S/outside" back; do
            cmp d/f $at/f
            getfattr --absolute-names -d $at/f
        done
        rsync -aXn --itemize-changes d/ back/
        "#,
    );
    assert_eq!(shown.matches("user.model=\"qwen3-8b\"").count(), 4, "{shown}");
    assert!(!shown.contains("user.kv") && !shown.contains(">f"), "nothing is left to copy:\n{shown}");
}

#[test]
fn python_works_on_the_mount() {
    if !installed("python3") {
        return;
    }
    let mount = Mount::new();
    make_tree(&mount.scratch.path().join("tree"));
    let script = r#"
import filecmp, mmap, os, pathlib, pickle, shutil, sys, tempfile
M, S = pathlib.Path(os.environ["M"]), pathlib.Path(os.environ["S"])

def same(a, b):
    c = filecmp.dircmp(a, b)
    todo = [c]
    while todo:
        c = todo.pop()
        assert not (c.left_only or c.right_only or c.funny_files), (c.left, c.right)
        match, mismatch, errors = filecmp.cmpfiles(c.left, c.right, c.common_files, shallow=False)
        assert not mismatch and not errors, (mismatch, errors)
        todo += c.subdirs.values()

shutil.copytree(S / "tree", M / "copy", symlinks=True)
same(S / "tree", M / "copy")
shutil.copytree(M / "copy", M / "again", symlinks=True)
same(S / "tree", M / "again")
shutil.move(M / "again", S / "moved")
same(S / "tree", S / "moved")
shutil.rmtree(M / "copy")
assert not (M / "copy").exists()

p = M / "dir" / "sub"
p.mkdir(parents=True)
(p / "t.txt").write_text("text \u00e9", encoding="utf-8")
assert (p / "t.txt").read_text(encoding="utf-8") == "text \u00e9"
(p / "t.txt").rename(p / "u.txt")
assert [q.name for q in p.iterdir()] == ["u.txt"]
assert sorted(q.name for q in M.rglob("*.txt")) == ["u.txt"]
(p / "u.txt").replace(p / "v.txt")
(p / "v.txt").chmod(0o600)
assert (p / "v.txt").stat().st_mode & 0o777 == 0o600
(p / "l").symlink_to("v.txt")
assert (p / "l").resolve() == (p / "v.txt").resolve() and (p / "l").is_symlink()
try:
    (p / "v.txt").open("x")
    raise SystemExit("an exclusive open of what exists worked")
except FileExistsError:
    pass
(p / "l").unlink(); (p / "v.txt").unlink(missing_ok=True); p.rmdir()

# The way of many savers: a temporary file beside the target, fsync, replace.
blob = os.urandom(2_500_000)
for n in range(3):
    with tempfile.NamedTemporaryFile(dir=M, delete=False) as f:
        f.write(blob + bytes([n])); f.flush(); os.fsync(f.fileno())
    os.replace(f.name, M / "target")
    assert (M / "target").read_bytes() == blob + bytes([n])
with open(M / "target", "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:
    assert m[:] == blob + bytes([2])
with open(M / "p", "wb") as f:
    pickle.dump({"a": list(range(1000))}, f)
with open(M / "p", "rb") as f:
    assert pickle.load(f)["a"][-1] == 999
with tempfile.TemporaryFile(dir=M) as f:
    f.write(blob); f.seek(0); assert f.read() == blob
os.setxattr(M / "p", "user.a", b"1")
assert os.getxattr(M / "p", "user.a") == b"1" and "user.a" in os.listxattr(M / "p")
shutil.copy2(M / "p", M / "q")
assert os.stat(M / "p").st_mtime_ns == os.stat(M / "q").st_mtime_ns
assert shutil.disk_usage(M).total > 0
names = sorted(e.name for e in os.scandir(M))
assert names == ["dir", "p", "q", "target"], names
"#;
    let mut command = Command::new("python3");
    command.args(["-c", script]).env("M", mount.path()).env("S", mount.scratch.path());
    run(&mut command);
    mount.check_quiet();
}
