use super::*;

/// A request: its head with `count` and `flags`, and what is behind it.
fn request(command: Command, flags: u16, count: u32, behind: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; command.head_bytes()];
    let header = Header { version: VERSION, flags, count };
    bytes[..size_of::<Header>()].copy_from_slice(header.as_bytes());
    bytes.extend_from_slice(behind);
    bytes
}

fn decoded(command: Command, bytes: &[u8]) -> Result<Request, Errno> {
    decode(command.number(bytes.len()), bytes)
}

fn intern(base_kind: u8, slot: Slot, count: u32, names: &[u8]) -> Vec<u8> {
    let header = Header { version: VERSION, flags: 0, count };
    let head = Intern {
        header,
        base: slot.id,
        base_generation: slot.generation,
        bytes: names.len() as u32,
        base_kind,
        ..Intern::default()
    };
    [head.as_bytes(), names].concat()
}

#[test]
fn command_numbers_are_those_of_iowr() {
    // _IOWR('K', 1, 88 bytes), as the kernel's headers compute it.
    assert_eq!(Command::Hello.number(88), 0xc058_4b01);
    for at in Command::ALL {
        assert_eq!(command(at.number(at.head_bytes())), Some(at));
        assert_eq!(command(at.number(IOCTL_BYTES_MAX)), Some(at));
    }
}

#[test]
fn what_is_no_command_of_ours_is_enotty() {
    let ours = Command::Classify.number(80);
    let others = [
        0x5401,            // TCGETS: is it a terminal?
        0x4b33,            // KDGKBTYPE, of the same type, but without direction or size
        ours & !(3 << 30), // no direction
        ours & !(1 << 30), // to read only
        ours ^ 0x100,      // another type
        ours & !0xff,      // number 0
        ours & !0xff | 17, // one too far
        ours & !0xff | 255,
        0x8004_6601, // FS_IOC_GETFLAGS
    ];
    for number in others {
        assert_eq!(decode(number, &[0; 80]), Err(Errno::ENOTTY), "{number:#x}");
    }
}

#[test]
fn a_request_that_is_too_short_is_einval() {
    for command in Command::ALL {
        let whole = request(command, 0, 0, &[]);
        for len in 0..whole.len() {
            assert_eq!(decoded(command, &whole[..len]), Err(Errno::EINVAL), "{command:?} of {len} bytes");
        }
    }
    for (command, item) in [
        (Command::Lookup, size_of::<Range>()),
        (Command::Classify, size_of::<Range>()),
        (Command::Release, size_of::<Range>()),
        (Command::Query, size_of::<Leased>()),
        (Command::Prefetch, size_of::<Range>()),
        (Command::Drain, size_of::<Range>()),
        (Command::Failures, 1),
        (Command::Forget, size_of::<Slot>()),
    ] {
        let short = request(command, 0, 3, &vec![0; 3 * item - 1]);
        assert_eq!(decoded(command, &short), Err(Errno::EINVAL), "{command:?}");
        for room in [3 * item, 3 * item + 1, 5 * item] {
            assert!(decoded(command, &request(command, 0, 3, &vec![0; room])).is_ok(), "{command:?} {room}");
        }
    }
}

#[test]
fn another_version_is_eproto_but_for_hello() {
    for command in Command::ALL {
        for version in [0, 2, u16::MAX] {
            let mut bytes = request(command, 0, 1, &[0; 64]);
            bytes[..2].copy_from_slice(&version.to_ne_bytes());
            match command {
                Command::Hello => {
                    assert!(
                        matches!(decoded(command, &bytes), Ok(Request::Hello(hello)) if hello.header.version == version)
                    );
                }
                _ => assert_eq!(decoded(command, &bytes), Err(Errno::EPROTO), "{command:?}"),
            }
        }
    }
}

#[test]
fn unknown_flags_are_einval() {
    for command in Command::ALL {
        let known = command.flags();
        for bit in 0..16 {
            let result = decoded(command, &request(command, 1 << bit, 1, &[0; 64]));
            match (known & 1 << bit != 0, command) {
                (true, _) => assert!(result.is_ok(), "{command:?} {bit}"),
                (false, _) => assert_eq!(result, Err(Errno::EINVAL), "{command:?} {bit}"),
            }
        }
    }
}

#[test]
fn reserved_fields_must_be_zero() {
    let at = |command, offset: usize| {
        let mut bytes = request(command, 0, 1, &[0; 64]);
        bytes[offset] = 1;
        decoded(command, &bytes)
    };
    for (command, reserved) in [
        (Command::Forget, 12..16),
        (Command::Classify, 37..40),
        (Command::Extend, 44..48),
        (Command::Release, 44..48),
        (Command::Attach, 44..48),
        (Command::Query, 44..48),
        (Command::Prefetch, 29..32),
        (Command::Prefetch, 54..56),
        (Command::Drain, 20..24),
        (Command::Cancel, 62..64),
        (Command::Cancel, 68..72),
        (Command::Ticket, 92..96),
    ] {
        for offset in reserved {
            assert_eq!(at(command, offset), Err(Errno::EINVAL), "{command:?} {offset}");
        }
    }
    let mut bytes = intern(BASE_ROOT, Slot::default(), 1, b"a\0");
    assert!(decoded(Command::Intern, &bytes).is_ok());
    bytes[22] = 1;
    assert_eq!(decoded(Command::Intern, &bytes), Err(Errno::EINVAL));
}

#[test]
fn windows_have_ranges_but_not_too_many() {
    for command in [Command::Lookup, Command::Classify, Command::Prefetch] {
        assert_eq!(decoded(command, &request(command, 0, 0, &[0; 64])), Err(Errno::EINVAL));
    }
    // Whatever room there is: a count that overflows is no more than one that is too large.
    for count in [RANGES_MAX + 1, u32::MAX] {
        for command in [
            Command::Lookup,
            Command::Classify,
            Command::Release,
            Command::Query,
            Command::Prefetch,
            Command::Drain,
        ] {
            assert_eq!(decoded(command, &request(command, 0, count, &[0; 16_000])), Err(Errno::E2BIG));
        }
    }
    assert!(decoded(Command::Drain, &request(Command::Drain, 0, 0, &[])).is_ok(), "everything");
    let most = request(Command::Prefetch, PREFETCH_LEASE, RANGES_MAX, &[0; RANGES_MAX as usize * 32]);
    assert!(most.len() <= IOCTL_BYTES_MAX);
    let most = request(Command::Classify, CLASSIFY_LEASE, RANGES_MAX, &[0; RANGES_MAX as usize * 32]);
    assert!(most.len() <= IOCTL_BYTES_MAX);
    assert!(
        matches!(decoded(Command::Classify, &most), Ok(Request::Classify(_, all)) if all.len() == RANGES_MAX as usize)
    );
    assert_eq!(
        decoded(Command::Forget, &request(Command::Forget, 0, FORGET_MAX + 1, &[0; 16_300])),
        Err(Errno::E2BIG)
    );
}

#[test]
fn ranges_arrive_as_they_were_sent() {
    let range =
        Range { id: 7, offset: 1 << 40, length: 99, generation: 5, kind: KIND_NODE, unit: 1, reserved: 0 };
    let other = Range { id: u64::MAX, ..range };
    let bytes = request(Command::Lookup, 0, 2, [range, other].as_bytes());
    let expected = vec![range, other];
    assert!(matches!(decoded(Command::Lookup, &bytes), Ok(Request::Lookup(_, all)) if all == expected));
}

#[test]
fn names_arrive_as_they_were_sent() {
    let slot = Slot { id: 9, generation: 3 };
    let sent = b"a/b\0c\0\xff\xfe\0";
    let expected = NameList {
        base: Base::Name(slot),
        names: vec![(*b"a/b").into(), (*b"c").into(), (*b"\xff\xfe").into()],
    };
    let bytes = intern(BASE_NAME, slot, 3, sent);
    assert!(matches!(decoded(Command::Intern, &bytes), Ok(Request::Intern(_, list)) if list == expected));
    let header = NamesHeader {
        magic: NAMES_MAGIC,
        version: VERSION,
        base_kind: BASE_NAME,
        base: 9,
        base_generation: 3,
        count: 3,
        bytes: sent.len() as u32,
        reserved: 0,
    };
    assert_eq!(names_in_write(&[header.as_bytes(), sent].concat()), Ok(expected));
}

#[test]
fn bad_names_are_refused_with_all_others() {
    let long = |len: usize| [&vec![b'x'; len][..], b"\0"].concat();
    let deep = |len: usize| [&b"d/".repeat(len / 2)[..], b"x\0"].concat();
    let cases: Vec<(Errno, u32, Vec<u8>)> = vec![
        (Errno::EINVAL, 0, b"".to_vec()),
        (Errno::EINVAL, 1, b"".to_vec()),
        (Errno::EINVAL, 1, b"a".to_vec()),
        (Errno::EINVAL, 1, b"\0".to_vec()),
        (Errno::EINVAL, 1, b"a\0b\0".to_vec()),
        (Errno::EINVAL, 3, b"a\0b\0".to_vec()),
        (Errno::EINVAL, u32::MAX, b"a\0b\0".to_vec()),
        (Errno::EINVAL, 2, b"a\0\0".to_vec()),
        (Errno::EINVAL, 2, b"a\0/b\0".to_vec()),
        (Errno::EINVAL, 2, b"a\0b/\0".to_vec()),
        (Errno::EINVAL, 2, b"a\0b//c\0".to_vec()),
        (Errno::EINVAL, 2, b"a\0.\0".to_vec()),
        (Errno::EINVAL, 2, b"a\0b/..\0".to_vec()),
        (Errno::EINVAL, 2, b"a\0../b\0".to_vec()),
        (Errno::ENAMETOOLONG, 1, long(256)),
        (Errno::ENAMETOOLONG, 1, deep(4096)),
    ];
    for (errno, count, names) in cases {
        let bytes = intern(BASE_ROOT, Slot::default(), count, &names);
        assert_eq!(
            decoded(Command::Intern, &bytes),
            Err(errno),
            "{count} {:?}",
            String::from_utf8_lossy(&names)
        );
    }
    for fine in [long(255), deep(4094), b"...\0".to_vec(), b"..a\0".to_vec()] {
        assert!(decoded(Command::Intern, &intern(BASE_ROOT, Slot::default(), 1, &fine)).is_ok());
    }
    // A base that there is not, or that says what it does not need.
    for (kind, slot) in
        [(2, Slot::default()), (255, Slot::default()), (BASE_ROOT, Slot { id: 1, generation: 0 })]
    {
        assert_eq!(decoded(Command::Intern, &intern(kind, slot, 1, b"a\0")), Err(Errno::EINVAL));
    }
    // More bytes than there are.
    let mut bytes = intern(BASE_ROOT, Slot::default(), 1, b"a\0");
    bytes.pop();
    assert_eq!(decoded(Command::Intern, &bytes), Err(Errno::EINVAL));
}

#[test]
fn a_write_that_is_no_list_of_names_is_refused() {
    let header =
        NamesHeader { magic: NAMES_MAGIC, version: VERSION, count: 1, bytes: 2, ..NamesHeader::default() };
    let write = |header: NamesHeader, names: &[u8]| names_in_write(&[header.as_bytes(), names].concat());
    assert!(write(header, b"a\0").is_ok());
    assert_eq!(write(header, b"a\0\0"), Err(Errno::EINVAL), "longer than it says");
    assert_eq!(write(header, b"a"), Err(Errno::EINVAL), "a part of it");
    assert_eq!(write(NamesHeader { magic: 0, ..header }, b"a\0"), Err(Errno::EINVAL));
    assert_eq!(write(NamesHeader { reserved: 1, ..header }, b"a\0"), Err(Errno::EINVAL));
    assert_eq!(write(NamesHeader { version: 2, ..header }, b"a\0"), Err(Errno::EPROTO));
    assert_eq!(names_in_write(b"prefetch me\n"), Err(Errno::EINVAL));
    assert_eq!(names_in_write(b""), Err(Errno::EINVAL));
    let most = NAMES_BYTES_MAX as usize - size_of::<NamesHeader>();
    let names = b"n\0".repeat(most / 2);
    let header = NamesHeader { count: most as u32 / 2, bytes: most as u32, ..header };
    assert_eq!(write(header, &names).map(|list| list.names.len()), Ok(most / 2));
    assert_eq!(write(header, &[&names[..], b"n\0"].concat()), Err(Errno::E2BIG));
}
