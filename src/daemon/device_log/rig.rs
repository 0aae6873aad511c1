//! A daemon without a mount on a machine's devices, and what a client sees of it.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use nix::errno::Errno;

use super::machine::{Machine, plug};
use super::model::{Attributes, Found, Thing};
use crate::background::Ready;
use crate::config::{Config, Layer};
use crate::daemon::Daemon;
use crate::host::Host;
use crate::l2::Extent;
use crate::stats::Events;
use crate::store::core::{Core, HOLE};
use crate::store::node::{Kind, ROOT_INO};
use crate::store::{Answer, Caller, Entry, Handle, Store};

/// Nothing takes this long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// Times that an open may be sent to look again.
const AGAIN_MAX: usize = 20;

/// How the store is opened: the paths are those of files that only give their lengths and locks.
pub struct Setup {
    config: Config,
    ready: Ready,
}

impl Setup {
    pub fn new(dir: &Path, lens: &[u64], evict: &str) -> Self {
        let stores: Vec<String> = lens
            .iter()
            .enumerate()
            .map(|(at, len)| format!("l2={}:{}KiB", dir.join(format!("device{at}")).display(), len >> 10))
            .collect();
        let options = format!(
            "l1=64MiB,lock=false,l2-engine=threads,slab-file-max=512KiB,small-file-max=64KiB,evict={evict},{}",
            stores.join(",")
        );
        let flags = Layer::from_fstab(["mountpoint=/mnt/unused", &options]).unwrap();
        let config = Config::resolve(Layer::default(), Layer::default(), flags, &Host::probe()).unwrap();
        Self { config, ready: crate::background::start(false, None).unwrap().unwrap() }
    }
}

pub struct Rig {
    daemon: Daemon,
    events: Arc<Events>,
}

impl Rig {
    pub fn open(setup: &Setup, machine: &Arc<Machine>) -> Result<Self, String> {
        let events = Arc::new(Events::default());
        for (spec, image) in setup.config.l2.iter().zip(machine.images()) {
            let file = OpenOptions::new().create(true).truncate(false).write(true).open(&spec.path);
            file.and_then(|file| image.show_in(&file)).unwrap();
        }
        let daemon = machine
            .opening(|| Daemon::start_on(&setup.config, &events, &setup.ready, Some(plug), &Arc::default()));
        daemon.map(|daemon| Self { daemon, events }).map_err(|error| format!("it does not open: {error}"))
    }

    pub fn store(&self) -> &Arc<Store> {
        &self.daemon.store
    }

    pub fn stop(self) {
        self.daemon.stop();
    }

    /// Everything that can be seen, read to the last byte.
    pub fn tree(&self) -> Result<BTreeMap<String, Found>, String> {
        let mut found = BTreeMap::new();
        let mut dirs = vec![(ROOT_INO, String::new())];
        while let Some((ino, path)) = dirs.pop() {
            let mut list = Vec::new();
            let listed = self.store().readdir(ino, 2, &mut |entry| {
                list.push((entry.ino, entry.kind, String::from_utf8_lossy(&entry.name).into_owned()));
                true
            });
            listed.map_err(|errno| format!("{path}: {errno}"))?;
            for (ino, kind, name) in list {
                let path = if path.is_empty() { name } else { format!("{path}/{name}") };
                let failed = |errno| format!("{path} cannot be read: {errno}: {}", self.said().join("; "));
                let thing = match kind {
                    Kind::Dir => {
                        dirs.push((ino, path.clone()));
                        Thing::Dir
                    }
                    Kind::Symlink => Thing::Link(self.store().readlink(ino).map_err(failed)?),
                    Kind::File => Thing::File(Arc::new(read(self.store(), ino).map_err(failed)?)),
                };
                let attributes = attributes(self.store(), ino).map_err(failed)?;
                found.insert(path, Found { thing, attributes });
            }
        }
        Ok(found)
    }

    fn said(&self) -> Vec<String> {
        String::from_utf8_lossy(&self.events.read(0, 1 << 20)).lines().map(str::to_owned).collect()
    }

    /// Whether what is counted, what is allocated and what the files have agree.
    pub fn check_accounts(&self) -> Result<(), String> {
        // A checkpoint between taking a commit and writing it has both versions of a name.
        let said = self.said();
        if let Some(line) =
            said.iter().find(|line| line.contains("dropped") && !line.contains("a newer version"))
        {
            return Err(line.clone());
        }
        check_places(&self.store().lock())
    }
}

/// Whether each page of the devices is one file's or free, and counted as that.
pub fn check_places(core: &Core) -> Result<(), String> {
    let mut taken: Vec<Vec<Extent>> = vec![Vec::new(); core.allocators.len()];
    for idx in 0..core.tree.nodes.end() {
        let Some(node) = core.tree.nodes.get(idx) else { continue };
        let extents = core.layout(idx).1;
        taken[usize::from(node.device)].extend(extents.iter().filter(|extent| extent.start != HOLE));
    }
    let mut pages = 0;
    for (device, (extents, allocator)) in taken.iter_mut().zip(&core.allocators).enumerate() {
        extents.sort();
        if let Some(pair) = extents.windows(2).find(|pair| pair[0].end() > pair[1].start) {
            return Err(format!("two files have the same place on device {device}: {pair:?}"));
        }
        let sum: u64 = extents.iter().map(|extent| u64::from(extent.blocks)).sum();
        let allocated = allocator.blocks() - allocator.free_blocks();
        if sum != allocated {
            return Err(format!("device {device}: files have {sum} pages, {allocated} are allocated"));
        }
        pages += sum;
    }
    let counted: u64 = core.space.devices.iter().map(|device| device.allocated).sum();
    if pages != counted {
        return Err(format!("files have {pages} pages, {counted} are counted"));
    }
    Ok(())
}

pub fn caller() -> Caller {
    Caller { tid: nix::unistd::gettid().as_raw() as u32, uid: 0, gid: 0 }
}

/// Has `ask` ask with a way to reply, and waits for that.
pub fn answer<T: Send + 'static>(ask: impl FnOnce(Box<dyn FnOnce(T) + Send>)) -> T {
    let (tell, told) = channel();
    ask(Box::new(move |result| {
        let _ = tell.send(result);
    }));
    told.recv_timeout(PATIENCE).expect("it is never answered")
}

pub fn lookup(store: &Arc<Store>, parent: u64, name: &str) -> Result<Entry, Errno> {
    match store.lookup(parent, name.as_bytes(), &caller()) {
        Answer::Now(found) => found,
        Answer::Wait => answer(|reply| store.lookup_later(parent, name.as_bytes(), &caller(), reply)),
    }
}

/// The inode number behind a path; the root's for none.
pub fn find(store: &Arc<Store>, path: &str) -> Result<u64, Errno> {
    path.split('/')
        .filter(|name| !name.is_empty())
        .try_fold(ROOT_INO, |parent, name| lookup(store, parent, name).map(|entry| entry.attr.ino))
}

pub fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

pub fn rename(store: &Arc<Store>, from: &str, to: &str) -> Result<(), Errno> {
    let ((dir, name), (new_dir, new_name)) = (split(from), split(to));
    let (parent, new_parent) = (find(store, dir)?, find(store, new_dir)?);
    store.rename(parent, name.as_bytes(), new_parent, new_name.as_bytes(), 0, &caller())
}

/// Asks as the kernel does: what is stale is looked up again.
pub fn again<T>(
    store: &Arc<Store>,
    path: &str,
    ask: &mut dyn FnMut(u64) -> Result<T, Errno>,
) -> Result<T, Errno> {
    for _ in 0..AGAIN_MAX {
        match find(store, path).and_then(&mut *ask) {
            Err(Errno::ESTALE) => {}
            result => return result,
        }
    }
    Err(Errno::ESTALE)
}

pub fn open(store: &Arc<Store>, path: &str, flags: i32) -> Result<Handle, Errno> {
    again(store, path, &mut |ino| store.open(ino, flags, &caller()).map(|opened| opened.handle))
}

pub fn create(store: &Arc<Store>, path: &str, flags: i32) -> Result<Handle, Errno> {
    let (dir, name) = split(path);
    let parent = find(store, dir)?;
    let made =
        store.create(parent, name.as_bytes(), 0o644, flags | libc::O_CREAT | libc::O_WRONLY, &caller());
    made.map(|(_, opened)| opened.handle)
}

pub fn close(store: &Arc<Store>, handle: &Handle) {
    store.flush(handle, &caller());
    store.release(handle);
}

fn read(store: &Arc<Store>, ino: u64) -> Result<Vec<u8>, Errno> {
    let size = store.getattr(ino)?.size;
    let opened = store.open(ino, libc::O_RDONLY, &caller())?;
    let bytes = read_handle(store, &opened.handle, size as usize + 1);
    store.release(&opened.handle);
    let bytes = bytes?;
    if bytes.len() as u64 == size { Ok(bytes) } else { Err(Errno::EILSEQ) }
}

pub fn read_handle(store: &Arc<Store>, handle: &Handle, len: usize) -> Result<Vec<u8>, Errno> {
    read_part(store, handle, 0, len)
}

pub fn read_part(store: &Arc<Store>, handle: &Handle, at: usize, len: usize) -> Result<Vec<u8>, Errno> {
    let (tell, told) = channel();
    let reply = Box::new(move |result: Result<&[u8], Errno>| {
        let _ = tell.send(result.map(<[u8]>::to_vec));
    });
    store.read(handle, at as u64, len, reply);
    told.recv_timeout(PATIENCE).expect("it is never answered")
}

fn attributes(store: &Arc<Store>, ino: u64) -> Result<Attributes, Errno> {
    let names = store.listxattr(ino)?;
    names
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty() && !name.starts_with(b"user.kv."))
        .map(|name| Ok((name.to_vec(), store.getxattr(ino, name)?)))
        .collect()
}

pub fn write(store: &Arc<Store>, handle: &Handle, at: usize, bytes: &[u8]) -> Result<u32, Errno> {
    answer(|reply| store.write(handle, at as u64, bytes, reply))
}

pub fn barrier(store: &Arc<Store>) -> Result<(), Errno> {
    answer(|reply| store.barrier(reply))
}
