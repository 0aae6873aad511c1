"""What a client asks about: ranges of files, one by one or as one window."""

from dataclasses import dataclass, replace
from typing import List, NamedTuple, Optional, Sequence, Union

from . import _abi as abi

TIERS = {abi.TIER_ABSENT: "absent", abi.TIER_L1: "l1", abi.TIER_MIXED: "mixed", abi.TIER_L2: "l2"}


class Name(NamedTuple):
    """An interned name; valid for the handle that interned it."""

    id: int
    generation: int


@dataclass(frozen=True)
class Range:
    """Bytes of the file that a name leads to when it is asked for. A length of 0 is to the end."""

    of: Union[Name, int]
    offset: int = 0
    length: int = 0
    kind: int = abi.KIND_NAME

    def part(self, offset: int, length: int = 0) -> "Range":
        return replace(self, offset=offset, length=length)

    def pack(self) -> bytes:
        if isinstance(self.of, Name):
            id, generation = self.of
        else:
            id, generation = self.of, 0
        return abi.RANGE.pack(id, self.offset, self.length, generation, self.kind, 0)


def node(number: int, offset: int = 0, length: int = 0) -> Range:
    """A range of the version of a file that ``identify`` has told."""
    return Range(number, offset, length, abi.KIND_NODE)


def item(place: int, offset: int = 0, length: int = 0) -> Range:
    """What a lease holds of the range at this place of the request that was granted; to release it."""
    return Range(place, offset, length, abi.KIND_ITEM)


@dataclass(frozen=True)
class State:
    """What there is of a range. With an ``errno`` there is nothing else."""

    errno: int
    tier: str
    durable: bool
    leased: bool
    open: bool
    loading: bool
    blocks: int
    blocks_l1: int
    bytes: int
    bytes_l1: int

    @property
    def found(self) -> bool:
        return self.errno == 0


@dataclass(frozen=True)
class Lookup:
    """Which ranges are there. Two that were told one generation were told that the same files are there."""

    generation: int
    prefix: int
    present: int
    states: List[State]


@dataclass(frozen=True)
class Window:
    """Where all of the ranges are, for one instant."""

    tier: str
    absent: int
    failed: int
    blocks: int
    blocks_l1: int
    bytes: int
    bytes_l1: int
    states: List[State]


def pack(ranges: Sequence[Range]) -> bytes:
    return b"".join(range.pack() for range in ranges)


def states(data: bytes, count: int) -> List[State]:
    whole = data[: count * abi.RANGE_STATE.size]
    return [_state(*fields) for fields in abi.RANGE_STATE.iter_unpack(whole)]


def _state(status: int, tier: int, flags: int, blocks: int, blocks_l1: int, size: int, size_l1: int) -> State:
    return State(
        -status,
        TIERS.get(tier, "absent"),
        bool(flags & abi.STATE_DURABLE),
        bool(flags & abi.STATE_LEASED),
        bool(flags & abi.STATE_OPEN),
        bool(flags & abi.STATE_LOADING),
        blocks,
        blocks_l1,
        size,
        size_l1,
    )


def millis(seconds: Optional[float]) -> int:
    """0 means the default, so a time that is less than a millisecond is one."""
    return 0 if seconds is None else min(max(int(seconds * 1000), 1), 0xFFFFFFFF)
