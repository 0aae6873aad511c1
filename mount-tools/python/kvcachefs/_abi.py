"""The layouts of mount-tools/include/kvcachefs.h. A test compares every size and number with the header."""

import struct

VERSION = 1
IOCTL_BYTES_MAX = 16383
RANGES_MAX = 500
FORGET_MAX = 2000
NAMES_MAGIC = struct.unpack("=I", b"KVNM")[0]

FEATURE_LEASES = 1
FEATURE_PREFETCH = 2
FEATURE_DRAIN = 4

CLASSIFY_LEASE = 1
RELEASE_ALL_SHARES = 1
PREFETCH_LEASE = 1
PREFETCH_ASK = 2

BASE_ROOT = 0
BASE_NAME = 1
KIND_NAME = 0
KIND_NODE = 1
KIND_ITEM = 2

TIER_ABSENT = 0
TIER_L1 = 1
TIER_MIXED = 2
TIER_L2 = 3

STATE_DURABLE = 1
STATE_LEASED = 2
STATE_OPEN = 4
STATE_LOADING = 8

LEASE_GONE = 1
LEASE_EXPIRED = 2

TICKET_NONE = 0
TICKET_QUEUED = 1
TICKET_RUNNING = 2
TICKET_DONE = 3
TICKET_DENIED = 4
TICKET_CANCELLED = 5
TICKET_FAILED = 6
TICKET_PREFETCH = 1
TICKET_DRAIN = 2

# The machine's byte order, and no padding but what is spelled out.
HEADER = struct.Struct("=HHI")
HELLO = struct.Struct("=HHI Q 4I 2Q 6I Q I 4x")
NAMES = struct.Struct("=HHI 2I")
INTERN = struct.Struct("=HHI 3I B3x 2I")
NAMES_HEADER = struct.Struct("=I H B x 4I")
FORGET = struct.Struct("=HHI I 4x")
SLOT = struct.Struct("=2I")
ID = struct.Struct("=HHI 2Q B 7x")
LOOKUP = struct.Struct("=HHI Q 2I")
CLASSIFY = struct.Struct("=HHI 2I 2Q i B 3x 2I 4Q")
LEASE = struct.Struct("=HHI Q 4I Q I 4x")
RANGE = struct.Struct("=3Q I B B 2x")
RANGE_STATE = struct.Struct("=i B B 2x 2I 2Q")
LEASED = struct.Struct("=4Q")
PREFETCH = struct.Struct("=HHI Q 3I B 3x 2Q i B B 2x 2I 5Q 2I")
DRAIN = struct.Struct("=HHI Q I 4x 3Q")
TICKET_STATE = struct.Struct("=6Q i B B 2x I 4x")
TICKET = struct.Struct("=HHI 6Q i B B 2x I 4x Q 3I 4x")
FAILURES = struct.Struct("=HHI Q 4I")

#: Command: its number, its structure, the size of an item behind it.
COMMANDS = {
    "HELLO": (1, HELLO, 0),
    "NAMES": (2, NAMES, 0),
    "INTERN": (3, INTERN, 1),
    "FORGET": (4, FORGET, SLOT.size),
    "ID": (5, ID, 0),
    "LOOKUP": (6, LOOKUP, RANGE.size),
    "CLASSIFY": (7, CLASSIFY, RANGE.size),
    "EXTEND": (8, LEASE, 0),
    "RELEASE": (9, LEASE, RANGE.size),
    "ATTACH": (10, LEASE, 0),
    "QUERY": (11, LEASE, LEASED.size),
    "PREFETCH": (12, PREFETCH, RANGE.size),
    "CANCEL": (13, TICKET, 0),
    "TICKET": (14, TICKET, 0),
    "DRAIN": (15, DRAIN, RANGE.size),
    "FAILURES": (16, FAILURES, 1),
}


def number(command: str, size: int) -> int:
    """The whole command number of a request of so many bytes, as ``_IOWR`` makes it."""
    return 3 << 30 | size << 16 | ord("K") << 8 | COMMANDS[command][0]
