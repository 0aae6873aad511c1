//! The client library on a real mount: the whole cycle of a request, and what is given back by whom.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

mod place;

use std::fs::{self, File};
use std::time::Duration;

use mount_tools::client::{Became, Ended, Errno, Handle, Life, Place as At, Range, Terms, Tier, Wish, id};
use place::{Place, content, wait_until};

const BYTES: usize = 3 << 20;
/// Nothing takes as long unless it hangs.
const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

fn window(handle: &Handle, count: usize) -> Vec<Range> {
    let names: Vec<String> = (0..count).map(|at| format!("d/f{at:04}")).collect();
    handle.intern(&names).unwrap().into_iter().map(Range::of).collect()
}

fn leased(place: &Place) -> u64 {
    place.stat("leases")
}

#[test]
fn a_request_is_looked_up_brought_read_and_given_back() {
    let place = Place::with_cold_files(4, BYTES);
    let scheduler = Handle::open(place.mnt()).unwrap();
    let window = window(&scheduler, 4);
    let lookup = scheduler.lookup(&window).unwrap();
    assert_eq!((lookup.prefix, lookup.present), (4, 4));
    assert_eq!(scheduler.classify(&window).unwrap().tier, Tier::L2);
    let (seen, none) = scheduler.classify_and_lease(&window, &Terms::default()).unwrap();
    assert_eq!((seen.bytes, seen.bytes_l1, none.unwrap_err()), (4 * BYTES as u64, 0, Errno::EAGAIN));
    let wish = Wish::new().leased(Terms::shared_by(2).ttl(Duration::from_secs(40))).tag(77).priority(3);
    let forecast = scheduler.forecast(&window, &wish).unwrap();
    assert!(matches!(forecast.became, Became::Nothing), "{forecast:?}");
    assert_eq!(forecast.bytes_to_read, 4 * BYTES as u64);

    let Became::Begun(ticket) = scheduler.prefetch(&window, &wish).unwrap().became else {
        panic!("no ticket")
    };
    let mut ends = scheduler.ends(LIMIT).unwrap();
    let end = ends.pop().unwrap();
    assert!(ends.is_empty());
    assert_eq!((end.ticket, end.tag, end.ended), (ticket.number(), 77, Ended::Done));
    assert_eq!(ticket.progress().unwrap(), None, "its end has been read");
    assert!(scheduler.ends(Some(Duration::ZERO)).unwrap().is_empty(), "and once only");
    let mut lease = end.lease.unwrap();
    assert_eq!(lease.ttl(), Duration::from_secs(40));

    // The ranks: each with a handle of its own, each reads what the lease holds and gives back its share.
    for left in [1, 0] {
        let rank = Handle::open(place.mnt()).unwrap();
        let share = rank.attach(lease.number()).unwrap();
        let (state, held) = share.query().unwrap();
        assert_eq!((state.life, state.own, held.len()), (Life::Held, 1, 4));
        for (at, held) in held.iter().enumerate() {
            let path = place.mnt().join(format!("d/f{at:04}"));
            let file = File::open(&path).unwrap();
            assert_eq!(id(&file).unwrap().node, held.node);
            assert_eq!(fs::read(&path).unwrap(), content(at, BYTES));
            let state = share.release_parts(&[Range::item(at as u64)]).unwrap();
            assert_eq!((state.life, state.own), if at == 3 { (Life::Gone, 0) } else { (Life::Held, 1) });
        }
        assert_eq!(share.release().unwrap().life, Life::Gone, "twice is no error");
        assert_eq!(leased(&place), left, "the share of the other rank");
    }
    assert_eq!(lease.extend(None).unwrap_err().errno(), Errno::ENOENT, "both shares are gone");
    assert_eq!(leased(&place), 0);
    drop(lease);

    // Now that it is in L1 there is no ticket.
    let Became::Here(Some(lease)) = scheduler.prefetch(&window, &wish).unwrap().became else {
        panic!("a ticket")
    };
    let error = scheduler.attach(lease.number()).unwrap_err();
    assert!(
        error.errno() == Errno::EINVAL && error.to_string().contains(&format!("lease {}", lease.number()))
    );
    assert_eq!(leased(&place), 1);
    drop(lease);
    assert_eq!(leased(&place), 0);
}

#[test]
fn what_is_dropped_is_given_back_and_what_is_kept_goes_with_the_handle() {
    let place = Place::with_cold_files(3, BYTES);
    let handle = Handle::open(place.mnt()).unwrap();
    let window = window(&handle, 3);
    let wish = Wish::new().leased(Terms::default());
    // Whether it is read by then or not: nobody hears of a ticket that was dropped, and nothing is held for it.
    for _ in 0..20 {
        drop(handle.prefetch(&window, &wish).unwrap());
    }
    // The end of this one comes after those of the others.
    let answer = handle.prefetch(&window, &wish).unwrap().became;
    let lease = match answer {
        Became::Here(lease) => lease.unwrap(),
        Became::Begun(ticket) => ticket.wait(LIMIT).unwrap().unwrap().lease.unwrap(),
        other => panic!("{other:?}"),
    };
    assert!(handle.ends(Some(Duration::ZERO)).unwrap().is_empty());
    wait_until("only that is held", || leased(&place) == 1);
    let copy = handle.clone();
    drop(handle);
    let number = lease.keep();
    assert_eq!(leased(&place), 1, "a clone keeps the session");
    drop(copy);
    wait_until("nothing is held", || leased(&place) == 0);
    let late = Handle::open(place.mnt()).unwrap().attach(number).unwrap_err();
    assert_eq!(late.errno(), Errno::ENOENT);
}

#[test]
fn one_ticket_is_waited_for_and_the_ends_of_others_are_kept() {
    let place = Place::with_cold_files(6, BYTES);
    let handle = Handle::open(place.mnt()).unwrap();
    let window = window(&handle, 6);
    let tickets: Vec<_> = (0..6)
        .map(|at| match handle.prefetch(&window[at..=at], &Wish::new().tag(at as u64)).unwrap().became {
            Became::Begun(ticket) => ticket,
            other => panic!("{other:?}"),
        })
        .collect();
    let last = tickets[5].wait(LIMIT).unwrap().unwrap();
    assert_eq!((last.tag, last.ended, last.bytes), (5, Ended::Done, BYTES as u64));
    let mut tags = Vec::new();
    while tags.len() < 5 {
        tags.extend(handle.ends(LIMIT).unwrap().iter().map(|end| end.tag));
    }
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2, 3, 4]);
    assert!(tickets[0].wait(Some(Duration::ZERO)).unwrap().is_none(), "it has been read");
    assert_eq!(tickets[0].cancel().unwrap(), None);
}

#[test]
fn many_names_are_sent_in_parts_and_asked_for_as_one() {
    let place = Place::with_cold_files(3, 1000);
    let handle = Handle::open(place.mnt()).unwrap();
    let most = handle.limits().ranges;
    // Longer than one write of names.
    let long = "x".repeat(250);
    let names: Vec<String> = (0..6000).map(|at| format!("none/{long}{at}")).collect();
    let missing = handle.intern(&names).unwrap();
    assert_eq!(missing.len(), names.len());
    let base = handle.intern(&["d"]).unwrap()[0];
    let there: Vec<Range> = handle
        .intern_below(Some(base), &["f0000", "f0001", "f0002"])
        .unwrap()
        .into_iter()
        .map(Range::of)
        .collect();
    let mut ranges: Vec<Range> = there.iter().copied().cycle().take(most + 7).collect();
    ranges.push(Range::of(missing[5999]));
    ranges.extend(&there);
    let lookup = handle.lookup(&ranges).unwrap();
    assert_eq!((lookup.prefix, lookup.present, lookup.states.len()), (most + 7, most + 10, most + 11));
    assert_eq!(lookup.states[most + 7], Err(Errno::ENOENT));
    // What is one answer is not made of two.
    for error in [
        handle.classify(&ranges).unwrap_err(),
        handle.classify_and_lease(&ranges, &Terms::default()).unwrap_err(),
        handle.prefetch(&ranges, &Wish::new()).unwrap_err(),
    ] {
        assert_eq!(error.errno(), Errno::E2BIG);
        assert!(error.to_string().contains(&format!("at most {most}")), "{error}");
    }
    // All or none, however many parts there are; and each bad one is named.
    let held = place.stat("interned_names");
    let bad = [&names[..], &["a/../b".to_owned()]].concat();
    let error = handle.intern(&bad).unwrap_err();
    assert!(error.errno() == Errno::EINVAL && error.to_string().contains("without a leading /"), "{error}");
    assert_eq!(place.stat("interned_names"), held);
    assert_eq!(handle.forget(&missing).unwrap(), 6000);
    assert_eq!(handle.lookup(&[Range::of(missing[0])]).unwrap().states, [Err(Errno::ESTALE)]);
}

#[test]
fn a_path_is_found_in_its_mount() {
    let place = Place::with_cold_files(1, 10);
    let mount = place.mnt().canonicalize().unwrap();
    let at = |path: &str| At::of(place.mnt().join(path)).unwrap();
    for (path, name) in
        [("d/f0000", "d/f0000"), ("", ""), ("d/./f0000", "d/f0000"), ("d/none/at", "d/none/at")]
    {
        assert_eq!(at(path), At { mount: mount.clone(), name: name.into() }, "{path}");
    }
    std::os::unix::fs::symlink(place.mnt().join("d"), place.0.path().join("link")).unwrap();
    assert_eq!(At::of(place.0.path().join("link/f0000")).unwrap().name, std::path::Path::new("d/f0000"));
    assert_eq!(At::of(place.0.path()).unwrap_err().errno(), Errno::EXDEV);
    let error = Handle::open(place.0.path()).unwrap_err();
    assert!(error.to_string().contains("no kvcachefs is mounted there"), "{error}");
}

#[test]
fn what_was_written_is_durable_when_it_is_drained() {
    let place = Place::new();
    place.mount();
    let handle = Handle::open(place.mnt()).unwrap();
    assert!(handle.limits().drains);
    fs::write(place.mnt().join("f"), content(0, BYTES)).unwrap();
    let names = handle.intern(&["f", "none"]).unwrap();
    let (file, none) = (Range::of(names[0]), Range::of(names[1]));
    let refused = handle.drain(&[file, none], None, 0).unwrap();
    assert!(refused.ticket.is_none());
    assert_eq!(refused.states, [Ok(()), Err(Errno::ENOENT)]);
    for ranges in [&[file][..], &[]] {
        let ticket = handle.drain(ranges, LIMIT, 5).unwrap().ticket.unwrap();
        let end = ticket.wait(LIMIT).unwrap().unwrap();
        assert_eq!((end.ended, end.tag, end.failed), (Ended::Done, 5, 0));
        assert!(handle.classify(&[file]).unwrap().states[0].unwrap().durable);
    }
}
