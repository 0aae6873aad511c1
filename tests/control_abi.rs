//! The C header says what the daemon understands: a program that is compiled with it prints every size, offset and number.
//!
//! A field that is elsewhere for a C client than for the daemon is read as something else, and nobody is told.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use kvcachefs::abi::{self, Command as Ioctl};

/// What C shall print, and the Rust side of it: name, value.
type Rows = Vec<(String, u64)>;

/// The size of a structure, and the offsets of its fields.
macro_rules! layout {
    ($rows:ident, $c:literal, $rust:ty { $($field:ident),* }) => {
        $rows.push((format!("sizeof(struct {})", $c), size_of::<$rust>() as u64));
        $($rows.push((
            format!("offsetof(struct {}, {})", $c, stringify!($field)),
            offset_of!($rust, $field) as u64,
        ));)*
    };
}

macro_rules! constants {
    ($rows:ident, $($name:ident),*) => {
        $($rows.push((format!("KVCACHEFS_{}", stringify!($name)), abi::$name as u64));)*
    };
}

fn rows() -> Rows {
    let mut rows = Rows::new();
    layout!(rows, "kvcachefs_header", abi::Header { version, flags, count });
    layout!(
        rows,
        "kvcachefs_hello",
        abi::Hello {
            header,
            features,
            names_max,
            names_bytes_max,
            ranges_max,
            leases_max,
            lease_bytes_max,
            lease_client_bytes_max,
            block_bytes,
            parties_max,
            ttl_default_ms,
            ttl_max_ms,
            prefetch_window,
            prefetch_queue,
            prefetch_bytes_max,
            tickets_max,
            reserved
        }
    );
    layout!(rows, "kvcachefs_names", abi::Names { header, first, generation });
    layout!(
        rows,
        "kvcachefs_intern",
        abi::Intern { header, base, base_generation, bytes, base_kind, reserved, first, generation }
    );
    layout!(
        rows,
        "kvcachefs_names_header",
        abi::NamesHeader { magic, version, base_kind, reserved, base, base_generation, count, bytes }
    );
    layout!(rows, "kvcachefs_forget", abi::Forget { header, forgotten, reserved });
    layout!(rows, "kvcachefs_slot", abi::Slot { id, generation });
    layout!(rows, "kvcachefs_id", abi::Id { header, node, size, state, reserved });
    layout!(rows, "kvcachefs_lookup", abi::Lookup { header, generation, prefix, present });
    layout!(
        rows,
        "kvcachefs_classify",
        abi::Classify {
            header,
            ttl_ms,
            parties,
            generation,
            lease,
            lease_errno,
            tier,
            reserved,
            absent,
            failed,
            blocks,
            blocks_l1,
            bytes,
            bytes_l1
        }
    );
    layout!(
        rows,
        "kvcachefs_lease",
        abi::Lease { header, lease, ttl_ms, parties, own, state, bytes, ranges, reserved }
    );
    layout!(rows, "kvcachefs_range", abi::Range { id, offset, length, generation, kind, unit, reserved });
    layout!(
        rows,
        "kvcachefs_range_state",
        abi::RangeState { status, tier, flags, reserved, blocks, blocks_l1, bytes, bytes_l1 }
    );
    layout!(rows, "kvcachefs_leased", abi::Leased { node, offset, length, held });
    layout!(
        rows,
        "kvcachefs_prefetch",
        abi::Prefetch {
            header,
            tag,
            deadline_ms,
            ttl_ms,
            parties,
            priority,
            reserved,
            ticket,
            lease,
            status,
            state,
            tier,
            reserved_answer,
            absent,
            failed,
            blocks,
            blocks_l1,
            bytes,
            bytes_l1,
            bytes_to_read,
            ahead,
            estimate_ms
        }
    );
    layout!(rows, "kvcachefs_drain", abi::Drain { header, tag, timeout_ms, reserved, ticket, files, bytes });
    layout!(
        rows,
        "kvcachefs_ticket_state",
        abi::TicketState {
            ticket,
            tag,
            lease,
            bytes,
            files,
            failed,
            status,
            state,
            kind,
            reserved,
            ttl_ms,
            reserved_end
        }
    );
    layout!(
        rows,
        "kvcachefs_ticket",
        abi::Ticket { header, state, bytes_total, ahead, estimate_ms, age_ms, reserved }
    );
    layout!(rows, "kvcachefs_failures", abi::Failures { header, ticket, from, count, bytes, known });
    constants!(
        rows,
        VERSION,
        IOCTL_BYTES_MAX,
        RANGES_MAX,
        FORGET_MAX,
        NAMES_BYTES_MAX,
        COMPONENT_MAX,
        NAME_BYTES_MAX,
        NAMES_MAGIC,
        FEATURE_LEASES,
        FEATURE_PREFETCH,
        FEATURE_DRAIN,
        CLASSIFY_LEASE,
        RELEASE_ALL_SHARES,
        PREFETCH_LEASE,
        PREFETCH_ASK,
        BASE_ROOT,
        BASE_NAME,
        KIND_NAME,
        KIND_NODE,
        KIND_ITEM,
        UNIT_BYTES,
        UNIT_BLOCKS,
        TIER_ABSENT,
        TIER_L1,
        TIER_MIXED,
        TIER_L2,
        STATE_DURABLE,
        STATE_LEASED,
        STATE_OPEN,
        STATE_LOADING,
        LEASE_GONE,
        LEASE_EXPIRED,
        TICKET_NONE,
        TICKET_QUEUED,
        TICKET_RUNNING,
        TICKET_DONE,
        TICKET_DENIED,
        TICKET_CANCELLED,
        TICKET_FAILED,
        TICKET_PREFETCH,
        TICKET_DRAIN
    );
    for (name, command, item) in [
        ("HELLO", Ioctl::Hello, 0),
        ("NAMES", Ioctl::Names, 0),
        ("INTERN", Ioctl::Intern, 1),
        ("FORGET", Ioctl::Forget, size_of::<abi::Slot>()),
        ("ID", Ioctl::Id, 0),
        ("LOOKUP", Ioctl::Lookup, size_of::<abi::Range>()),
        ("CLASSIFY", Ioctl::Classify, size_of::<abi::Range>()),
        ("EXTEND", Ioctl::Extend, 0),
        ("RELEASE", Ioctl::Release, size_of::<abi::Range>()),
        ("ATTACH", Ioctl::Attach, 0),
        ("QUERY", Ioctl::Query, size_of::<abi::Leased>()),
        ("PREFETCH", Ioctl::Prefetch, size_of::<abi::Range>()),
        ("CANCEL", Ioctl::Cancel, 0),
        ("TICKET", Ioctl::Ticket, 0),
        ("DRAIN", Ioctl::Drain, size_of::<abi::Range>()),
        ("FAILURES", Ioctl::Failures, 1),
    ] {
        let counts: &[usize] = if item == 0 { &[0] } else { &[0, 1, 256, 500] };
        for &count in counts {
            let arguments = if item == 0 { String::new() } else { format!("({count})") };
            let number = u64::from(command.number(command.head_bytes() + count * item));
            rows.push((format!("KVCACHEFS_IOC_{name}{arguments}"), number));
        }
    }
    rows
}

#[test]
fn the_c_header_agrees_with_the_daemon() {
    let rows = rows();
    let mut source =
        String::from("#include <stddef.h>\n#include <stdio.h>\n#include \"kvcachefs.h\"\nint main(void) {\n");
    for (name, _) in &rows {
        writeln!(source, "    printf(\"%s\\t%llu\\n\", \"{name}\", (unsigned long long)({name}));").unwrap();
    }
    source.push_str("    return 0;\n}\n");
    let dir = tempfile::tempdir().unwrap();
    let (file, program) = (dir.path().join("layout.c"), dir.path().join("layout"));
    fs::write(&file, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("mount-tools/include");
    let status = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Wpadded", "-Werror", "-I"])
        .arg(include)
        .arg(&file)
        .arg("-o")
        .arg(&program)
        .status()
        .unwrap();
    assert!(status.success(), "the header does not compile");
    let output = Command::new(program).output().unwrap();
    let said: BTreeMap<String, u64> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| line.split_once('\t').unwrap())
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect();
    let wrong: Vec<_> = rows.iter().filter(|(name, value)| said.get(name) != Some(value)).collect();
    assert!(wrong.is_empty(), "the daemon has other values: {wrong:?}");
    // Each name of the header is compared: one that is added is added here as well.
    let header =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("mount-tools/include/kvcachefs.h"))
            .unwrap();
    for line in header.lines() {
        let defined = line.strip_prefix("#define ").and_then(|rest| rest.split([' ', '(']).next());
        let Some(name) = defined.filter(|name| !["KVCACHEFS_H", "KVCACHEFS_IOC"].contains(name)) else {
            continue;
        };
        assert!(rows.iter().any(|(row, _)| row.split('(').next() == Some(name)), "{name} is not compared");
    }
}
