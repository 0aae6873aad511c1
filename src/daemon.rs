//! The daemon: joins the parts, starts them in order and stops them in reverse.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::background::Ready;
use crate::config::{Config, Evict, HugePages, L2Engine, ReadPath, Recycle};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::l1::{Pool, PoolConfig, RegionWatcher};
use crate::l2::volume::{Volume, VolumeOptions, Wrap};
use crate::l2::{DeviceOptions, EngineKind, EngineOptions, Made};
use crate::memory::{Region, RegionId};
use crate::mount;
use crate::shown;
use crate::signals::{self, Stop, Watch};
use crate::stats::Events;
use crate::store::Store;
use crate::store::core::{Core, Settings};
use crate::store::drain::Progress;
use crate::store::recover::{Recovered, Recovery, SUPERSEDED, positions_max};
use crate::sync::{JoinHandle, spawn};
use crate::units::{Bytes, counted};

/// How long after its deadline a drain that has begun may take to say so.
const UNBEGUN: Duration = Duration::from_secs(1);
/// Threads that check what comes from the devices and answer clients.
const COMPLETION_THREADS: usize = 2;
/// Descriptors and mappings that are not slabs.
const RESERVED_DESCRIPTORS: u64 = 512;

/// How long the last clients may take to let go when somebody wants the daemon to end at once.
const PARTING: Duration = Duration::from_millis(500);

/// Files that a drain at the end says it could not store; the log has them all.
const FAILURES_SAID: usize = 20;

/// What the main thread waits for.
enum Message {
    Stop(Stop),
    Ended(std::io::Result<()>),
}

impl From<Stop> for Message {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// What has been heard so far. Nothing is lost, in whatever order a stop and an unmount come.
struct Heard {
    messages: Receiver<Message>,
    ended: Option<std::io::Result<()>>,
    now: bool,
}

impl Heard {
    fn note(&mut self, message: Message) {
        match message {
            Message::Ended(result) => self.ended = Some(result),
            Message::Stop(stop) => self.now |= stop == Stop::Now,
        }
    }

    fn wait(&mut self, limit: Duration) -> bool {
        let message = self.messages.recv_timeout(limit);
        message.map(|message| self.note(message)).is_ok()
    }

    /// Whether somebody has lost patience.
    fn wants_now(&mut self) -> bool {
        while self.wait(Duration::ZERO) {}
        self.now
    }

    /// Whether the session ends in time.
    fn ends_within(&mut self, limit: Duration) -> bool {
        let mut deadline = Instant::now() + limit;
        while self.ended.is_none() {
            if self.now {
                deadline = deadline.min(Instant::now() + PARTING);
            }
            if !self.wait(deadline.saturating_duration_since(Instant::now())) {
                break;
            }
        }
        self.ended.is_some()
    }
}

/// Registers L1's memory with the devices' engines. L1 is there before they are, and has no memory yet.
#[derive(Default)]
struct FixedBuffers(OnceLock<Arc<Volume>>);

impl RegionWatcher for FixedBuffers {
    fn created(&self, region: Region) {
        if let Some(volume) = self.0.get() {
            volume.register(region);
        }
    }
    fn destroyed(&self, id: RegionId) {
        if let Some(volume) = self.0.get() {
            volume.unregister(id);
        }
    }
}

/// Mounts, serves until stopped, drains and unmounts.
///
/// # Errors
/// Whatever kept the mount from working, or kept the drain from being complete.
pub fn run(config: Config, ready: &mut Ready) -> Result<()> {
    let request = mount::Request::from(&config);
    let mountpoint = mount::prepare(&request)?;
    let events = Arc::new(Events::default());
    let (sender, messages) = channel();
    // What --format empties is lost, so it is emptied for a mount that is there. Otherwise the store comes first: reading
    // its catalog takes a while, and clients would wait for it.
    let early = config.format.then(|| mount_watched(&config, &request, &sender)).transpose()?;
    let stopped = early.as_ref().map(|(watch, _)| watch.stopped()).unwrap_or_default();
    let mut daemon = match Daemon::start(&config, &events, ready, &stopped) {
        Ok(daemon) => daemon,
        Err(error) => {
            if let Some((_, mounted)) = early {
                let _ = mount::leave(&mounted.mountpoint, &mounted.number);
            }
            return Err(error);
        }
    };
    let wants_passthrough = config.read_path != ReadPath::Daemon;
    let control = Arc::new(Control::new(
        daemon.store.clone(),
        events.clone(),
        config.render(Some(daemon.files_max)),
        config.switched_off(),
        &mountpoint,
        wants_passthrough,
    ));
    daemon.notes.iter().for_each(|note| control.without(note.clone()));

    let marked = daemon.mark_in_use();
    let (_watch, mounted) = match (early, marked) {
        (Some(early), Ok(())) => early,
        (Some((_, mounted)), Err(error)) => {
            let _ = mount::leave(&mounted.mountpoint, &mounted.number);
            daemon.stop();
            return Err(error);
        }
        (None, marked) => match marked.and_then(|()| mount_watched(&config, &request, &sender)) {
            Ok(both) => both,
            Err(error) => {
                daemon.stop();
                return Err(error);
            }
        },
    };
    let guard = config.guard.then(|| guard_over(&mounted, !config.daemon, &control)).flatten();
    let served =
        crate::fs::serve(mounted.device, &daemon.store, &control, config.threads, config.allow_other);
    let served = match served {
        Ok(served) => served,
        Err(error) => {
            let _ = mount::leave(&mounted.mountpoint, &mounted.number);
            daemon.stop();
            return Err(Error::caused_by(config.mountpoint.display(), error));
        }
    };
    if config.read_path == ReadPath::Passthrough && !daemon.store.snapshot().passthrough {
        let _ = mount::leave(&mounted.mountpoint, &mounted.number);
        let _ = served.join();
        daemon.stop();
        return Err(no_passthrough());
    }
    let waiter = std::thread::Builder::new()
        .name("kv-session".into())
        .spawn(move || {
            let ended = served.join();
            let _ = sender.send(Message::Ended(ended));
        })
        .map_err(|error| {
            let _ = mount::leave(&mounted.mountpoint, &mounted.number);
            Error::caused_by("thread kv-session", error)
        })?;
    let mut heard = Heard { messages, ended: None, now: false };
    events.push(format!("mounted at {}", mounted.mountpoint.display()));
    daemon.said.iter().for_each(|said| log::info!("{said}"));
    log::info!("mounted at {}", mounted.mountpoint.display());
    if let Err(error) = ready.mounted() {
        // Nobody has been told of the mount, so nobody shall find it.
        let _ = mount::leave(&mounted.mountpoint, &mounted.number);
        if heard.ends_within(PARTING) {
            daemon.stop();
        }
        return Err(error);
    }
    daemon.keep_stores();
    match heard.messages.recv() {
        Ok(message) => heard.note(message),
        Err(error) => return Err(Error::caused_by("waiting for the mount", error)),
    }
    ready.stopping();
    let timeout = config.drain_timeout;
    let mut stored = Ok(());
    if heard.ended.is_none() {
        log::info!("stopping: draining");
        stored = daemon.drain_until(timeout, || heard.wants_now());
        if let Err(error) = mount::leave(&mounted.mountpoint, &mounted.number) {
            log::warn!("{error}");
        }
        // It has been detached: the session ends once the last client has let go. A client that does not is left behind.
        if !heard.ends_within(PARTING.min(timeout)) && !heard.wants_now() {
            let stored = if stored.is_ok() { "everything is stored" } else { "the mount is detached" };
            log::info!(
                "stopping: {stored}; waiting up to {timeout:?} for clients that hold files; a second signal ends at once"
            );
        }
        if !heard.ends_within(timeout) {
            log::warn!("clients still use the mount; ending without them");
        }
    }
    if heard.ended.is_some() && mount::is_gone(&mounted.number) {
        daemon.store.close_all();
    }
    // After the last client has gone: what it wrote meanwhile.
    let stored = stored.and_then(|()| daemon.finish(timeout, || heard.wants_now()));
    let Some(served) = heard.ended else {
        // Session threads cannot be joined while the kernel waits for a client; everything that matters is done.
        if let Some(guard) = guard {
            guard.stay();
        }
        return stored;
    };
    let _ = waiter.join();
    daemon.stop();
    drop(guard);
    log::info!("unmounted");
    stored.and(served.map_err(|error| Error::caused_by("serving the mount", error)))
}

/// Mounts. Signals are watched for before that: one that came just after it would leave the mount behind, dead.
fn mount_watched(
    config: &Config,
    request: &mount::Request,
    sender: &Sender<Message>,
) -> Result<(Watch, mount::Mounted)> {
    let watch = signals::watch(sender.clone())?;
    let mounted = mount::mount(request)?;
    // Of the rest only the kernel can say whether it offers it, when it is served.
    if config.read_path == ReadPath::Passthrough && mounted.through == mount::Through::Helper {
        let _ = mount::leave(&mounted.mountpoint, &mounted.number);
        return Err(no_passthrough());
    }
    Ok((watch, mounted))
}

fn no_passthrough() -> Error {
    Error::new("--read-path passthrough", "the kernel offers none")
        .remedy("use --read-path auto, or run as root on Linux 6.9 or later")
}

/// Has somebody watch over the mount. This is the main thread: what it has started hears of its end.
fn guard_over(mounted: &mount::Mounted, speaks: bool, control: &Control) -> Option<Guard> {
    match Guard::start(&mounted.mountpoint, &mounted.number, speaks) {
        Ok(guard) => {
            control.set_guard(guard.pid());
            Some(guard)
        }
        Err(error) => {
            control.without(format!(
                "guard ({error}): if the daemon is killed, clients may hang until `kvcachefs umount --force`"
            ));
            None
        }
    }
}

/// The store and its threads.
struct Daemon {
    store: Arc<Store>,
    volume: Option<Arc<Volume>>,
    read_only: bool,
    threads: Vec<(&'static str, JoinHandle)>,
    notes: Vec<String>,
    /// The store files that this start has made; they go with it if it fails.
    made: Vec<Made>,
    /// What was found in L2.
    said: Option<String>,
    /// How many files there may be.
    files_max: u64,
}

impl Daemon {
    fn start(
        config: &Config,
        events: &Arc<Events>,
        ready: &Ready,
        stopped: &Arc<AtomicBool>,
    ) -> Result<Self> {
        Self::start_on(config, events, ready, None, stopped)
    }

    fn start_on(
        config: &Config,
        events: &Arc<Events>,
        ready: &Ready,
        wrap: Option<Wrap>,
        stopped: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let mut daemon = Self::open_on(config, events, ready, wrap, stopped)?;
        daemon.start_threads()?;
        Ok(daemon)
    }

    /// All but the threads.
    fn open_on(
        config: &Config,
        events: &Arc<Events>,
        ready: &Ready,
        wrap: Option<Wrap>,
        stopped: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let mut notes = Vec::new();
        let slab_bytes_max = config.slab_file_max.0.max(2 << 20).next_multiple_of(4096);
        raise_file_size(config, slab_bytes_max)?;
        // Before the stores: a store is neither made nor emptied for an L1 that cannot be had.
        let slabs_max = raise_limits(&mut notes);
        let buffers = (!config.is_memory_only()).then(|| Arc::new(FixedBuffers::default()));
        let reserve = config.chunk_reserve.map_or_else(|| (config.l1.0 / 16).max(8 << 20), |bytes| bytes.0);
        let pool = Pool::new(
            PoolConfig {
                budget_bytes: config.l1.0,
                lock: config.lock,
                huge_pages: config.huge_pages == HugePages::Auto,
                rest: config.slab_rest,
                strict: config.recycle == Recycle::Strict,
                chunk_reserve_bytes: reserve,
                slab_bytes_max,
                slabs_max,
            },
            buffers.clone().map(|buffers| buffers as Arc<dyn RegionWatcher>),
        )
        .map_err(|error| Error::new("--l1", error))?;
        let uid = nix::unistd::geteuid().as_raw();
        let gid = nix::unistd::getegid().as_raw();
        let (volume, recovered, made, said) = match open_volume(config, uid, gid, ready, wrap, stopped)? {
            Some(OpenedStore { volume, recovered, made, said }) => {
                (Some(Arc::new(volume)), recovered, made, Some(said))
            }
            None => {
                notes.push("L2: memory only, what leaves L1 is gone".to_owned());
                (None, Recovery::new(uid, gid).finish(), Vec::new(), None)
            }
        };
        if let Some(volume) = &volume {
            if let Some(buffers) = &buffers {
                let _ = buffers.0.set(volume.clone());
            }
            notes.extend(volume.notes());
            if let Some(asked) = config.l2_files_max.filter(|asked| *asked > volume.files_max()) {
                let note = format!(
                    "--l2-files-max {asked}: the store was made for {} files; more take a new one, made with --format, \
                     which loses what is in it",
                    volume.files_max()
                );
                log::warn!("{note}");
                notes.push(note);
            }
        }
        notes.extend(pool.without().map(str::to_owned));
        let files_max = config
            .l2_files_max
            .unwrap_or(u64::MAX)
            .min(volume.as_ref().map_or(u64::from(u32::MAX / 2), |volume| volume.files_max()));
        let settings = Settings {
            passthrough: false,
            memory_only: volume.is_none(),
            evict: config.evict == Evict::Lru,
            permissions: config.default_permissions,
            small_file_max: config.small_file_max.0.min(crate::store::hot::BLOCK),
            slab_file_max: config.slab_file_max.0,
            dirty_limit_pages: config.dirty_limit.0 / 4096,
            capacity_pages: volume.as_ref().map_or(config.l1.0 / 4096, |volume| volume.capacity_pages()),
            positions_max: positions_max(volume.as_ref().map_or(u64::MAX, |volume| volume.files_max())),
            // What the catalog was made for cannot grow.
            device_pages: volume.as_ref().map_or_else(Vec::new, |volume| volume.device_pages()),
            files_max,
            catalog_bytes_max: volume.as_ref().map_or(u64::MAX, |volume| volume.catalog_bytes_max()),
            publish_wait: config.publish_wait,
            request_deadline: config.request_deadline,
            fsync_deadline: config.fsync_deadline,
            drain_timeout: config.drain_timeout,
            lease_max_bytes: config.lease_max.0,
            lease_client_max_bytes: config.lease_client_max.0,
            lease_ttl_max: config.lease_ttl_max,
            prefetch_window: config.prefetch_window,
            prefetch_window_bytes: config.prefetch_window_bytes.0,
            prefetch_queue: config.prefetch_queue,
        };
        let Recovered { tree, allocators, by_recency, dropped, refused, .. } = recovered;
        let mut core = Core::new(tree, pool.clone(), settings, allocators);
        core.count_all();
        // No number of one life of the daemon is that of another.
        core.tree.generation = crate::store::core::now().unsigned_abs();
        core.counters.recovery_bytes = volume.as_ref().map_or(0, |volume| volume.recovery_bytes());
        for idx in by_recency {
            core.touch(idx);
        }
        for (id, why) in &dropped {
            let path = core.tree.path(id.idx());
            // What stood in for a file that was open to write, beside the version before it, is no damage.
            let level = if why == SUPERSEDED { log::Level::Info } else { log::Level::Error };
            log::log!(level, "{path} was dropped from the catalog: {why}");
            events.push(format!("dropped {path}: {why}"));
        }
        for (id, why) in &refused.first {
            log::error!("a record of node {:#x} was dropped from the catalog: {why}", id.0);
            events.push(format!("dropped a record of node {:#x}: {why}", id.0));
        }
        if refused.count > refused.first.len() as u64 {
            log::error!("{} records were dropped from the catalog in all", refused.count);
            events.push(format!("dropped {} records in all", refused.count));
        }
        if !config.read_only {
            core.remove_records(dropped.into_iter().map(|(id, _)| id).collect());
        }
        let store = Store::new(core, pool, volume.clone(), events.clone());
        let read_only = config.read_only;
        Ok(Self { store, volume, read_only, threads: Vec::new(), notes, made, said, files_max })
    }

    fn start_threads(&mut self) -> Result<()> {
        let failed = |error| Error::caused_by("starting threads", error);
        self.store.start_completions(COMPLETION_THREADS).map_err(failed)?;
        type Run = fn(&Arc<Store>);
        let runs: [(&str, Run); 4] = [
            ("kv-write", Store::run_writer),
            ("kv-commit", Store::run_committer),
            ("kv-timer", Store::run_timer),
            ("kv-admit", Store::run_admission),
        ];
        for (name, run) in runs {
            if self.volume.is_none() && (name == "kv-write" || name == "kv-commit") {
                continue;
            }
            self.start_thread(name, run).map_err(failed)?;
        }
        Ok(())
    }

    fn start_thread(&mut self, name: &'static str, run: fn(&Arc<Store>)) -> std::io::Result<()> {
        let store = self.store.clone();
        let thread = spawn(name, move || run(&store))?;
        self.threads.push((name, thread));
        Ok(())
    }

    /// The mount works, so what was made for it stays.
    fn keep_stores(&mut self) {
        self.made.drain(..).for_each(Made::keep);
    }

    /// Waits until everything published is durable. Gives up at the timeout, or when `interrupted`.
    fn drain_until(&self, timeout: Duration, mut interrupted: impl FnMut() -> bool) -> Result<()> {
        let (sender, done) = channel();
        let tell = move |_: &mut Core, ended: std::result::Result<(), Errno>, progress: Progress| {
            let _ = sender.send((ended, progress));
        };
        let deadline = Instant::now().checked_add(timeout);
        let late = |what: &str| {
            Error::new("drain", format!("not everything could be stored within {timeout:?}: {what}"))
                .remedy("what was durable is safe; --drain-timeout gives more time")
        };
        self.store.drain_all(deadline, Box::new(tell));
        loop {
            match done.recv_timeout(Duration::from_millis(50)) {
                Ok((Ok(()), _)) => return Ok(()),
                Ok((Err(Errno::ETIMEDOUT), progress)) => {
                    let left = progress.files.saturating_sub(progress.drained_files);
                    return Err(late(&format!("{} left", counted(left, "file"))));
                }
                Ok((Err(errno), progress)) => {
                    let mut cause =
                        format!("{} could not be stored: {errno}", counted(progress.failed, "file"));
                    for path in progress.failures.iter().take(FAILURES_SAID) {
                        cause.push_str("\n  ");
                        cause.push_str(&shown::name(path));
                    }
                    return Err(Error::new("drain", cause).remedy("the log names them"));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new("drain", "the store has stopped").remedy("the log says why"));
                }
                // It does not begin before what has been closed is released, for which it waits as lookups do.
                Err(RecvTimeoutError::Timeout)
                    if deadline.is_some_and(|deadline| deadline + UNBEGUN < Instant::now()) =>
                {
                    return Err(late("files are still being closed"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if interrupted() {
                return Err(Error::new("drain", "stopped before everything was stored")
                    .remedy("what was durable is safe"));
            }
        }
    }

    /// Has the next start see an end that was not clean. From here on there may be something to lose.
    fn mark_in_use(&self) -> Result<()> {
        match &self.volume {
            Some(volume) if !self.read_only => volume
                .mark_in_use()
                .map_err(|error| Error::caused_by("the catalog", error).remedy("check the device")),
            _ => Ok(()),
        }
    }

    /// Stores what is left and a checkpoint, so that recency survives. A read-only mount leaves the store as it was.
    fn finish(&self, timeout: Duration, interrupted: impl FnMut() -> bool) -> Result<()> {
        let Some(volume) = &self.volume else { return Ok(()) };
        self.drain_until(timeout, interrupted)?;
        if !self.read_only {
            // First what is left, so that nothing comes behind the checkpoint and the next start sees a clean end.
            self.store.commit(volume, false);
            self.store.commit(volume, true);
        }
        Ok(())
    }

    fn stop(self) {
        self.store.stop_threads();
        for (name, thread) in self.threads {
            if thread.join().is_err() {
                log::error!("{name} panicked");
            }
        }
        if let Some(volume) = &self.volume {
            volume.stop();
        }
        self.store.stop_completions();
    }
}

/// L2, and what is in it.
struct OpenedStore {
    volume: Volume,
    recovered: Recovered,
    made: Vec<Made>,
    /// What to say of it once there is a mount: a store that was made goes again with a start that fails.
    said: String,
}

/// Opens L2 and reads its catalog.
fn open_volume(
    config: &Config,
    uid: u32,
    gid: u32,
    ready: &Ready,
    wrap: Option<Wrap>,
    stopped: &Arc<AtomicBool>,
) -> Result<Option<OpenedStore>> {
    if config.is_memory_only() {
        return Ok(None);
    }
    ready.progress("reading the catalog");
    let paths: Vec<_> = config
        .l2
        .iter()
        .map(|spec| (spec.path.as_path(), spec.size.map(|size| size.0 / 4096 * 4096)))
        .collect();
    let options = VolumeOptions {
        wrap,
        format: config.format,
        read_only: config.read_only,
        files_max: config.l2_files_max,
        stopped: stopped.clone(),
        device: DeviceOptions {
            size: None,
            kind: match config.l2_engine {
                L2Engine::Auto => EngineKind::Auto,
                L2Engine::Uring => EngineKind::Uring,
                L2Engine::Threads => EngineKind::Threads,
            },
            engine: EngineOptions { depth: config.queue_depth, ..EngineOptions::default() },
        },
    };
    let mut recovery = Recovery::new(uid, gid);
    let opened = Volume::open(&paths, &options, &mut recovery)?;
    let tying = Instant::now();
    let recovered = recovery.finish();
    let read_in = opened.read_in + tying.elapsed();
    opened.warnings.iter().for_each(|warning| log::warn!("{warning}"));
    let said = if opened.fresh {
        format!(
            "made a new store on {}: {} for files; the catalog, its log and a reserve take the rest",
            counted(paths.len() as u64, "path"),
            Bytes(opened.volume.capacity_pages() * 4096).approx()
        )
    } else {
        format!(
            "store opened: {}, {} in use, {} of catalog read in {:.0?}",
            counted(recovered.tree.files, "file"),
            Bytes(recovered.allocated_pages * 4096).approx(),
            Bytes(opened.volume.recovery_bytes()).approx(),
            read_in
        )
    };
    Ok(Some(OpenedStore { volume: opened.volume, recovered, made: opened.made, said }))
}

/// Raises the limit of file sizes as far as allowed, and refuses one that slabs or stores do not fit in: what met it
/// would fail as if the device did.
fn raise_file_size(config: &Config, slab_bytes_max: u64) -> Result<()> {
    use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
    let Ok((_, hard)) = getrlimit(Resource::RLIMIT_FSIZE) else { return Ok(()) };
    if hard == RLIM_INFINITY || setrlimit(Resource::RLIMIT_FSIZE, RLIM_INFINITY, RLIM_INFINITY).is_err() {
        let _ = setrlimit(Resource::RLIMIT_FSIZE, hard, hard);
    }
    let Ok((limit, _)) = getrlimit(Resource::RLIMIT_FSIZE) else { return Ok(()) };
    let refusal = |what: &dyn std::fmt::Display, bytes| {
        let (wanted, limit) = (Bytes(bytes).approx(), Bytes(limit).approx());
        let cause = format!("takes files of {wanted}, and RLIMIT_FSIZE allows {limit}");
        Err(Error::new(what, cause).remedy("raise it (ulimit -f, LimitFSIZE=)"))
    };
    for spec in &config.l2 {
        let found = std::fs::metadata(&spec.path).ok();
        if found.as_ref().is_some_and(|found| !found.is_file()) {
            continue; // devices have no such limit
        }
        let bytes = spec.size.map_or(0, |size| size.0).max(found.map_or(0, |found| found.len()));
        if bytes > limit {
            return refusal(&spec.path.display(), bytes);
        }
    }
    if slab_bytes_max > limit { refusal(&"--l1", slab_bytes_max) } else { Ok(()) }
}

/// Raises the limit of descriptors as far as allowed, and says how many slabs that leaves room for.
fn raise_limits(notes: &mut Vec<String>) -> usize {
    use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_MEMLOCK) {
        // What cannot be raised shows when L1 is locked.
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, hard, hard);
    }
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_AS)
        && hard != RLIM_INFINITY
        && setrlimit(Resource::RLIMIT_AS, RLIM_INFINITY, RLIM_INFINITY).is_err()
    {
        let _ = setrlimit(Resource::RLIMIT_AS, hard, hard);
        notes.push(format!(
            "more than {} of address space: where that is not enough for L1, writes fail; raise it (ulimit -v, LimitAS=)",
            Bytes(hard).approx()
        ));
    }
    let mut files = 1024;
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // Root may go beyond the hard limit; others up to it.
        let wish = hard.max(1 << 20);
        files = if setrlimit(Resource::RLIMIT_NOFILE, wish, wish).is_ok() {
            wish
        } else if setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
            hard
        } else {
            soft
        };
    }
    let maps: u64 = std::fs::read_to_string("/proc/sys/vm/max_map_count")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(65_530);
    let slabs = files.min(maps).saturating_sub(RESERVED_DESCRIPTORS).max(64);
    if slabs < 4096 {
        notes.push(format!(
            "many slabs: {files} descriptors and vm.max_map_count={maps} leave room for {slabs}; raise ulimit -n or the sysctl for more"
        ));
    }
    usize::try_from(slabs).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod catalog_tests;
#[cfg(test)]
mod control_model;
#[cfg(test)]
mod device_log;
#[cfg(test)]
mod drain_tests;
#[cfg(test)]
mod drain_ticket_tests;
#[cfg(test)]
mod full_device;
#[cfg(test)]
mod in_flight_tests;
#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod late_release_tests;
#[cfg(test)]
mod lease_tests;
#[cfg(test)]
mod prefetch_tests;
#[cfg(test)]
mod read_tests;
#[cfg(test)]
mod reads_fuzz;
#[cfg(test)]
mod replaced_tests;
#[cfg(test)]
mod stale_tests;
#[cfg(test)]
mod stand_in_tests;
#[cfg(test)]
mod tests;
