use std::fs;

use super::*;
use std::ffi::OsString;

const HOST: Host = Host { memory: Bytes::gib(64), memory_available: Bytes::gib(48), cores: 4 };

fn toml(text: &str) -> Result<Layer> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kv.toml");
    fs::write(&path, text).expect("a file");
    Layer::from_file(&path)
}

fn env(vars: &[(&str, &str)]) -> Result<(Layer, Vec<String>)> {
    Layer::from_env(vars.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))))
}

fn flags(options: &str) -> Layer {
    Layer::from_fstab(["mountpoint=/mnt/kv", options]).expect("valid options")
}

fn resolve(options: &str) -> Result<Config> {
    Config::resolve(Layer::default(), Layer::default(), flags(options), &HOST)
}

fn refusal(options: &str) -> String {
    resolve(options).expect_err(options).to_string()
}

#[test]
fn defaults_suit_the_host() {
    let config = resolve("").expect("defaults are valid");
    assert_eq!((config.l1, config.dirty_limit), (Bytes::gib(4), Bytes::gib(1)));
    assert_eq!((config.slab_file_max, config.small_file_max), (Bytes::gib(1), Bytes::kib(256)));
    assert_eq!((config.threads, config.queue_depth), (4, 128));
    assert_eq!(config.fsname, "kvcachefs");
    assert!(config.is_memory_only() && config.lock && config.default_permissions && !config.daemon);

    let small = Host { memory: Bytes::mib(512), memory_available: Bytes::mib(300), cores: 1 };
    let config = Config::resolve(Layer::default(), Layer::default(), flags(""), &small).expect("defaults");
    assert_eq!((config.l1, config.dirty_limit, config.threads), (Bytes::mib(128), Bytes::mib(64), 2));

    let tiny = resolve("l1=64MiB").expect("the least L1");
    assert!(tiny.dirty_limit < tiny.l1);
}

#[test]
fn a_stronger_source_wins_and_is_named() {
    let file = toml("l1 = \"1GiB\"\nthreads = 3\nlock = false\nslab_rest = \"2s\"").expect("a valid file");
    let (env, unknown) = env(&[
        ("KVCACHEFS_THREADS", "5"),
        ("KVCACHEFS_LOCK", "true"),
        ("KVCACHEFS_SERVICE_HOST", "10.0.0.1"),
        ("KVCACHEFS_L2_ENGINE", ""),
        ("UNRELATED", "x"),
    ])
    .expect("valid variables");
    assert_eq!(unknown, ["KVCACHEFS_SERVICE_HOST"]);
    let config = Config::resolve(file, env, flags("threads=7"), &HOST).expect("a valid mix");
    assert_eq!((config.l1, config.source("l1")), (Bytes::gib(1), Source::File));
    assert_eq!((config.lock, config.source("lock")), (true, Source::Env));
    assert_eq!((config.threads, config.source("threads")), (7, Source::Flag));
    assert_eq!(config.slab_rest, Duration::from_secs(2));
    assert_eq!(config.source("evict"), Source::Default);
}

#[test]
fn what_is_rendered_can_be_read_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = dir.path().join("kv.store");
    fs::File::create(&store).and_then(|file| file.set_len(64 << 20)).expect("a file");
    let config =
        resolve(&format!("l2={}:64MiB,ro,evict=none,log_level=debug,l2_files_max=9", store.display()))
            .expect("valid options");
    let text = config.render();
    assert!(text.contains("evict = \"none\" # flag") && text.contains("threads = 4 # default"), "{text}");
    let again = Config::resolve(toml(&text).expect("valid TOML"), Layer::default(), Layer::default(), &HOST);
    let again = again.expect("the same configuration");
    let strip =
        |text: &str| text.lines().map(|line| line.split(" # ").next().map(str::to_owned)).collect::<Vec<_>>();
    assert_eq!(strip(&again.render()), strip(&text));
}

#[test]
fn prefetch_leaves_room_for_others() {
    let config = resolve("l1=1GiB").expect("defaults");
    assert_eq!((config.prefetch_window, config.prefetch_queue), (2, 1024));
    assert_eq!(config.prefetch_window_bytes, Bytes::mib(512));
    assert!(resolve("prefetch_window=0,prefetch_window_bytes=0B,prefetch_queue=0").is_ok(), "none at all");
}

#[test]
fn leases_leave_room_for_others() {
    let config = resolve("l1=1GiB").expect("defaults");
    assert_eq!((config.lease_max, config.lease_client_max), (Bytes::mib(768), Bytes::mib(512)));
    let config = resolve("l1=1GiB,lease_max=300MiB").expect("one client may have all that there is");
    assert_eq!((config.lease_max, config.lease_client_max), (Bytes::mib(300), Bytes::mib(300)));
    assert!(resolve("lease_max=0B").is_ok(), "none at all");
}

#[test]
fn every_option_is_rendered() {
    let text = resolve("").expect("defaults").render();
    for key in keys() {
        assert!(
            text.lines().any(|line| line.trim_start_matches("# ").split(' ').next() == Some(key.as_str())),
            "{key}"
        );
    }
    assert_eq!(text.lines().count(), keys().count());
}

#[test]
fn a_file_error_names_file_line_key_and_remedy() {
    for (text, expected) in [
        ("l1 = 4", "line 1, key 'l1': size '4' has no unit; write it in quotes, as \"4GiB\""),
        ("\nl1 = \"4\"", "line 2, key 'l1': size '4' has no unit; write 4GiB"),
        ("slab_rest = 5", "key 'slab_rest': duration '5' has no unit"),
        ("dirty-limit = \"1GiB\"", "key 'dirty-limit': no such option; write dirty_limit"),
        ("dirty = \"1GiB\"", "key 'dirty': no such option; remove it"),
        ("policy = \"s3fifo\"", "key 'policy': policy 's3fifo' is unknown; use lru"),
        ("log_level = \"loud\"", "key 'log_level': log level 'loud' is unknown"),
        ("lock = \"perhaps\"", "key 'lock'"),
        ("l2 = [\"/a:5\"]", "key 'l2': size '5' has no unit"),
        ("pid_file = \"kv.pid\"", "key 'pid_file': 'kv.pid' is a relative path"),
        ("l2 = [\"kv.store:1GiB\"]", "key 'l2': 'kv.store' is a relative path"),
        ("l2 = 5", "key 'l2'"),
        ("l2 = 5", "in quotes"),
        (
            "threads = \"2\"",
            "key 'threads': invalid type: string \"2\", expected usize; write it without quotes",
        ),
        ("lock = \"true\"", "expected a boolean; write it without quotes"),
        ("fsname = 5", "expected a string; write it in quotes"),
        ("format = true", "key 'format': would empty the stores at every start; remove it"),
        ("l1 = ", "line 1"),
        ("[section]\nl1 = \"1GiB\"", "line 1"),
    ] {
        let error = toml(text).expect_err(text).to_string();
        assert!(
            error.contains("kv.toml: ") && error.contains(expected) && !error.contains('\n'),
            "{text}: {error}"
        );
    }
    let error = Layer::from_file(Path::new("/nowhere/kv.toml")).expect_err("no file").to_string();
    assert!(error.contains("/nowhere/kv.toml") && error.contains("write the file"), "{error}");
}

#[test]
fn one_store_needs_no_list_in_a_file() {
    let one = toml("l2 = \"/nvme/kv.store:1GiB\"\nformat = false").expect("a valid file");
    assert_eq!(one.l2, toml("l2 = [\"/nvme/kv.store:1GiB\"]").expect("a valid file").l2);
    assert_eq!(one.l2.map(|specs| specs.len()), Some(1));
}

#[test]
fn an_environment_error_names_the_variable() {
    for (name, value, expected) in [
        ("KVCACHEFS_L1", "4", "KVCACHEFS_L1: --l1: size '4' has no unit"),
        ("KVCACHEFS_ALLOW_OTHER", "perhaps", "KVCACHEFS_ALLOW_OTHER"),
        ("KVCACHEFS_FORMAT", "true", "KVCACHEFS_FORMAT: would empty the stores at every start"),
        ("KVCACHEFS_L2", "/a:1GiB,/b:2", "KVCACHEFS_L2: --l2: '/b:2': size '2' has no unit"),
        ("KVCACHEFS_EVICT", "some", "KVCACHEFS_EVICT: --evict: eviction 'some' is unknown; use lru or none"),
    ] {
        let error = env(&[(name, value)]).expect_err(name).to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{name}: {error}");
    }
    let (layer, _) = env(&[("KVCACHEFS_L2", "/a:1GiB,/b")]).expect("two stores");
    assert_eq!(layer.l2.map(|specs| specs.len()), Some(2));
}

#[test]
fn a_store_is_a_path_and_perhaps_a_size() {
    let spec = |text: &str| text.parse::<L2Spec>().map_err(|error| error.to_string());
    let parts = |text: &str| spec(text).map(|spec| (spec.path.display().to_string(), spec.size));
    assert_eq!(parts("/nvme/kv:200GiB"), Ok(("/nvme/kv".to_owned(), Some(Bytes::gib(200)))));
    assert_eq!(parts("/dev/nvme1n1"), Ok(("/dev/nvme1n1".to_owned(), None)));
    let by_path = "/dev/disk/by-path/pci-0000:01:00.0-nvme-1";
    assert_eq!(parts(by_path), Ok((by_path.to_owned(), None)));
    assert_eq!(parts("/a:b:1GiB"), Ok(("/a:b".to_owned(), Some(Bytes::gib(1)))));
    for text in ["/a:200", "/a:-1GiB", "/a:1Gib/s", "/a:3parsecs"] {
        let outcome = spec(text);
        assert!(outcome.is_err() || text.ends_with("/s"), "{text}: {outcome:?}");
    }
    assert_eq!(spec("/a:1.5TiB").expect("valid").to_string(), "/a:1536GiB");
}

#[test]
fn what_cannot_work_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name).display().to_string();
    fs::write(at("small"), "someone's notes").expect("a file");
    for (options, expected) in [
        ("l1=63MiB".to_owned(), "--l1: 63MiB is less than the 64MiB that L1 needs; give at least 64MiB"),
        ("l1=49GiB".to_owned(), "--l1: 49GiB is more than the 48GiB of memory available"),
        ("l1=1GiB,dirty_limit=1GiB".to_owned(), "--dirty-limit: 1GiB is not below the 1GiB of L1"),
        (
            "dirty_limit=1MiB".to_owned(),
            "--dirty-limit: 1MiB is too little for writers to make progress; give at least 64MiB",
        ),
        ("l1=100MiB,dirty_limit=40MiB".to_owned(), "give at least 50MiB"),
        ("l1=1GiB,slab_file_max=2GiB".to_owned(), "--slab-file-max: 2GiB is more than"),
        (
            "slab_file_max=128KiB,small_file_max=200KiB".to_owned(),
            "--small-file-max: 200KiB is more than --slab",
        ),
        ("small_file_max=2MiB".to_owned(), "--small-file-max: 2MiB is more than a block"),
        ("chunk_reserve=3MiB".to_owned(), "--chunk-reserve: 3MiB is not a multiple of 2MiB"),
        (
            "l1=1GiB,lease_max=1GiB".to_owned(),
            "--lease-max: 1GiB is not below the 1GiB of L1: nobody else could go on; give less",
        ),
        (
            "l1=1GiB,lease_max=100MiB,lease_client_max=101MiB".to_owned(),
            "--lease-client-max: 101MiB is more than --lease-max 100MiB",
        ),
        ("lease_ttl_max=0s".to_owned(), "--lease-ttl-max: 0s would end each lease at once"),
        (
            "l1=1GiB,prefetch_window_bytes=1GiB".to_owned(),
            "--prefetch-window-bytes: 1GiB is not below the 1GiB of L1: nobody else could go on; give less",
        ),
        ("prefetch_window=257".to_owned(), "--prefetch-window: 257 is out of range; give at most 256"),
        ("prefetch_queue=65537".to_owned(), "--prefetch-queue: 65537 is out of range; give at most 65536"),
        ("threads=0".to_owned(), "--threads: 0 is out of range"),
        ("threads=1".to_owned(), "--threads: 1 is not enough"),
        ("queue_depth=0".to_owned(), "--queue-depth: 0 is out of range"),
        ("l2_files_max=0".to_owned(), "--l2-files-max: 0 leaves no room"),
        ("fsync_deadline=0s".to_owned(), "--fsync-deadline: 0s would let nothing become durable"),
        ("request_deadline=0s".to_owned(), "--request-deadline: 0s would answer nothing"),
        ("publish_wait=31s".to_owned(), "--publish-wait: is not below --request-deadline"),
        (format!("l2={a}:64MiB,l2={a}:32MiB", a = at("a")), "the same store is given twice"),
        (
            format!("l2={}:64MiB,l2={}/./small:64MiB", at("small"), dir.path().display()),
            "the same store is given twice",
        ),
        ("l2=/mnt/kv/store:64MiB".to_owned(), "lies below the mount point /mnt/kv, which will hide it"),
        ("pid_file=/mnt/kv/dir/pid".to_owned(), "--pid-file /mnt/kv/dir/pid: lies below the mount point"),
        ("log_file=/mnt/kv/log".to_owned(), "--log-file /mnt/kv/log: lies below the mount point"),
        (format!("l2={}", at("new")), "does not exist; give a size"),
        (format!("l2={}:64MiB", at("no/dir/kv")), "does not exist; make it: mkdir -p "),
        (format!("l2={}:1MiB", at("new")), "1MiB is too small for a store"),
        (format!("l2={}:1000000TiB", at("new")), "are free there; give a smaller size or make room"),
        (format!("l2={}", at("small")), "holds 15 bytes, too few for a store"),
        (format!("l2={}:64MiB", dir.path().display()), "is a directory"),
        ("l2=/dev/null:64MiB".to_owned(), "is neither a file nor a block device"),
    ] {
        let error = refusal(&options);
        assert!(error.contains(expected) && !error.contains('\n'), "{options}: {error}");
    }
    for (options, expected) in [
        ("".to_owned(), "--format: there is no L2 to format"),
        (format!("ro,l2={}:64MiB", at("a")), "--format: a read-only mount cannot be formatted"),
    ] {
        let format = Layer { format: Some(true), ..flags(&options) };
        let error =
            Config::resolve(Layer::default(), Layer::default(), format, &HOST).expect_err("a refusal");
        assert!(error.to_string().contains(expected), "{options}: {error}");
    }
    let nowhere = Config::resolve(Layer::default(), Layer::default(), Layer::default(), &HOST);
    assert!(nowhere.expect_err("no mount point").to_string().contains("MOUNTPOINT: is missing"));
}

#[test]
fn an_error_points_at_whoever_set_the_option() {
    let file = toml("l1 = \"1MiB\"").expect("a valid file");
    let error = Config::resolve(file, Layer::default(), flags(""), &HOST).expect_err("too small").to_string();
    assert!(error.starts_with("key 'l1': "), "{error}");
    let (env, _) = env(&[("KVCACHEFS_L1", "1MiB")]).expect("a valid variable");
    let error = Config::resolve(Layer::default(), env, flags(""), &HOST).expect_err("too small").to_string();
    assert!(error.starts_with("KVCACHEFS_L1: "), "{error}");
}

#[test]
fn fstab_options_are_read_and_generic_ones_skipped() {
    let layer = Layer::from_fstab([
        "rw,ro,l1=1GiB,allow_other,lock=false",
        "nofail,x-systemd.automount,_netdev,l1=2GiB",
    ])
    .expect("valid options");
    assert_eq!(layer.l1, Some(Bytes::gib(2)));
    assert_eq!((layer.read_only, layer.allow_other, layer.lock), (Some(true), Some(true), Some(false)));
    assert_eq!(fstab_config(["ro,config=/etc/kv.toml", "nofail"]), Some(PathBuf::from("/etc/kv.toml")));
}
