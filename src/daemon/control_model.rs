//! Control operations in random order on a store whose device answers when it is told to, against a model (rules R11 to R14).
//! `KVCACHEFS_TEST_SEED` and `KVCACHEFS_TEST_MODEL` say which sequences run, and how many.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, TryRecvError};

use nix::errno::Errno;
use zerocopy::FromBytes;

use super::device_log::rng::Rng;
use super::lease_tests::{Session, header, is_quiet, open, read, whole, write};
use super::prefetch_tests::Wish;
use super::tests::Rig;
use super::*;
use crate::abi::{self, Request};
use crate::l2::Class;
use crate::store::Handle;
use crate::store::hot::BLOCK;
use crate::store::node::{NONE, ROOT_INO};

const MIB: u64 = 1 << 20;
const LEASE_MAX: u64 = 12 * MIB;
const CLASSES: [Class; 3] = [Class::Promotion, Class::Demand, Class::WriteBack];
const STEPS: usize = 150;

/// A version of a file: every block of it has one value.
struct File {
    node: u64,
    values: Vec<u8>,
    /// Written in place; the others are replaced.
    shared: bool,
}

struct Item {
    node: u64,
    /// Open, so that it can be read whatever becomes of its name.
    handle: Handle,
    /// What its blocks are, from the first look on.
    values: Vec<u8>,
    held: bool,
}

struct Lease {
    session: usize,
    items: Vec<Item>,
    shares: u32,
}

struct Change {
    node: u64,
    block: usize,
    value: u8,
    handle: Handle,
    told: Receiver<Result<u32, Errno>>,
}

struct Ticket {
    session: usize,
    items: Vec<Item>,
    leased: bool,
    shares: u32,
    cancelled: bool,
    deadline: bool,
    /// Of a drain: what had been published before it.
    drains: Option<Vec<(String, u64)>>,
}

struct Pending {
    handle: Handle,
    values: Vec<u8>,
    told: Receiver<Result<Vec<u8>, Errno>>,
}

struct Model<'r> {
    rig: &'r Rig,
    rng: Rng,
    value: u8,
    names: BTreeMap<String, File>,
    leases: BTreeMap<u64, Lease>,
    tickets: BTreeMap<u64, Ticket>,
    changes: Vec<Change>,
    reads: Vec<Pending>,
    held: [bool; 3],
}

fn values_of(bytes: &[u8]) -> Vec<u8> {
    let one = |block: &[u8]| {
        assert!(block.iter().all(|byte| *byte == block[0]), "a block is half of one and half of another");
        block[0]
    };
    bytes.chunks(BLOCK as usize).map(one).collect()
}

impl<'r> Model<'r> {
    fn next_value(&mut self) -> u8 {
        self.value = self.value % 255 + 1;
        self.value
    }

    fn name(&mut self) -> String {
        format!("f{}", self.rng.below(8))
    }

    fn device(&mut self) {
        let at = self.rng.below(3);
        match self.rng.below(4) {
            0 => {
                self.rig.faults.hold(CLASSES[at]);
                self.held[at] = true;
            }
            1 => {
                self.rig.faults.release(CLASSES[at]);
                self.held[at] = false;
            }
            _ => self.rig.faults.release_some(CLASSES[at], 1 + self.rng.below(3)),
        }
    }

    fn store(&mut self) {
        let (name, value) = (self.name(), self.next_value());
        // Writers wait at the bound of what is not stored, and this one would wait for the next step.
        if self.rig.store().snapshot().dirty_bytes > 12 * MIB {
            self.rig.faults.release(Class::WriteBack);
            self.held[2] = false;
        }
        let count = 1 + self.rng.below(5);
        let bytes = vec![value; count * BLOCK as usize];
        if self.names.contains_key(&name) {
            self.rig.write("new", &bytes);
            let caller = Rig::caller();
            self.rig.store().rename(ROOT_INO, b"new", ROOT_INO, name.as_bytes(), 0, &caller).unwrap();
        } else {
            self.rig.write(&name, &bytes);
        }
        let node = self.rig.find(&name).unwrap();
        self.names.insert(name, File { node, values: vec![value; count], shared: false });
    }

    fn unlink(&mut self) {
        let name = self.name();
        if self.names.get(&name).is_some_and(|file| !file.shared) {
            self.names.remove(&name);
            self.rig.store().unlink(ROOT_INO, name.as_bytes(), &Rig::caller()).unwrap();
        }
    }

    fn overwrite(&mut self) {
        let name = format!("s{}", self.rng.below(2));
        let (node, count) = (self.names[&name].node, self.names[&name].values.len());
        if self.changes.iter().any(|change| change.node == node) {
            return;
        }
        let (block, value) = (self.rng.below(count), self.next_value());
        let handle = open(self.rig, &name, libc::O_WRONLY);
        let told = write(self.rig, &handle, block as u64 * BLOCK, &[value; BLOCK as usize]);
        self.changes.push(Change { node, block, value, handle, told });
    }

    /// Some files, open.
    fn window(&mut self) -> Vec<Item> {
        let mut names: Vec<String> = self.names.keys().cloned().collect();
        self.rng.shuffle(&mut names);
        names.truncate(1 + self.rng.below(3));
        let item = |name: &String| {
            let file = &self.names[name];
            let values = if file.shared { Vec::new() } else { file.values.clone() };
            Item { node: file.node, handle: open(self.rig, name, libc::O_RDONLY), values, held: true }
        };
        names.iter().map(item).collect()
    }

    fn close(&self, items: &[Item]) {
        items.iter().for_each(|item| self.rig.store().release(&item.handle));
    }

    fn classify(&mut self, session: usize, sessions: &[Session<'r>]) {
        let items = self.window();
        let ranges: Vec<abi::Range> = items.iter().map(|item| whole(item.node)).collect();
        let (head, states) = sessions[session].classify(abi::CLASSIFY_LEASE, 0, &ranges);
        assert!(states.iter().all(|state| state.status == 0), "{states:?}");
        if head.lease == 0 {
            let expected =
                if head.tier == abi::TIER_L1 { [libc::EAGAIN, libc::EDQUOT] } else { [libc::EAGAIN; 2] };
            assert!(expected.contains(&head.lease_errno), "{head:?}");
            self.close(&items);
        } else {
            assert_eq!(head.tier, abi::TIER_L1);
            self.grant(head.lease, Lease { session, items, shares: 1 });
        }
    }

    fn grant(&mut self, id: u64, lease: Lease) {
        assert!(self.leases.insert(id, lease).is_none(), "granted twice");
        self.look(id);
    }

    /// What is leased is read while the device answers nobody.
    fn look(&mut self, id: u64) {
        for class in [Class::Demand, Class::Promotion] {
            self.rig.faults.hold(class);
        }
        for item in self.leases.get_mut(&id).unwrap().items.iter_mut().filter(|item| item.held) {
            let len = item.values.len().max(6) * BLOCK as usize;
            let told = read(self.rig, &item.handle, 0, len);
            let told = told.recv_timeout(Duration::from_secs(10));
            let values = values_of(&told.expect("what is leased waits for a device").unwrap());
            if item.values.is_empty() {
                item.values = values.clone();
            }
            assert_eq!(item.values, values, "leased bytes have changed");
        }
        for (at, class) in [(0, Class::Promotion), (1, Class::Demand)] {
            if !self.held[at] {
                self.rig.faults.release(class);
            }
        }
    }

    fn release(&mut self, sessions: &[Session<'r>]) {
        let Some((id, at)) = self.any_lease() else { return };
        let parts = self.rng.percent(40);
        let lease = self.leases.get_mut(&id).unwrap();
        let ranges = if parts && lease.shares == 1 {
            vec![abi::Range { id: at as u64, kind: abi::KIND_ITEM, ..abi::Range::default() }]
        } else {
            Vec::new()
        };
        let flags = if ranges.is_empty() && self.rng.percent(50) { abi::RELEASE_ALL_SHARES } else { 0 };
        let header = abi::Header { flags, ..header(ranges.len()) };
        let head = abi::Lease { header, lease: id, ..abi::Lease::default() };
        // Before it is asked: who waits goes on in the same step.
        if !ranges.is_empty() {
            lease.items[at].held = false;
        } else if flags != 0 {
            lease.shares = 0;
        } else {
            lease.shares -= 1;
        }
        let ended = lease.shares == 0 || lease.items.iter().all(|item| !item.held);
        let bytes = sessions[lease.session].ask(Request::Release(head, ranges)).unwrap();
        let (head, _) = abi::Lease::read_from_prefix(&bytes).unwrap();
        assert_eq!(head.state == abi::LEASE_GONE, ended, "{head:?}");
        if ended {
            let lease = self.leases.remove(&id).unwrap();
            self.close(&lease.items);
        }
    }

    fn any_lease(&mut self) -> Option<(u64, usize)> {
        let ids: Vec<u64> = self.leases.keys().copied().collect();
        let id = *ids.get(self.rng.below(ids.len().max(1)))?;
        let count = self.leases[&id].items.len();
        Some((id, self.rng.below(count)))
    }

    fn prefetch(&mut self, session: usize, sessions: &[Session<'r>]) {
        let items = self.window();
        let ranges: Vec<abi::Range> = items.iter().map(|item| whole(item.node)).collect();
        let leased = self.rng.percent(60);
        let deadline = self.rng.percent(20);
        let wish = Wish {
            flags: if leased { abi::PREFETCH_LEASE } else { 0 },
            priority: self.rng.below(3) as u8,
            deadline_ms: if deadline { 1 + self.rng.below(20) as u32 } else { 0 },
        };
        let head = sessions[session].prefetch(wish, &ranges);
        if head.ticket > 0 {
            assert!([abi::TICKET_QUEUED, abi::TICKET_RUNNING].contains(&head.state), "{head:?}");
            let ticket =
                Ticket { session, items, leased, shares: 1, cancelled: false, deadline, drains: None };
            assert!(self.tickets.insert(head.ticket, ticket).is_none(), "the number of another");
        } else if head.lease > 0 {
            assert_eq!((head.state, leased), (abi::TICKET_DONE, true), "{head:?}");
            self.grant(head.lease, Lease { session, items, shares: 1 });
        } else {
            let may = match head.state {
                abi::TICKET_DONE => !leased && head.tier == abi::TIER_L1,
                abi::TICKET_DENIED => [libc::EAGAIN, libc::EDQUOT].contains(&head.status),
                _ => false,
            };
            assert!(may, "{head:?}");
            self.close(&items);
        }
    }

    fn cancel(&mut self, sessions: &[Session<'r>]) {
        let ids: Vec<u64> = self.tickets.keys().copied().collect();
        let Some(id) = ids.get(self.rng.below(ids.len().max(1))) else { return };
        let ticket = self.tickets.get_mut(id).unwrap();
        sessions[ticket.session].cancel(*id).unwrap();
        ticket.cancelled = true;
    }

    fn drain(&mut self, session: usize, sessions: &[Session<'r>]) {
        let head = abi::Drain { header: header(0), timeout_ms: 3_600_000, ..abi::Drain::default() };
        let bytes = sessions[session].ask(Request::Drain(head, Vec::new())).unwrap();
        let (head, _) = abi::Drain::read_from_prefix(&bytes).unwrap();
        let sealed = self.names.iter().filter(|(_, file)| !file.shared);
        let drains = Some(sealed.map(|(name, file)| (name.clone(), file.node)).collect());
        let (items, leased, deadline) = (Vec::new(), false, false);
        let ticket = Ticket { session, items, leased, shares: 0, cancelled: false, deadline, drains };
        assert!(self.tickets.insert(head.ticket, ticket).is_none(), "the number of another");
    }

    fn read_ends(&mut self, session: usize, sessions: &[Session<'r>]) {
        for end in sessions[session].ended() {
            let ticket = self.tickets.remove(&end.ticket).expect("an end that was read before");
            assert_eq!(ticket.session, session);
            assert_eq!(end.lease > 0, ticket.leased && end.state == abi::TICKET_DONE, "{end:?}");
            let gone = |item: &Item| !self.names.values().any(|file| file.node == item.node);
            let may = match (end.state, end.status) {
                (abi::TICKET_DONE, 0) => true,
                (abi::TICKET_CANCELLED, libc::ECANCELED) => ticket.cancelled,
                (abi::TICKET_CANCELLED | abi::TICKET_DENIED, libc::ETIMEDOUT) => ticket.deadline,
                (abi::TICKET_FAILED, libc::ESTALE) => ticket.items.iter().any(gone),
                _ => false,
            };
            assert!(may, "{end:?}");
            for (name, node) in ticket.drains.iter().flatten().filter(|_| end.state == abi::TICKET_DONE) {
                if self.names.get(name).is_some_and(|file| file.node == *node) {
                    let (_, states) = sessions[session].classify(0, 0, &[whole(*node)]);
                    assert_ne!(states[0].flags & abi::STATE_DURABLE, 0, "{name} was drained: {states:?}");
                }
            }
            if end.lease > 0 {
                self.grant(end.lease, Lease { session, items: ticket.items, shares: ticket.shares });
            } else {
                self.close(&ticket.items);
            }
        }
    }

    fn read(&mut self) {
        for item in self.window() {
            if item.values.is_empty() {
                self.rig.store().release(&item.handle);
                continue;
            }
            let told = read(self.rig, &item.handle, 0, item.values.len() * BLOCK as usize);
            self.reads.push(Pending { handle: item.handle, values: item.values, told });
        }
    }

    /// What has been answered by now.
    fn poll(&mut self) {
        let mut reads = std::mem::take(&mut self.reads);
        reads.retain(|read| match read.told.try_recv() {
            Ok(bytes) => {
                assert_eq!(values_of(&bytes.unwrap()), read.values);
                self.rig.store().release(&read.handle);
                false
            }
            Err(error) => error == TryRecvError::Empty,
        });
        self.reads = reads;
        let mut changes = std::mem::take(&mut self.changes);
        changes.retain(|change| match change.told.try_recv() {
            Ok(result) => {
                assert_eq!(result, Ok(BLOCK as u32));
                self.rig.store().release(&change.handle);
                let items = self.leases.values().flat_map(|lease| &lease.items);
                for item in items.filter(|item| item.held && item.node == change.node) {
                    // Granted behind it, and before its answer was looked at.
                    assert_eq!(item.values[change.block], change.value, "changed while it is leased");
                }
                false
            }
            Err(error) => error == TryRecvError::Empty,
        });
        self.changes = changes;
    }

    fn check(&mut self, sessions: &[Session<'r>]) {
        self.poll();
        if let Some((id, _)) = self.any_lease() {
            self.look(id);
        }
        let at = self.rig.store().snapshot();
        let (own, more) = (self.leases.len(), self.tickets.values().filter(|ticket| ticket.leased).count());
        assert!(
            (own..=own + more).contains(&(at.leases as usize)),
            "{} leases, not {own} to {}",
            at.leases,
            own + more
        );
        assert!(
            at.leased_bytes + at.lease_aside_bytes <= LEASE_MAX,
            "{} {}",
            at.leased_bytes,
            at.lease_aside_bytes
        );
        if own + more == 0 {
            assert_eq!((at.leased_bytes, at.lease_aside_bytes), (0, 0));
        }
        for (name, file) in &self.names {
            assert_eq!(self.rig.find(name), Ok(file.node));
        }
        let nodes: Vec<abi::Range> = self.names.values().map(|file| whole(file.node)).collect();
        let (head, _) = sessions[0].classify(0, 0, &nodes);
        assert_eq!((head.absent, head.failed), (0, 0));
    }
}

fn run(seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let options = format!(
        "l1=64MiB,l2={}:400MiB,prefetch_window=2,prefetch_queue=4,lease_max=12MiB,lease_client_max=12MiB",
        store.display()
    );
    let rig = Rig::with(&options);
    let mut names = BTreeMap::new();
    for (name, count) in [("s0", 4), ("s1", 6)] {
        let flags = libc::O_WRONLY | libc::O_CREAT;
        let created = rig.store().create(ROOT_INO, name.as_bytes(), 0o644, flags, &Rig::caller());
        let handle = created.unwrap().1.handle;
        let bytes = vec![1; count * BLOCK as usize];
        assert_eq!(write(&rig, &handle, 0, &bytes).recv().unwrap(), Ok(bytes.len() as u32));
        rig.store().release(&handle);
        let file = File { node: rig.find(name).unwrap(), values: vec![1; count], shared: true };
        names.insert(name.to_owned(), file);
    }
    assert_eq!(rig.drain(), Ok(()));
    let mut model = Model {
        rig: &rig,
        rng: Rng::new(seed),
        value: 1,
        names,
        leases: BTreeMap::new(),
        tickets: BTreeMap::new(),
        changes: Vec::new(),
        reads: Vec::new(),
        held: [false; 3],
    };
    let mut sessions: Vec<Session> = (0..3).map(|_| Session::new(&rig)).collect();
    for _ in 0..STEPS {
        let session = model.rng.below(sessions.len());
        match model.rng.below(100) {
            0..15 => model.store(),
            15..20 => model.unlink(),
            20..28 => model.overwrite(),
            28..38 => model.classify(session, &sessions),
            38..50 => model.release(&sessions),
            50..62 => model.prefetch(session, &sessions),
            62..66 => model.cancel(&sessions),
            66..70 => model.drain(session, &sessions),
            70..76 => model.read(),
            76..78 => {
                model.forget(session);
                sessions[session] = Session::new(&rig);
            }
            78..84 => rig.store().with(|core| while core.drop_some(NONE) {}),
            _ => model.device(),
        }
        for session in 0..sessions.len() {
            model.read_ends(session, &sessions);
        }
        model.check(&sessions);
    }
    for session in 0..sessions.len() {
        model.forget(session);
    }
    drop(sessions);
    CLASSES.into_iter().for_each(|class| rig.faults.release(class));
    while !(model.changes.is_empty() && model.reads.is_empty()) {
        model.poll();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(rig.drain(), Ok(()));
    rig.wait(|| is_quiet(&rig));
    let at = rig.store().snapshot();
    assert_eq!((at.leases, at.leased_bytes, at.lease_aside_bytes, at.waiting_for_leases), (0, 0, 0, 0));
    assert_eq!((at.hints_running, at.hints_queued, at.drains_waiting, at.sessions), (0, 0, 0, 0));
    assert_eq!((at.counters.promoting, at.dirty_bytes, at.waiting_changes), (0, 0, 0));
    rig.stop();
}

impl Model<'_> {
    /// A session is closed: what it had is gone.
    fn forget(&mut self, session: usize) {
        let (gone, leases) =
            std::mem::take(&mut self.leases).into_iter().partition(|(_, at)| at.session == session);
        self.leases = leases;
        let gone: BTreeMap<u64, Lease> = gone;
        gone.values().for_each(|lease| self.close(&lease.items));
        let (gone, tickets) =
            std::mem::take(&mut self.tickets).into_iter().partition(|(_, at)| at.session == session);
        self.tickets = tickets;
        let gone: BTreeMap<u64, Ticket> = gone;
        gone.values().for_each(|ticket| self.close(&ticket.items));
    }
}

#[test]
fn what_was_granted_stays_and_everything_ends_once() {
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (from, count) = (number("KVCACHEFS_TEST_SEED", 1), number("KVCACHEFS_TEST_MODEL", 8));
    let mut failed = 0;
    for seed in from..from + count {
        if std::panic::catch_unwind(|| run(seed)).is_err() {
            eprintln!("=== seed {seed} FAILED");
            failed += 1;
            if failed > 3 {
                break;
            }
        }
    }
    assert_eq!(failed, 0);
}
