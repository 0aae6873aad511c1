//! Whatever a catalog says, what comes out is a tree: what does not fit is dropped, and nothing else.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const FILES: u64 = 100;
const PAGES: u64 = 1000;

fn recover(records: Vec<Put>) -> Recovered {
    let mut recovery = Recovery::new(0, 0);
    recovery.devices(&[PAGES], FILES);
    records.into_iter().for_each(|put| recovery.record(Record::Put(Box::new(put))));
    recovery.finish()
}

fn id(idx: u32) -> u64 {
    NodeId::new(idx, 1).0
}

fn dir(idx: u32, parent: u64, seq: u64, name: &str) -> Put {
    Put { id: id(idx), kind: 1, mode: 0o755, parent, seq, name: name.into(), ..Put::default() }
}

fn file(idx: u32, parent: u64, seq: u64, name: &str) -> Put {
    Put { kind: 0, ..dir(idx, parent, seq, name) }
}

fn paths(recovered: &Recovered) -> HashSet<String> {
    let nodes = &recovered.tree.nodes;
    (1..nodes.end())
        .filter(|&idx| nodes.get(idx).is_some_and(|node| node.has(NAMED)))
        .map(|idx| recovered.tree.path(idx))
        .collect()
}

/// What must hold of every tree.
fn check(recovered: &Recovered) {
    let tree = &recovered.tree;
    let mut named = 0;
    for idx in 1..tree.nodes.end() {
        let Some(node) = tree.nodes.get(idx) else { continue };
        if !node.has(NAMED) {
            assert!(recovered.dropped.iter().any(|(id, _)| id.idx() == idx), "node {idx} is left over");
            continue;
        }
        named += 1;
        assert_eq!(tree.child(node.parent, &node.name), Some(idx));
        let parent = tree.nodes[node.parent].dir().unwrap();
        assert_eq!(parent.children.get(&node.place()), Some(&idx));
        assert!(parent.next_place > node.place());
        let (mut at, mut steps) = (idx, 0);
        while at != ROOT {
            at = tree.nodes[at].parent;
            steps += 1;
            assert!(steps <= tree.nodes.count(), "node {idx} hangs below itself");
        }
    }
    assert_eq!(named, tree.files + tree.dirs);
    let listed: usize = (0..tree.nodes.end())
        .filter_map(|idx| tree.nodes.get(idx)?.dir())
        .map(|dir| dir.children.len())
        .sum();
    assert_eq!(listed as u64, named, "what is listed is there, and what is there is listed");
    let free: u64 = recovered.allocators.iter().map(Allocator::free_blocks).sum();
    assert_eq!(free + recovered.allocated_pages, PAGES);
    assert!(u64::from(tree.nodes.end()) <= positions_max(FILES));
}

/// A directory was renamed over an empty one, whose last file had been removed; the checkpoint still has both, and the
/// commit that removes them never came.
#[test]
fn what_was_in_a_directory_that_is_dropped_goes_with_it() {
    let mut recovered = recover(vec![
        dir(1, 0, 0, "b"),
        file(2, id(1), 7, "f"),
        dir(3, 0, 9, "b"),
        dir(4, id(1), 8, "deeper"),
        file(5, id(4), 0, "g"),
        file(6, id(3), 0, "kept"),
    ]);
    assert_eq!(paths(&recovered), ["b", "b/kept"].map(String::from).into());
    check(&recovered);
    assert_eq!(recovered.dropped.len(), 4);
    // Who gets the position of the old directory finds nothing in it, and nobody's files.
    let tree = &mut recovered.tree;
    assert_eq!(tree.child(1, b"f"), None);
    assert!(tree.nodes[1].dir().unwrap().children.is_empty());
    tree.nodes.remove(1);
    let new = tree.nodes.insert(Node::new(Detail::Dir(Box::default()), 0o755, 0, 0, 0));
    assert_eq!((new, tree.child(new, b"f")), (1, None));
}

#[test]
fn what_hangs_below_itself_is_dropped() {
    let recovered = recover(vec![
        dir(1, id(2), 0, "a"),
        dir(2, id(1), 0, "b"),
        file(3, id(1), 1, "f"),
        dir(4, id(4), 0, "self"),
        file(5, 0, 1, "kept"),
    ]);
    assert_eq!(paths(&recovered), ["kept".to_owned()].into());
    check(&recovered);
}

#[test]
fn two_in_one_place_of_a_directory_do_not_hide_each_other() {
    let recovered = recover(vec![file(1, 0, 5, "a"), file(2, 0, 5, "b"), file(3, 0, 6, "c")]);
    assert_eq!(paths(&recovered), ["a", "c"].map(String::from).into());
    check(&recovered);
}

/// The `seq` of a version.
fn version(place: u64, version: u64) -> u64 {
    version << 46 | place
}

/// Left by a crash before the older one's removal was committed: whichever is read first.
#[test]
fn of_two_with_one_name_the_later_version_or_place_stays() {
    let of_one_place = (version(5, 1), version(5, 2));
    let came_back = (version(5, 3), version(6, 0));
    for (older, newer) in [of_one_place, came_back] {
        for (first, second) in [(older, newer), (newer, older)] {
            let mut recovered = recover(vec![
                file(1, 0, first, "a"),
                file(2, 0, second, "a"),
                file(3, 0, version(4, 9), "b"),
            ]);
            check(&recovered);
            let tree = &mut recovered.tree;
            let stays = tree.child(ROOT, b"a").unwrap();
            assert_eq!((stays, tree.nodes[stays].seq), (if first == newer { 1 } else { 2 }, newer));
            assert_eq!(recovered.dropped.len(), 1);
            assert_eq!(recovered.dropped[0].1, SUPERSEDED);
            // A new name comes behind all places, whatever versions they have seen.
            let dir = tree.nodes[ROOT].dir().unwrap();
            assert_eq!(dir.children.keys().copied().collect::<Vec<_>>(), [4, newer % (1 << 46)]);
            assert_eq!(dir.next_place, newer % (1 << 46) + 1);
        }
    }
}

#[test]
fn two_in_one_place_do_not_hide_each_other_whatever_their_versions() {
    let recovered = recover(vec![file(1, 0, version(5, 1), "a"), file(2, 0, version(5, 2), "b")]);
    assert_eq!(paths(&recovered), ["a".to_owned()].into());
    check(&recovered);
}

/// Of two that claim the same pages, only one can be right; checksums tell at the first read whether this one is.
#[test]
fn of_two_that_claim_an_extent_the_first_position_keeps_it() {
    let claims = |idx, seq, start| Put {
        size: 8192,
        extents: vec![Extent { start, blocks: 2 }],
        crcs: vec![0],
        ..file(idx, 0, seq, &format!("f{idx}"))
    };
    let recovered =
        recover(vec![claims(2, 1, 10), claims(1, 9, 11), claims(3, 3, PAGES - 1), claims(4, 4, 100)]);
    assert_eq!(paths(&recovered), ["f1", "f4"].map(String::from).into());
    check(&recovered);
}

#[test]
fn what_no_node_of_ours_can_be_is_refused() {
    let root = Put { id: id(ROOT), kind: 1, mode: 0o711, ..Put::default() };
    let good = || file(1, 0, 1, "good");
    let wrong = [
        Put { id: NodeId::new(u32::MAX, 1).0, ..good() },
        Put { id: NodeId::new(positions_max(FILES) as u32, 1).0, ..good() },
        Put { id: NodeId::new(1, 0).0, ..good() },
        Put { id: NodeId::new(1, 1 << 31).0, ..good() },
        Put { kind: 0, ..root.clone() },
        Put { id: NodeId::new(ROOT, 2).0, ..root.clone() },
        Put { parent: id(1), ..root.clone() },
        Put { mode: 0o10000, ..good() },
        Put { seq: u64::MAX, ..good() },
        Put { seq: version(0, 1 << 16), ..good() },
        Put { seq: version((1 << 46) - 1, 0), ..good() },
        Put { size: u64::MAX, ..good() },
        Put { kind: 1, extents: vec![Extent { start: 0, blocks: 1 }], ..good() },
        Put { size: 4096, crcs: vec![1; 2], ..good() },
        Put { size: 4096, extents: vec![Extent { start: 0, blocks: 0 }], ..good() },
        Put { size: 4096, device: 1, extents: vec![Extent { start: 0, blocks: 1 }], ..good() },
        Put { target: b"x".to_vec(), ..good() },
        Put { name: Vec::new(), ..good() },
        Put { name: b"..".to_vec(), ..good() },
        Put { name: b"a/b".to_vec(), ..good() },
        Put { name: vec![b'n'; 256], ..good() },
        Put { xattrs: vec![(b"user.a".to_vec(), vec![0; 300_000])], ..good() },
    ];
    for put in wrong {
        let recovered = recover(vec![file(2, 0, 2, "other"), put.clone()]);
        assert_eq!(recovered.refused.count, 1, "{put:?}");
        assert_eq!(paths(&recovered), ["other".to_owned()].into(), "{put:?}");
        check(&recovered);
    }
    let recovered = recover(vec![root, good()]);
    assert_eq!((recovered.refused.count, recovered.tree.nodes[ROOT].mode), (0, 0o711));
    check(&recovered);
}

fn extent() -> impl Strategy<Value = Extent> {
    (prop_oneof![0..PAGES, Just(HOLE), any::<u64>()], prop_oneof![0..20u32, any::<u32>()])
        .prop_map(|(start, blocks)| Extent { start, blocks })
}

/// Mostly numbers that occur, so that records have to do with each other; sometimes anything.
fn put() -> impl Strategy<Value = Put> {
    let node = || prop_oneof![8 => (0..12u32, 1..3u32).prop_map(|(at, used)| NodeId::new(at, used).0), 1 => any::<u64>()];
    let small = |end: u64| prop_oneof![8 => 0..end, 1 => any::<u64>()];
    let name = prop_oneof![8 => "[abc]", 1 => ".{0,3}", 1 => Just("..".to_owned())];
    (
        (node(), 0..3u8, 0..2u8, prop_oneof![Just(0o644u16), any::<u16>()]),
        (prop_oneof![3 => Just(0), 5 => node()], small(8), small(600_000), any::<i64>(), any::<u8>()),
        (name, proptest::collection::vec(extent(), 0..3), proptest::collection::vec(any::<u32>(), 0..4)),
    )
        .prop_map(
            |((id, kind, device, mode), (parent, seq, size, atime, flags), (name, extents, crcs))| Put {
                id,
                kind,
                device,
                mode,
                parent,
                seq,
                size,
                atime,
                flags,
                name: name.into_bytes(),
                extents: if kind == 0 { extents } else { Vec::new() },
                crcs: if kind == 0 { crcs } else { Vec::new() },
                ..Put::default()
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn any_records_make_a_tree(
        records in proptest::collection::vec(
            prop_oneof![6 => put().prop_map(|put| Record::Put(Box::new(put))), 1 => (0..12u32, 1..3u32).prop_map(|(at, used)| Record::Remove(NodeId::new(at, used).0))],
            0..24,
        ),
    ) {
        let mut recovery = Recovery::new(0, 0);
        recovery.devices(&[PAGES], FILES);
        records.into_iter().for_each(|record| recovery.record(record));
        check(&recovery.finish());
    }
}
