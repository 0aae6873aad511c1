//! The budget holds whatever is asked for; slabs go to whom they may go; chunks do not overlap.
#![allow(unsafe_code, reason = "a client maps a slab")]

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::chunks::chunk_bytes;
use super::{CHUNK_MAX, Chunk, Owner, Pool, PoolConfig, Slab};

const MIB: u64 = 1 << 20;
const HERE: Owner = Owner { uid: 1, namespace: 1 };
const THERE: Owner = Owner { uid: 2, namespace: 1 };
const ELSEWHERE: Owner = Owner { uid: 1, namespace: 2 };

fn config() -> PoolConfig {
    PoolConfig {
        budget_bytes: 16 * MIB,
        lock: false,
        huge_pages: true,
        rest: Duration::ZERO,
        strict: false,
        chunk_reserve_bytes: 4 * MIB,
        slab_bytes_max: 8 * MIB,
        slabs_max: 1000,
    }
}

fn pool(change: impl FnOnce(&mut PoolConfig)) -> Arc<Pool> {
    let mut config = config();
    change(&mut config);
    Pool::new(config, None).expect("a pool")
}

/// What a client has when it opened the slab's file in passthrough: a description of its own.
fn opened(slab: &Slab) -> std::fs::File {
    use std::os::fd::AsRawFd;
    std::fs::File::open(format!("/proc/self/fd/{}", slab.backing_fd().as_raw_fd())).expect("open a slab")
}

fn fill(slab: &Slab, byte: u8) {
    let span = slab.span(0..slab.capacity_bytes() as usize);
    span.copy_from(0, &vec![byte; slab.capacity_bytes() as usize]);
}

fn holds(slab: &Slab, byte: u8) -> bool {
    slab.span(0..slab.capacity_bytes() as usize).with_bytes(|bytes| bytes.iter().all(|at| *at == byte))
}

/// A slab that `HERE` has written, a client has read, and both have let go.
fn read_and_released(pool: &Arc<Pool>, pages: u32) {
    let slab = pool.slab(pages, HERE).expect("a slab");
    fill(&slab, 7);
    slab.mark_lent(HERE);
    drop(opened(&slab));
    slab.touch_release();
}

#[test]
fn a_slab_that_nobody_saw_goes_to_anybody() {
    let pool = pool(|_| ());
    let slab = pool.slab(300, HERE).expect("a slab");
    fill(&slab, 7);
    drop(slab);
    assert!(holds(&pool.slab(300, THERE).expect("a slab"), 7), "it is the same one");
    assert_eq!(pool.stats().created, 1);
}

#[test]
fn a_slab_that_was_read_goes_only_to_its_owner() {
    let pool = pool(|_| ());
    read_and_released(&pool, 300);
    assert_eq!(pool.stats().resting, 300 * 4096);
    for stranger in [THERE, ELSEWHERE] {
        assert!(holds(&pool.slab(300, stranger).expect("a slab"), 0), "{stranger:?} sees old pages");
    }
    // What they had came back unseen and is free; with that in hand, the owner's next is the one that rested.
    let _free = pool.slab(300, HERE).expect("a slab");
    assert!(holds(&pool.slab(300, HERE).expect("a slab"), 7), "the owner does not get its slab back");
}

#[test]
fn a_slab_that_rested_is_cut_like_a_new_one_and_rests_again() {
    let pool = pool(|_| ());
    read_and_released(&pool, 300);
    let slab = pool.slab(300, HERE).expect("a slab");
    assert!(holds(&slab, 7));
    assert!(!slab.is_lent() && slab.resize(200), "it is nobody's now");
    drop(slab);
    // Nobody read it this time, but who read it before may still have its pages.
    assert!(holds(&pool.slab(200, THERE).expect("a slab"), 0));
    assert_eq!(pool.stats().resting, 200 * 4096);
}

#[test]
fn a_slab_whose_file_changed_hands_goes_to_nobody() {
    let pool = pool(|_| ());
    let slab = pool.slab(300, HERE).expect("a slab");
    fill(&slab, 7);
    slab.mark_lent(THERE);
    slab.touch_release();
    drop(slab);
    for owner in [HERE, THERE] {
        assert!(holds(&pool.slab(300, owner).expect("a slab"), 0), "{owner:?} sees old pages");
    }
}

#[test]
fn before_its_rest_is_over_a_slab_is_not_used_again() {
    let pool = pool(|config| config.rest = Duration::from_secs(3600));
    read_and_released(&pool, 300);
    assert!(holds(&pool.slab(300, HERE).expect("a slab"), 0));
    assert_eq!(pool.stats().reused, 0);
}

#[test]
fn a_strict_pool_never_uses_a_slab_again_that_was_read() {
    let pool = pool(|config| config.strict = true);
    read_and_released(&pool, 300);
    assert!(holds(&pool.slab(300, HERE).expect("a slab"), 0));
    assert_eq!(pool.stats().reused, 0);
}

#[test]
fn a_slab_that_is_still_open_is_left_alone_and_counted_as_lent() {
    let pool = pool(|_| ());
    let slab = pool.slab(512, HERE).expect("a slab");
    fill(&slab, 7);
    let mut client = opened(&slab);
    slab.mark_lent(HERE);
    slab.touch_release();
    drop(slab);
    pool.tend();
    assert_eq!(pool.stats().lent, 2 * MIB);
    // All of L1 that slabs may have, but for what is lent.
    let others: Vec<_> = std::iter::from_fn(|| pool.slab(512, HERE)).collect();
    assert_eq!(others.len(), 5);
    others.iter().for_each(|slab| fill(slab, 9));
    let mut seen = Vec::new();
    client.read_to_end(&mut seen).expect("read");
    assert!(seen.len() == 512 * 4096 && seen.iter().all(|byte| *byte == 7));
    drop(client);
    pool.tend();
    assert_eq!((pool.stats().lent, pool.stats().resting), (0, 2 * MIB));
}

#[test]
fn the_reserve_is_for_chunks() {
    let pool = pool(|_| ());
    let slabs: Vec<_> = std::iter::from_fn(|| pool.slab(256, HERE)).collect();
    assert_eq!(slabs.len(), 12, "slabs take the budget without the reserve");
    let chunks: Vec<_> = std::iter::from_fn(|| pool.chunk(CHUNK_MAX)).collect();
    assert_eq!(chunks.len(), 16, "chunks take the reserve");
    drop(slabs);
    let more: Vec<_> = std::iter::from_fn(|| pool.chunk(CHUNK_MAX)).collect();
    assert_eq!(more.len(), 48, "chunks may take what slabs do not use");
    assert_eq!(pool.stats().peak_total, 16 * MIB);
    drop((chunks, more));
    assert!(pool.slab(2048, HERE).is_some(), "arenas that hold nothing make room for slabs");
}

#[test]
fn a_slab_grows_only_within_the_budget_and_shrinks_always() {
    let pool = pool(|_| ());
    let first = pool.slab(1024, HERE).expect("a slab");
    let second = pool.slab(1024, HERE).expect("a slab");
    fill(&first, 7);
    assert!(!first.resize(2049), "larger than a slab may be");
    assert!(first.resize(2048));
    assert!(!second.resize(1025), "the budget is used up");
    assert!(first.resize(1024) && holds(&first, 7), "what stays keeps its bytes");
    assert!(second.resize(2048));
    assert!(!first.resize(0));
    assert_eq!(pool.stats().used_slabs, 12 * MIB);
}

/// One of the size of an arena could not: then everybody else left L1 for it, in vain.
#[test]
fn a_slab_of_any_size_can_grow() {
    let pool = pool(|_| ());
    for pages in [1, 511, 512, 513] {
        let slab = pool.slab(pages, HERE).expect("a slab");
        assert!(slab.can_grow_to(2 * pages) && slab.resize(2 * pages), "{pages}");
        assert!(!slab.can_grow_to(1 << 20), "beyond the largest");
        slab.mark_lent(HERE);
        assert!(!slab.can_grow_to(3 * pages) && !slab.resize(3 * pages), "under its readers");
    }
}

#[test]
fn the_tail_of_a_cut_slab_is_zero_and_its_length_exact() {
    let pool = pool(|_| ());
    let slab = pool.slab(2, HERE).expect("a slab");
    fill(&slab, 7);
    assert!(slab.set_len(4096).is_err() && slab.set_len(8193).is_err(), "that is another number of pages");
    slab.set_len(4097).expect("cut");
    let mut seen = Vec::new();
    opened(&slab).read_to_end(&mut seen).expect("read");
    assert_eq!(seen, vec![7; 4097]);
    slab.span(4097..8192).with_bytes(|bytes| assert!(bytes.iter().all(|byte| *byte == 0)));
    drop(slab);
    assert_eq!(opened(&pool.slab(2, HERE).expect("a slab")).metadata().expect("stat").len(), 8192);
}

/// Memory that the slab's file has, and the size of page that its file system prefers.
fn memory_of(slab: &Slab) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let seen = opened(slab).metadata().expect("stat");
    (seen.blocks() * 512, seen.blksize())
}

#[test]
fn huge_pages_are_used_where_the_kernel_has_them_and_whole_ones_fit() {
    let huge = 2 * MIB;
    for on in [true, false] {
        let pool = pool(|config| config.huge_pages = on);
        let slab = pool.slab(1024, HERE).expect("a slab");
        assert_eq!(memory_of(&slab), (0, if on { huge } else { 4096 }));
        slab.span(0..1).copy_from(0, &[7]);
        let (touched, _) = memory_of(&slab);
        assert!(touched == 4096 || on && touched == huge, "{touched} bytes for one that was written");
        fill(&slab, 7);
        for pages in [1023, 700, 513, 512, 300] {
            assert!(slab.resize(pages) && holds(&slab, 7));
            assert_eq!(memory_of(&slab).0, u64::from(pages) * 4096, "{pages} pages, huge pages {on}");
        }
        let odd = pool.slab(700, HERE).expect("a slab");
        fill(&odd, 9);
        assert_eq!(memory_of(&odd), (700 * 4096, 4096), "khugepaged would make it 1024");
        odd.set_len(512 * 4096 + 1).expect_err("another number of pages");
        odd.set_len(699 * 4096 + 1).expect("cut");
        assert_eq!(memory_of(&odd).0, 700 * 4096);
    }
}

#[test]
fn khugepaged_is_kept_from_a_slab_that_was_cut() {
    let pool = pool(|config| config.huge_pages = true);
    let slab = pool.slab(1024, HERE).expect("a slab");
    fill(&slab, 7);
    assert!(slab.resize(513));
    let (_, flags) = super::slab::mapping(slab.region().base);
    assert!(flags.iter().any(|flag| flag == "nh"), "{flags:?}");
}

struct Engine;

impl super::RegionWatcher for Engine {
    fn created(&self, _region: crate::memory::Region) {}
    fn destroyed(&self, _id: crate::memory::RegionId) {}
}

#[test]
fn a_slab_whose_huge_pages_are_pinned_is_not_cut_inside_one() {
    for on in [true, false] {
        let mut config = config();
        config.huge_pages = on;
        let pool = Pool::new(config, Some(Arc::new(Engine))).expect("a pool");
        let slab = pool.slab(1024, HERE).expect("a slab");
        slab.announce();
        assert_eq!(slab.resize(700), !on);
        assert!(slab.resize(512), "it ends where a page ends");
        assert!(slab.resize(511), "it is pinned no more");
    }
}

/// A client's mapping of a slab's file, at an address where huge pages may lie, and past its end.
struct ClientMapping(*mut libc::c_void);

const CLIENT_BYTES: usize = 4 << 20;

impl ClientMapping {
    fn new(file: &std::fs::File) -> Self {
        use std::os::fd::AsRawFd;
        let (huge, fd) = (2 << 20, file.as_raw_fd());
        // SAFETY: new mappings, the second in the place of a part of the first, which nobody else knows.
        let base = unsafe {
            let room = libc::mmap(
                std::ptr::null_mut(),
                CLIENT_BYTES + huge,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(room, libc::MAP_FAILED);
            let aligned = room.byte_add((room as usize).next_multiple_of(huge) - room as usize);
            libc::mmap(aligned, CLIENT_BYTES, libc::PROT_READ, libc::MAP_SHARED | libc::MAP_FIXED, fd, 0)
        };
        assert_ne!(base, libc::MAP_FAILED);
        Self(base)
    }

    /// Since kernel 6.1. Pages that are looked at in passing (by reclaim, or by compaction) are refused with EAGAIN.
    fn collapse(&self) {
        const MADV_COLLAPSE: i32 = 25;
        let mut error = None;
        for _ in 0..500 {
            // SAFETY: advice for our own mapping; it changes no contents.
            if unsafe { libc::madvise(self.0, CLIENT_BYTES, MADV_COLLAPSE) } == 0 {
                return;
            }
            error = Some(std::io::Error::last_os_error());
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the kernel makes no huge pages, which the test needs: {error:?}");
    }
}

/// Why nobody can make huge pages of shared memory on this machine.
fn without_collapse() -> Option<String> {
    let knob = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let Ok(enabled) = std::fs::read_to_string(knob) else { return Some(format!("there is no {knob}")) };
    if enabled.contains("[deny]") {
        return Some(format!("{knob} says deny"));
    }
    let release = nix::sys::utsname::uname().expect("uname").release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    (version < (6, 1)).then(|| format!("kernel {release} has no MADV_COLLAPSE"))
}

/// How many pages at `base` are in our mapping, and how many of those the kernel has marked as locked: `Locked:` of
/// smaps would not tell, which counts whatever a locked mapping has. Only root sees which page is where.
fn present_and_locked(base: usize, pages: usize) -> (usize, Option<usize>) {
    use std::os::unix::fs::FileExt;
    const COMPOUND_HEAD: u64 = 1 << 15;
    const COMPOUND_TAIL: u64 = 1 << 16;
    const MLOCKED: u64 = 1 << 33;
    let pagemap = std::fs::File::open("/proc/self/pagemap").expect("pagemap");
    let kernel = std::fs::File::open("/proc/kpageflags").ok();
    let entry = |file: &std::fs::File, at: u64| {
        let mut entry = [0; 8];
        file.read_exact_at(&mut entry, at * 8).expect("an entry");
        u64::from_ne_bytes(entry)
    };
    let found: Vec<u64> = (0..pages).map(|at| entry(&pagemap, (base / 4096 + at) as u64)).collect();
    let present = || found.iter().filter(|entry| **entry >> 63 == 1);
    let locked = kernel.map(|kernel| {
        let is_locked = |page: u64| {
            let mut head = page;
            while entry(&kernel, head) & COMPOUND_TAIL != 0 && entry(&kernel, head) & COMPOUND_HEAD == 0 {
                head -= 1;
            }
            (entry(&kernel, page) | entry(&kernel, head)) & MLOCKED != 0
        };
        present().filter(|entry| is_locked(**entry & ((1 << 55) - 1))).count()
    });
    (present().count(), locked)
}

#[track_caller]
fn check_locked(slab: &Slab) {
    let (pages, base) = (slab.pages() as usize, slab.region().base);
    let (_, flags) = super::slab::mapping(base);
    assert!(flags.iter().any(|flag| flag == "lo"), "{flags:?}");
    let (present, locked) = present_and_locked(base, pages);
    assert_eq!(present, pages, "what is not in the mapping is not locked");
    match locked {
        Some(locked) => assert_eq!(locked, pages, "of so many that are there"),
        None => eprintln!("NOT TESTED, only root can see it: whether the kernel has locked the pages"),
    }
}

impl Drop for ClientMapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and nothing refers to it.
        unsafe { libc::munmap(self.0, CLIENT_BYTES) };
    }
}

#[test]
fn what_a_client_collapses_is_cut_to_what_is_counted() {
    use std::os::unix::fs::MetadataExt;
    if let Some(why) = without_collapse() {
        return eprintln!("NOT TESTED: {why}");
    }
    for lock in [false, true] {
        let pool = pool(|config| config.lock = lock);
        let slab = pool.slab(700, HERE).expect("a slab");
        fill(&slab, 7);
        if lock {
            check_locked(&slab);
        }
        slab.set_len(700 * 4096 - 100).expect("cut inside the last page");
        slab.mark_lent(HERE);
        let client = opened(&slab);
        let takes = || client.metadata().expect("stat").blocks() * 512;
        let mapping = ClientMapping::new(&client);
        mapping.collapse();
        assert_eq!(takes(), 4 * MIB, "the test needs the kernel to do it");
        pool.tend();
        assert_eq!((takes(), pool.stats().trimmed), (700 * 4096, 1), "while it holds a file");
        if lock {
            check_locked(&slab);
        }
        slab.span(0..700 * 4096 - 100).with_bytes(|bytes| assert!(bytes.iter().all(|byte| *byte == 7)));
        pool.tend();
        assert_eq!(pool.stats().trimmed, 1, "there was nothing to do");

        mapping.collapse();
        drop(slab);
        pool.tend();
        assert_eq!((takes(), pool.stats().trimmed), (700 * 4096, 2), "while it is mapped without a file");
        assert_eq!(pool.stats().lent, 700 * 4096);

        mapping.collapse();
        drop((mapping, client));
        let again = pool.slab(700, HERE);
        assert!(again.is_some() && pool.stats().lent == 700 * 4096, "it has not been looked at since");
        drop(again);
        pool.tend();
        let seen = (pool.stats().lent, pool.stats().trimmed);
        assert_eq!(seen, (0, 3), "when it has come back");
        assert_eq!(memory_of(&pool.slab(700, HERE).expect("a slab")).0, 700 * 4096, "it is used again");
        assert_eq!(pool.stats().reused, 2);
    }
}

/// Cutting takes too long for somebody who asks for a slab, and until it is cut it is more than was counted.
#[test]
fn what_was_collapsed_is_used_again_only_after_it_was_cut() {
    if let Some(why) = without_collapse() {
        return eprintln!("NOT TESTED: {why}");
    }
    let pool = pool(|_| ());
    let slab = pool.slab(700, HERE).expect("a slab");
    fill(&slab, 7);
    slab.mark_lent(HERE);
    let client = opened(&slab);
    let mapping = ClientMapping::new(&client);
    mapping.collapse();
    slab.touch_release();
    drop((mapping, client, slab));
    assert_eq!(pool.stats().resting, 700 * 4096);
    let fresh = pool.slab(700, HERE).expect("a slab");
    assert_eq!((memory_of(&fresh).0, pool.stats().reused, pool.stats().trimmed), (0, 0, 0));
    pool.tend();
    assert_eq!(pool.stats().trimmed, 1);
    // One that nobody has seen was made ahead meanwhile, and goes first.
    let free = pool.slab(700, HERE).expect("a slab");
    let others: Vec<Slab> = std::iter::from_fn(|| pool.slab(700, HERE)).collect();
    assert!(others.iter().chain([&free]).any(|slab| memory_of(slab).0 == 700 * 4096 && holds(slab, 7)));
    assert_eq!(pool.stats().resting, 0);
}

/// Somebody asks for memory while the store's lock is held: what has to go for it goes once that is free.
#[test]
fn what_is_given_up_is_freed_by_whoever_buries_it() {
    let pool = pool(|_| ());
    let slab = pool.slab(2048, HERE).expect("a slab");
    let kept = Arc::new(());
    *slab.backing_slot().lock() = Some(Box::new(kept.clone()));
    drop(slab);
    let _other = pool.slab(1500, HERE).expect("a slab");
    assert_eq!((pool.stats().total, pool.stats().slabs), (1500 * 4096, 1), "it is counted no more");
    assert_eq!(Arc::strong_count(&kept), 2, "it was freed under the lock");
    pool.bury();
    assert_eq!(Arc::strong_count(&kept), 1);
}

/// Each slab that was ever lent stayed in the list, which grew faster than one tending looked through it.
#[test]
fn what_is_no_file_any_more_is_not_watched() {
    let pool = pool(|config| config.strict = true);
    let lent = || {
        let slab = pool.slab(16, HERE).expect("a slab");
        slab.mark_lent(HERE);
        slab
    };
    let files: Vec<Slab> = (0..3).map(|_| lent()).collect();
    for _ in 0..2000 {
        drop(lent());
    }
    assert!(pool.watched() < 100, "{} are watched", pool.watched());
    pool.tend();
    assert_eq!(pool.watched(), files.len());
    drop(files);
    pool.tend();
    assert_eq!(pool.watched(), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Slab { pages: u32, owner: u32 },
    Chunk { len: usize },
    Resize { at: usize, pages: u32 },
    Lend { at: usize },
    DropSlab { at: usize },
    DropChunk { at: usize },
    Tend,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = any::<prop::sample::Index>().prop_map(|index| index.index(1 << 20));
    let step = prop_oneof![
        3 => (1..900_u32, 0..3_u32).prop_map(|(pages, owner)| Step::Slab { pages, owner }),
        2 => (0..3_u32).prop_map(|owner| Step::Slab { pages: 256, owner }),
        5 => (1..=CHUNK_MAX).prop_map(|len| Step::Chunk { len }),
        2 => (at.clone(), 0..2500_u32).prop_map(|(at, pages)| Step::Resize { at, pages }),
        2 => at.clone().prop_map(|at| Step::Lend { at }),
        3 => at.clone().prop_map(|at| Step::DropSlab { at }),
        3 => at.prop_map(|at| Step::DropChunk { at }),
        1 => Just(Step::Tend),
    ];
    prop::collection::vec(step, 1..150)
}

/// Where the chunks are: no two share a byte, and each is as large as was asked.
fn check_chunks(chunks: &[(Chunk, usize)]) {
    let mut places: Vec<(usize, usize)> = chunks
        .iter()
        .map(|(chunk, len)| {
            assert!(chunk.len() >= *len && chunk.len() == chunk_bytes(*len));
            (chunk.span().as_ptr() as usize, chunk.len())
        })
        .collect();
    places.sort_unstable();
    assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "two chunks overlap");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_asked_the_budget_holds_and_the_sums_agree(huge in any::<bool>(), steps in steps()) {
        let pool = pool(|config| config.huge_pages = huge);
        let mut slabs: Vec<(Slab, Owner)> = Vec::new();
        let mut chunks: Vec<(Chunk, usize)> = Vec::new();
        for step in steps {
            match step {
                Step::Slab { pages, owner } => {
                    let owner = Owner { uid: owner, namespace: 0 };
                    if let Some(slab) = pool.slab(pages, owner) {
                        prop_assert_eq!(slab.pages(), pages);
                        slabs.push((slab, owner));
                    }
                }
                Step::Chunk { len } => chunks.extend(pool.chunk(len).map(|chunk| (chunk, len))),
                Step::Resize { at, pages } if !slabs.is_empty() => {
                    let slab = &slabs[at % slabs.len()].0;
                    let before = slab.pages();
                    let done = slab.resize(pages);
                    prop_assert_eq!(slab.pages(), if done { pages } else { before });
                }
                Step::Lend { at } if !slabs.is_empty() => {
                    let (slab, owner) = &slabs[at % slabs.len()];
                    slab.mark_lent(*owner);
                    slab.touch_release();
                }
                Step::DropSlab { at } if !slabs.is_empty() => {
                    slabs.swap_remove(at % slabs.len());
                }
                Step::DropChunk { at } if !chunks.is_empty() => {
                    chunks.swap_remove(at % chunks.len());
                }
                Step::Tend => {
                    pool.tend();
                }
                _ => {}
            }
            let stats = pool.stats();
            prop_assert!(stats.peak_total <= stats.budget, "{:?}", stats);
            let parts = stats.used_slabs + stats.arenas + stats.free_slabs + stats.resting + stats.lent;
            prop_assert_eq!(stats.total, parts, "{:?}", stats);
            let used: u64 = slabs.iter().map(|(slab, _)| slab.capacity_bytes()).sum();
            prop_assert_eq!(stats.used_slabs, used);
            let used: usize = chunks.iter().map(|(chunk, _)| chunk.len()).sum();
            prop_assert_eq!(stats.used_chunks, used as u64);
        }
        check_chunks(&chunks);
        drop((slabs, chunks));
        let stats = pool.stats();
        prop_assert_eq!((stats.used_slabs, stats.used_chunks), (0, 0));
        // Everything has been joined again, so an arena takes as many of the largest as it ever could.
        let all: Vec<_> = std::iter::from_fn(|| pool.chunk(CHUNK_MAX)).collect();
        prop_assert_eq!(all.len() as u64, stats.budget / CHUNK_MAX as u64);
    }
}
