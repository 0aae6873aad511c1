//! What becomes a store, what is opened as one, and what is left alone.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;

#[derive(Default)]
struct Records(Vec<Record>);

impl CatalogReader for Records {
    fn devices(&mut self, _: &[u64], _: u64) {}
    fn record(&mut self, record: Record) {
        self.0.push(record);
    }
}

fn options() -> VolumeOptions {
    VolumeOptions {
        wrap: None,
        format: false,
        read_only: false,
        files_max: None,
        stopped: Arc::default(),
        device: DeviceOptions::default(),
    }
}

fn open(paths: &[(&Path, Option<u64>)]) -> Result<Opened> {
    let mut opened = Volume::open(paths, &options(), &mut Records::default())?;
    opened.made.drain(..).for_each(Made::keep);
    Ok(opened)
}

fn refused(paths: &[(&Path, Option<u64>)]) -> String {
    let said = open(paths).err().expect("refused").to_string();
    assert!(!said.contains('\n'), "{said}");
    said
}

/// A file of zeros that takes no room.
fn sparse(dir: &Path, name: &str, size: u64) -> PathBuf {
    let path = dir.join(name);
    File::create(&path).unwrap().set_len(size).unwrap();
    path
}

fn write(path: &Path, at: u64, bytes: &[u8]) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

fn state(path: &Path) -> (u64, Vec<u8>) {
    File::open(path).unwrap().sync_all().unwrap();
    (fs::metadata(path).unwrap().blocks(), fs::read(path).unwrap())
}

/// Marks as other programs write them, the first page zero wherever they leave it alone.
#[test]
fn what_is_somebody_elses_is_named_and_left_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let md = 0xa92b_4efcu32.to_le_bytes();
    let zfs = 0x00ba_b10cu64.to_be_bytes();
    let marks: [(u64, &[u8], &str); 20] = [
        (0, b"XFSB", "XFS"),
        (1080, &[0x53, 0xef], "ext4"),
        (65600, b"_BHRfS_M", "btrfs"),
        (132 << 10, &zfs, "ZFS"),
        (SIZE - (100 << 10), &zfs, "ZFS"),
        (SIZE - (300 << 10), &0x00ba_b10cu64.to_le_bytes(), "ZFS"),
        (512, b"LABELONE", "LVM"),
        (0, &md, "RAID"),
        (4096, &md, "RAID"),
        (SIZE - 8192, &md, "RAID"),
        (SIZE - 65536, &md, "RAID"),
        (4086, b"SWAPSPACE2", "swap"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (512, b"EFI PART", "GPT"),
        (SIZE - 512, b"EFI PART", "GPT"),
        (510, &[0x55, 0xaa], "MBR"),
        (3, b"NTFS    ", "NTFS"),
        (12345, b"?", "data at byte 12345"),
        (SIZE - 1, b"?", "data at byte 67108863"),
        (5 * MIB, b"?", "data at byte 5242880"),
    ];
    for (at, mark, name) in marks {
        let path = sparse(dir.path(), "image", SIZE);
        write(&path, at, mark);
        let before = state(&path);
        for size in [None, Some(SIZE)] {
            let said = refused(&[(&path, size)]);
            assert!(said.contains("not a kvcachefs store") && said.contains("--format"), "{said}");
            assert!(said.contains(name), "{name} at {at}: {said}");
            assert!(state(&path) == before, "{name}: changed by a refusal");
        }
        let format = VolumeOptions { format: true, ..options() };
        assert!(Volume::open(&[(&path, None)], &format, &mut Records::default()).unwrap().fresh);
        assert!(!open(&[(&path, None)]).unwrap().fresh, "{name}: the new store opens");
    }
}

/// What is behind the first 256 MiB is looked at here and there, and at the end whole.
#[test]
fn large_images_are_looked_at_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let size = 64 << 30;
    for (at, bytes) in [(200 * MIB, 1), (400 * MIB, 2 * MIB), (size - 5, 5)] {
        let path = sparse(dir.path(), "image", size);
        write(&path, at, &vec![b'?'; bytes as usize]);
        let said = refused(&[(&path, None)]);
        assert!(said.contains(&format!("data at byte {at}")), "{said}");
    }
}

#[test]
fn zeros_become_a_store_and_take_their_room_then() {
    let dir = tempfile::tempdir().unwrap();
    let path = sparse(dir.path(), "zeros", SIZE);
    // Where files will be, nobody keeps a mark.
    write(&path, 40 * MIB, b"old data");
    assert!(open(&[(&path, None)]).unwrap().fresh);
    assert!(fs::metadata(&path).unwrap().blocks() * 512 >= SIZE);
    assert!(!open(&[(&path, None)]).unwrap().fresh);
}

#[test]
fn a_set_that_is_refused_leaves_no_new_files() {
    let dir = tempfile::tempdir().unwrap();
    let (new, foreign) = (dir.path().join("new"), sparse(dir.path(), "foreign", SIZE));
    write(&foreign, 65600, b"_BHRfS_M");
    let before = state(&foreign);
    let said = refused(&[(&new, Some(SIZE)), (&foreign, None)]);
    assert!(said.contains("btrfs"), "{said}");
    assert!(!new.exists());
    assert!(state(&foreign) == before);
}

#[test]
fn what_a_start_made_stays_only_if_it_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| dir.path().join(name));
    let set = [(&*paths[0], Some(SIZE)), (&*paths[1], Some(SIZE))];
    drop(Volume::open(&set, &options(), &mut Records::default()).unwrap());
    assert!(!paths[0].exists() && !paths[1].exists());
    // What has come under the name meanwhile is another's.
    let opened = Volume::open(&set, &options(), &mut Records::default()).unwrap();
    fs::rename(&paths[0], dir.path().join("c")).unwrap();
    fs::write(&paths[0], "another's").unwrap();
    drop(opened);
    assert!(paths[0].exists() && !paths[1].exists());
    fs::rename(dir.path().join("c"), &paths[0]).unwrap();
    assert!(refused(&set).contains("it is empty, but other paths belong to a store"));
    assert!(!paths[1].exists());
}

#[test]
fn one_good_superblock_is_enough_and_none_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    assert!(open(&[(&path, Some(SIZE))]).unwrap().fresh);
    let page = |at| {
        let mut page = vec![0; PAGE];
        File::open(&path).unwrap().read_exact_at(&mut page, at).unwrap();
        page
    };
    let good = page(0);
    let flipped = |at: usize| {
        let mut page = good.clone();
        page[at] ^= 4;
        page
    };
    for bad in [vec![0; PAGE], vec![b'x'; PAGE], flipped(8), flipped(50), flipped(3)] {
        for at in [0, COPY_AT] {
            write(&path, at, &bad);
            assert!(!open(&[(&path, None)]).unwrap().fresh);
            write(&path, at, &good);
        }
    }
    // A page that was zeroed and another that was damaged are no blank device.
    write(&path, 0, &vec![0; PAGE]);
    write(&path, COPY_AT, &flipped(50));
    assert!(refused(&[(&path, None)]).contains("damaged"));
    write(&path, COPY_AT, &vec![0; PAGE]);
    assert!(refused(&[(&path, None)]).contains("never finished, or has lost its superblocks"));
}

/// Both copies of a superblock.
type Copies = [[u8; PAGE]; 2];

/// A store of three devices, made and closed.
fn three(dir: &Path) -> Vec<PathBuf> {
    let paths: Vec<PathBuf> = (0..3).map(|at| dir.join(format!("store.{at}"))).collect();
    assert!(open(&paths.iter().map(|path| (&**path, Some(SIZE))).collect::<Vec<_>>()).unwrap().fresh);
    paths
}

fn unsized_set(paths: &[PathBuf]) -> Vec<(&Path, Option<u64>)> {
    paths.iter().map(|path| (&**path, None)).collect()
}

fn copies_of(paths: &[PathBuf]) -> Vec<Copies> {
    let page = |path: &PathBuf, at| {
        let mut page = [0; PAGE];
        File::open(path).unwrap().read_exact_at(&mut page, at).unwrap();
        page
    };
    paths.iter().map(|path| [page(path, 0), page(path, COPY_AT)]).collect()
}

fn put_copies(paths: &[PathBuf], copies: &[Copies]) {
    for (path, [first, second]) in paths.iter().zip(copies) {
        write(path, 0, first);
        write(path, COPY_AT, second);
    }
}

/// The last opening and the one that was begun last, as both copies of each device say.
fn openings_of(paths: &[PathBuf]) -> Vec<(u64, u64)> {
    let pair = |copies: Copies| {
        assert!(copies[0] == copies[1], "the copies differ");
        let Found::Ours(superblock) = Superblock::decode(&copies[0]) else { panic!("no superblock") };
        (superblock.opened, superblock.opening)
    };
    copies_of(paths).into_iter().map(pair).collect()
}

/// The page of a superblock with other numbers.
fn numbered(page: &[u8; PAGE], opened: u64, opening: u64) -> [u8; PAGE] {
    let Found::Ours(superblock) = Superblock::decode(page) else { panic!("no superblock") };
    Superblock { opened, opening, ..superblock }.encode()
}

/// That these superblocks are refused with these words, whoever asks, and that nothing is changed by it.
fn check_refused(paths: &[PathBuf], copies: &[Copies], odd: usize, what: &str) {
    put_copies(paths, copies);
    let read_only = VolumeOptions { read_only: true, ..options() };
    let looked = Volume::open(&unsized_set(paths), &read_only, &mut Records::default());
    for said in [looked.err().expect("refused").to_string(), refused(&unsized_set(paths))] {
        assert!(
            said.contains(&format!("store.{odd}: it is {what} copy than the others; put back")),
            "{said}"
        );
        assert!(said.contains("--format makes a new store"), "{said}");
    }
    assert!(copies_of(paths) == copies, "changed by a refusal");
}

#[test]
fn each_opening_for_writing_is_counted_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let paths = three(dir.path());
    for paths in [&paths[..], &[dir.path().join("single")]] {
        if paths.len() == 1 {
            open(&[(&paths[0], Some(SIZE))]).unwrap();
        }
        // As all that was written before openings were counted.
        assert_eq!(openings_of(paths), vec![(0, 0); paths.len()]);
        for number in 1..4 {
            open(&unsized_set(paths)).unwrap();
            assert_eq!(openings_of(paths), vec![(number, number); paths.len()]);
        }
        let before: Vec<_> = paths.iter().map(|path| state(path)).collect();
        let read_only = VolumeOptions { read_only: true, ..options() };
        drop(Volume::open(&unsized_set(paths), &read_only, &mut Records::default()).unwrap());
        assert!(before == paths.iter().map(|path| state(path)).collect::<Vec<_>>());
        // A damaged catalog is refused before the opening is counted.
        let headers = [0, PAGE as u64].map(|slot| META_AT + slot);
        headers.iter().for_each(|at| write(&paths[0], at + 20, b"?"));
        assert!(refused(&unsized_set(paths)).contains("catalog"));
        assert_eq!(openings_of(paths), vec![(3, 3); paths.len()]);
    }
}

#[test]
fn an_older_copy_of_a_device_is_refused_and_left_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let paths = three(dir.path());
    let mut copies = vec![copies_of(&paths)];
    for _ in 0..3 {
        open(&unsized_set(&paths)).unwrap();
        copies.push(copies_of(&paths));
    }
    let mixed = |ages: [usize; 3]| -> Vec<Copies> { (0..3).map(|at| copies[ages[at]][at]).collect() };
    for old in 0..3 {
        check_refused(&paths, &mixed([old, 3, 3]), 0, "an older");
        check_refused(&paths, &mixed([3, old, 3]), 1, "an older");
        check_refused(&paths, &mixed([3, 3, old]), 2, "an older");
        check_refused(&paths, &mixed([3, old, old]), 0, "a newer");
        check_refused(&paths, &mixed([old, 3, old]), 1, "a newer");
        check_refused(&paths, &mixed([old, old, 3]), 2, "a newer");
        // All of the same time are a store.
        put_copies(&paths, &mixed([old, old, old]));
        open(&unsized_set(&paths)).unwrap();
    }
    put_copies(&paths, &mixed([3, 3, 3]));
    open(&unsized_set(&paths)).unwrap();
}

/// Of two paths it is the older one that is named, and of one any copy is the store as it was.
#[test]
fn of_two_paths_the_older_is_named_and_one_alone_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [dir.path().join("store.0"), dir.path().join("store.1")];
    open(&[(&paths[0], Some(SIZE)), (&paths[1], Some(SIZE))]).unwrap();
    let old = copies_of(&paths);
    open(&unsized_set(&paths)).unwrap();
    let new = copies_of(&paths);
    check_refused(&paths, &[old[0], new[1]], 0, "an older");
    check_refused(&paths, &[new[0], old[1]], 1, "an older");

    let single = [dir.path().join("single")];
    open(&[(&single[0], Some(SIZE))]).unwrap();
    let old = copies_of(&single);
    open(&unsized_set(&single)).unwrap();
    put_copies(&single, &old);
    open(&unsized_set(&single)).unwrap();
}

/// The writes of an opening in their order, ended after each and within each; and then again in the one that follows.
#[test]
fn an_opening_that_ended_between_its_writes_is_made_good_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let paths = three(dir.path());
    let older = copies_of(&paths);
    open(&unsized_set(&paths)).unwrap();
    let before = copies_of(&paths);
    let steps = [(1, 1, 2), (2, 1, 2), (0, 2, 2), (1, 2, 2), (2, 2, 2)];
    let writes = steps.iter().flat_map(|&(device, opened, opening)| {
        [1, 0].map(|slot| (device, slot, numbered(&before[device][slot], opened, opening)))
    });
    let (mut ended, mut now) = (vec![before.clone()], before.clone());
    for (device, slot, page) in writes {
        let mut torn = now.clone();
        torn[device][slot][..512].copy_from_slice(&page[..512]);
        now[device][slot] = page;
        ended.extend([torn, now.clone()]);
    }
    open(&unsized_set(&paths)).unwrap();
    assert!(copies_of(&paths) == now, "an opening that writes other things than this test has it write");
    for ended in &ended {
        // An older copy is known whenever it was.
        for at in 0..3 {
            let mut mixed = ended.clone();
            mixed[at] = older[at];
            put_copies(&paths, &mixed);
            let said = refused(&unsized_set(&paths));
            assert!(said.contains(&format!("store.{at}: it is an older copy than the others")), "{said}");
        }
        put_copies(&paths, ended);
        assert!(!open(&unsized_set(&paths)).unwrap().fresh);
        let openings = openings_of(&paths);
        assert!(openings[0].0 >= 2 && openings.iter().all(|pair| *pair == (openings[0].0, openings[0].0)));
        // What was copied after that end, and put back now.
        let after = copies_of(&paths);
        for at in 0..3 {
            let mut mixed = after.clone();
            mixed[at] = ended[at];
            put_copies(&paths, &mixed);
            assert!(refused(&unsized_set(&paths)).contains("an older copy"), "device {at}");
        }
    }
}

/// A number that means something, or any.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        (0..20u64).prop_map(|at| at * MIB),
        (0..8u64).prop_map(|at| at * PAGE as u64),
        (0..64u32).prop_map(|bit| 1 << bit),
        any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A right checksum says nothing about who wrote it.
    #[test]
    fn any_superblock_is_opened_or_refused(
        changes in proptest::collection::vec((0..8usize, number()), 1..4),
        headers in proptest::collection::vec((0..2u64, 0..4usize, number()), 0..3),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        drop(open(&[(&path, Some(16 * MIB))]).unwrap());
        let page = |at| {
            let mut page = [0; PAGE];
            File::open(&path).unwrap().read_exact_at(&mut page, at).unwrap();
            page
        };
        let Found::Ours(mut superblock) = Superblock::decode(&page(0)) else { panic!("made just now") };
        for (field, value) in changes {
            match field {
                0 => superblock.len = value,
                1 => superblock.meta_start = value,
                2 => superblock.meta_len = value,
                3 => superblock.data_start = value,
                4 => superblock.files_max = value,
                5 => superblock.opened = value,
                6 => superblock.opening = value,
                _ => superblock.devices = value as u32,
            }
        }
        [0, COPY_AT].iter().for_each(|at| write(&path, *at, &superblock.encode()));
        for (slot, field, value) in headers {
            // Generation, position, sequence, then area and chunks.
            let at = META_AT + slot * PAGE as u64;
            let mut header = page(at);
            header[16 + field * 8..][..8].copy_from_slice(&value.to_le_bytes());
            let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &header[..PAGE - 4]) as u32;
            header[PAGE - 4..].copy_from_slice(&sum.to_le_bytes());
            write(&path, at, &header);
        }
        if let Ok(opened) = open(&[(&path, None)]) {
            // What was opened can be used.
            opened.volume.append(&[vec![1; 100]]).unwrap();
            let checkpoint = opened.volume.begin_checkpoint();
            opened.volume.finish_checkpoint(checkpoint).unwrap();
            prop_assert!(opened.volume.capacity_pages() <= 16 * MIB / PAGE as u64);
        }
    }
}
