//! What every engine promises, run over each of them: the ring by all its setups, the threads, and a faulty
//! wrapper without orders.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

use parking_lot::Mutex;

use super::uring::Setup;
use super::*;
use crate::memory::{AlignedBuf, PAGE, Region, RegionId, Span};

const FILE_BYTES: usize = 4 << 20;

/// A scratch file with a different value in each eight bytes, opened for direct I/O where that works.
pub(super) fn scratch() -> (tempfile::NamedTempFile, Target) {
    let named = tempfile::NamedTempFile::new_in(std::env::temp_dir()).unwrap();
    named.as_file().write_all_at(&pattern(0, FILE_BYTES), 0).unwrap();
    named.as_file().sync_all().unwrap();
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let direct = options.clone().custom_flags(libc::O_DIRECT).open(named.path());
    let (file, grain) = direct.map_or_else(|_| (options.open(named.path()).unwrap(), 1), |file| (file, 512));
    let target = Target { file: Arc::new(file), len: FILE_BYTES as u64, grain, label: "test".into() };
    (named, target)
}

fn pattern(offset: usize, len: usize) -> Vec<u8> {
    assert!(offset.is_multiple_of(8) && len.is_multiple_of(8));
    (offset / 8..(offset + len) / 8).flat_map(|word| (word as u64 * 0x9e37_79b9 + 1).to_le_bytes()).collect()
}

fn options() -> EngineOptions {
    EngineOptions { piece_bytes: 64 << 10, threads: 4, depth: 32, ..Default::default() }
}

fn ring(target: Target, options: &EngineOptions, setups: &'static [Setup]) -> Arc<dyn Engine> {
    Arc::new(Uring::start_with(target, options, setups).expect("this machine has io_uring"))
}

type Start = fn(Target, &EngineOptions) -> Arc<dyn Engine>;

const ENGINES: [(&str, Start); 5] = [
    ("deferred", |target, options| ring(target, options, &[Setup::Deferred, Setup::Plain])),
    ("cooperative", |target, options| ring(target, options, &[Setup::Cooperative, Setup::Plain])),
    ("plain", |target, options| ring(target, options, &[Setup::Plain])),
    ("threads", |target, options| Arc::new(Threads::start(target, options).unwrap())),
    ("faulty", |target, options| Arc::new(Faulty::new(ring(target, options, &Setup::ALL)).0)),
];

/// Runs a test on each engine over a scratch file of its own.
fn on_each_engine(test: impl Fn(&Arc<dyn Engine>, &File)) {
    for (name, start) in ENGINES {
        println!("engine: {name}");
        let (named, target) = scratch();
        let engine = start(target, &options());
        test(&engine, named.as_file());
        engine.stop();
        assert_eq!(engine.in_flight().outstanding(), 0, "{name}");
    }
}

fn submit(
    engine: &dyn Engine,
    direction: Direction,
    class: Class,
    offset: usize,
    span: &Span,
) -> Receiver<io::Result<()>> {
    let (tell, told) = channel();
    let done = Box::new(move |outcome| tell.send(outcome).unwrap());
    engine.submit(Io { direction, class, offset: offset as u64, span: span.clone(), done });
    told
}

/// Waits for the answer, and for the sender to go: a second answer would have come by then.
fn only(told: &Receiver<io::Result<()>>) -> io::Result<()> {
    let answer = told.recv().expect("an answer");
    assert!(told.recv().is_err(), "two answers");
    answer
}

fn read(engine: &dyn Engine, offset: usize, len: usize) -> io::Result<Vec<u8>> {
    let span = AlignedBuf::zeroed(len).into_span();
    only(&submit(engine, Direction::Read, Class::Demand, offset, &span))?;
    Ok(span.with_bytes(<[u8]>::to_vec))
}

#[test]
fn what_is_written_is_read_back_at_any_size() {
    on_each_engine(|engine, file| {
        for pages in [1, 3, 16, 17, 33, 257] {
            let (offset, len) = (PAGE * 5, PAGE * pages);
            let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8 ^ pages as u8).collect();
            let span = AlignedBuf::zeroed(len).into_span();
            span.copy_from(0, &bytes);
            only(&submit(&**engine, Direction::Write, Class::WriteBack, offset, &span)).unwrap();
            engine.sync_data().unwrap();
            assert!(read(&**engine, offset, len).unwrap() == bytes, "{pages} pages");
            let mut on_file = vec![0; len + 16];
            file.read_exact_at(&mut on_file, offset as u64).unwrap();
            assert!(on_file[..len] == bytes);
            assert!(on_file[len..] == pattern(offset + len, 16), "nothing behind it has changed");
        }
    });
}

#[test]
fn many_reads_at_once_each_get_their_own_bytes() {
    on_each_engine(|engine, _| {
        let reads: Vec<_> = (0..128)
            .map(|index| {
                let (offset, len) = (index * 7 % 128 * 6 * PAGE, PAGE * (1 + index % 24));
                let span = AlignedBuf::zeroed(len).into_span();
                let class = Class::ALL[index % 3];
                (offset, span.clone(), submit(&**engine, Direction::Read, class, offset, &span))
            })
            .collect();
        for (offset, span, told) in reads {
            only(&told).unwrap();
            assert!(span.with_bytes(|bytes| bytes == pattern(offset, bytes.len())), "at {offset}");
        }
    });
}

#[test]
fn a_large_transfer_is_cut_and_answered_once() {
    on_each_engine(|engine, _| {
        let before = engine.in_flight();
        assert!(read(&**engine, 0, FILE_BYTES).unwrap() == pattern(0, FILE_BYTES));
        let after = engine.in_flight();
        let ops = |gauges: &EngineGauges| gauges.plain_ops + gauges.fixed_ops;
        assert!(ops(&after) - ops(&before) >= (FILE_BYTES >> 16) as u64);
        assert_eq!(after.class(Class::Demand).done - before.class(Class::Demand).done, 1);
        assert_eq!(after.read_bytes - before.read_bytes, FILE_BYTES as u64);
    });
}

#[test]
fn beyond_the_end_is_an_error_and_no_write_makes_the_file_longer() {
    on_each_engine(|engine, file| {
        let error = read(&**engine, FILE_BYTES - PAGE, 2 * PAGE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let error = read(&**engine, usize::MAX & !(PAGE - 1), PAGE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let span = AlignedBuf::zeroed(2 * PAGE).into_span();
        let told = submit(&**engine, Direction::Write, Class::Demand, FILE_BYTES - PAGE, &span);
        assert_eq!(only(&told).unwrap_err().kind(), io::ErrorKind::WriteZero);
        assert_eq!(file.metadata().unwrap().len(), FILE_BYTES as u64);
        assert_eq!(engine.in_flight().class(Class::Demand).failed, 3);
    });
}

/// Somebody cuts the store file: the kernel answers short, which must not pass for success.
#[test]
fn a_file_that_became_shorter_is_an_error() {
    on_each_engine(|engine, file| {
        file.set_len((FILE_BYTES / 2 + 700) as u64).unwrap();
        let error = read(&**engine, 0, FILE_BYTES).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let error = read(&**engine, FILE_BYTES / 2, PAGE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        read(&**engine, FILE_BYTES / 2 - PAGE, PAGE).unwrap();
    });
}

#[test]
fn an_empty_transfer_succeeds() {
    on_each_engine(|engine, _| {
        let span = AlignedBuf::zeroed(PAGE).into_span().slice(0..0);
        only(&submit(&**engine, Direction::Write, Class::WriteBack, 0, &span)).unwrap();
    });
}

#[test]
fn stop_finishes_what_was_accepted_and_refuses_the_rest() {
    on_each_engine(|engine, _| {
        let answers = Arc::new(AtomicUsize::new(0));
        let keep: Arc<AlignedBuf> = Arc::new(AlignedBuf::zeroed(FILE_BYTES));
        let at = std::ptr::NonNull::new(keep.as_ptr().cast_mut()).unwrap();
        #[allow(unsafe_code, reason = "a test counts the shares of its memory")]
        // SAFETY: `keep` is the memory and goes into the span; nobody looks at the bytes.
        let span = unsafe { Span::new(at, FILE_BYTES, None, keep.clone()) };
        for index in 0..200 {
            let answers = answers.clone();
            engine.submit(Io {
                direction: Direction::Read,
                class: Class::ALL[index % 3],
                offset: 0,
                span: span.slice(0..PAGE * (1 + index)),
                done: Box::new(move |outcome| {
                    outcome.unwrap();
                    answers.fetch_add(1, Ordering::Relaxed);
                }),
            });
        }
        drop(span);
        engine.stop();
        assert_eq!(answers.load(Ordering::Relaxed), 200);
        assert_eq!(Arc::strong_count(&keep), 1, "a span is still held");
        let error = read(&**engine, 0, PAGE).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESHUTDOWN));
        engine.stop();
    });
}

/// A completion may submit, may panic, and may be the one that lets go of the engine.
#[test]
fn completions_may_do_as_they_please() {
    on_each_engine(|engine, _| {
        let (tell, told) = channel();
        let again = engine.clone();
        let span = AlignedBuf::zeroed(PAGE).into_span();
        let io = |done| Io {
            direction: Direction::Read,
            class: Class::Demand,
            offset: 0,
            span: span.clone(),
            done,
        };
        engine.submit(io(Box::new(|_| panic!("a panic that the test wants"))));
        let inner = io(Box::new(move |outcome| tell.send(outcome).unwrap()));
        engine.submit(io(Box::new(move |_| again.submit(inner))));
        only(&told).unwrap();
    });
    for (_, start) in ENGINES {
        let (_named, target) = scratch();
        let engine = start(target, &options());
        let (tell, told) = channel();
        let last = Arc::new(Mutex::new(None));
        let owner = last.clone();
        engine.submit(Io {
            direction: Direction::Read,
            class: Class::Demand,
            offset: 0,
            span: AlignedBuf::zeroed(PAGE).into_span(),
            done: Box::new(move |outcome| {
                let engine: Option<Arc<dyn Engine>> = owner.lock().take();
                drop(engine);
                tell.send(outcome).unwrap();
            }),
        });
        *last.lock() = Some(engine);
        told.recv().unwrap().unwrap();
    }
}

#[test]
fn what_is_held_waits_and_reads_pass_write_back() {
    let (_named, target) = scratch();
    let (engine, faults) = Faulty::new(ring(target, &options(), &Setup::ALL));
    faults.hold(Class::WriteBack);
    let span = AlignedBuf::zeroed(PAGE).into_span();
    let held: Vec<_> =
        (0..3).map(|at| submit(&engine, Direction::Write, Class::WriteBack, at * PAGE, &span)).collect();
    assert!(read(&engine, 0, PAGE).unwrap() == pattern(0, PAGE), "the writes have not happened");
    assert_eq!(faults.held(Class::WriteBack), 3);
    assert!(held.iter().all(|told| told.try_recv().is_err()));
    faults.release(Class::WriteBack);
    held.iter().for_each(|told| only(told).unwrap());
    assert!(read(&engine, 0, PAGE).unwrap() == [0; PAGE]);
    assert_eq!(faults.submitted(Class::WriteBack), 3);
    faults.hold(Class::Demand);
    let told = submit(&engine, Direction::Read, Class::Demand, 0, &span);
    engine.stop();
    only(&told).unwrap();
}

#[test]
fn a_faulty_device_fails_lies_and_remembers_as_ordered() {
    let (_named, target) = scratch();
    let (engine, faults) = Faulty::new(Arc::new(Threads::start(target, &options()).unwrap()));
    faults.start_log();
    let span = AlignedBuf::zeroed(PAGE).into_span();
    let write = |offset| only(&submit(&engine, Direction::Write, Class::WriteBack, offset, &span));
    faults.fail_next(Direction::Write, 1, libc::ENOSPC);
    assert_eq!(write(0).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert!(read(&engine, 0, PAGE).unwrap() == pattern(0, PAGE));
    write(PAGE).unwrap();
    faults.fail_next_syncs(1, libc::EIO);
    assert_eq!(engine.sync_data().unwrap_err().raw_os_error(), Some(libc::EIO));
    engine.sync_data().unwrap();
    let logged = Logged::Write { offset: PAGE as u64, bytes: vec![0; PAGE] };
    assert_eq!(faults.log(), [logged, Logged::Sync]);

    faults.fail_next(Direction::Read, 2, libc::EIO);
    assert!(read(&engine, 0, PAGE).is_err() && read(&engine, 0, PAGE).is_err());
    faults.flip_next_reads(1);
    let wrong = |offset| {
        let (got, right) = (read(&engine, offset, PAGE).unwrap(), pattern(offset, PAGE));
        (0..PAGE).filter(|&at| got[at] != right[at]).collect::<Vec<_>>()
    };
    assert_eq!(wrong(0), [PAGE / 2]);
    assert_eq!(wrong(0), Vec::<usize>::new());
    faults.rot(2 * PAGE as u64 + 9);
    assert_eq!(wrong(2 * PAGE), [9]);
    assert_eq!(wrong(2 * PAGE), [9]);
}

/// Memory that is a region, cut into spans that name it.
fn region(len: usize) -> (Region, Span) {
    static IDS: AtomicU64 = AtomicU64::new(1);
    let id = RegionId(IDS.fetch_add(1, Ordering::Relaxed));
    let keep = Arc::new(AlignedBuf::zeroed(len));
    let at = std::ptr::NonNull::new(keep.as_ptr().cast_mut()).unwrap();
    #[allow(unsafe_code, reason = "a test plays L1")]
    // SAFETY: `keep` is the memory and goes into the span.
    let span = unsafe { Span::new(at, len, Some(id), keep) };
    (Region { id, base: at.as_ptr() as usize, len }, span)
}

#[test]
fn spans_in_a_registered_region_use_its_fixed_buffer() {
    for setup in &Setup::ALL {
        let (_named, target) = scratch();
        let engine = ring(target, &options(), std::slice::from_ref(setup));
        let (region, span) = region(64 * PAGE);
        let read_at = |part: &Span, offset| {
            only(&submit(&*engine, Direction::Read, Class::Demand, offset, part)).unwrap();
            assert!(part.with_bytes(|bytes| bytes == pattern(offset, bytes.len())));
        };
        read_at(&span.slice(0..PAGE), 0);
        assert_eq!(engine.in_flight().fixed_ops, 0, "not yet registered");
        engine.register(region);
        engine.register(region);
        read_at(&span.slice(PAGE..8 * PAGE), 9 * PAGE);
        read_at(&span.slice(63 * PAGE..64 * PAGE), 2 * PAGE);
        let gauges = engine.in_flight();
        assert_eq!((gauges.fixed_ops, gauges.plain_ops, gauges.fixed_regions), (2, 1, 1));
        let told = submit(&*engine, Direction::Write, Class::WriteBack, 0, &span.slice(PAGE..2 * PAGE));
        only(&told).unwrap();
        assert!(read(&*engine, 0, PAGE).unwrap() == pattern(9 * PAGE, PAGE));
        engine.unregister(region.id);
        read_at(&span.slice(0..PAGE), 3 * PAGE);
        let gauges = engine.in_flight();
        assert_eq!((gauges.fixed_ops, gauges.fixed_regions), (3, 0));
        engine.unregister(RegionId(u64::MAX));
    }
}

/// Regions come and go while their memory is being read into: every read is right, by whichever way it went.
#[test]
fn a_region_may_be_unregistered_while_it_is_in_use() {
    let (_named, target) = scratch();
    let engine = ring(target, &options(), &Setup::ALL);
    let mut reads = Vec::new();
    for round in 0..50 {
        let (region, span) = region(32 * PAGE);
        engine.register(region);
        for index in 0..8 {
            let part = span.slice(index * 4 * PAGE..(index + 1) * 4 * PAGE);
            let offset = (round * 8 + index) * PAGE;
            let told = submit(&*engine, Direction::Read, Class::Promotion, offset, &part);
            reads.push((offset, part, told));
        }
        engine.unregister(region.id);
    }
    for (offset, part, told) in reads {
        only(&told).unwrap();
        assert!(part.with_bytes(|bytes| bytes == pattern(offset, bytes.len())), "at {offset}");
    }
    engine.stop();
    assert_eq!(engine.in_flight().fixed_regions, 0);
}

#[test]
fn a_region_that_cannot_be_registered_is_served_plainly() {
    let (_named, target) = scratch();
    let engine = ring(target, &options(), &Setup::ALL);
    let (mut region, span) = region(PAGE);
    region.len = (1 << 30) + PAGE;
    engine.register(region);
    only(&submit(&*engine, Direction::Read, Class::Demand, 0, &span)).unwrap();
    let unmapped = Region { id: RegionId(u64::MAX - 1), base: PAGE, len: PAGE };
    engine.register(unmapped);
    only(&submit(&*engine, Direction::Read, Class::Demand, 0, &span)).unwrap();
    let gauges = engine.in_flight();
    assert_eq!((gauges.refused_regions, gauges.fixed_regions, gauges.fixed_ops), (2, 0, 0));
}
