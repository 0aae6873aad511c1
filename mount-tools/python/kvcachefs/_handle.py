"""An open control file that has been greeted: the session to which names, leases and tickets belong."""

import errno
import os
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Iterable, List, Optional, Sequence, Set, Type, Union

from . import _abi as abi
from . import _lease
from ._errors import ControlError
from ._ranges import TIERS, Lookup, Name, Range, Window, millis, pack, states
from ._waiting import Waiting
from ._wire import call

_Path = Union[str, bytes, "os.PathLike[str]"]

#: How often a long lookup begins anew when names change between its parts.
_LOOKUPS = 8


@dataclass(frozen=True)
class Limits:
    """What the daemon allows; times in seconds."""

    ranges: int
    names: int
    names_bytes: int
    leases: int
    lease_bytes: int
    lease_client_bytes: int
    block_bytes: int
    parties: int
    ttl_default: float
    ttl_max: float
    prefetch_window: int
    prefetch_queue: int
    prefetch_bytes: int
    tickets: int
    prefetches: bool
    drains: bool


@dataclass(frozen=True)
class Id:
    """Which version of a file is open: a rank compares ``node`` with what its lease holds."""

    node: int
    size: int
    durable: bool


class Handle(Waiting):
    """A session with the daemon of one mount.

    It has a ``fileno()`` that is readable when a ticket has ended, for ``select.poll`` and event loops. Children that are forked
    share the session; give each process that asks a handle of its own.
    """

    def __init__(self, mount: _Path) -> None:
        super().__init__()
        self.mount = os.fsdecode(mount)
        self._naming = threading.Lock()
        self._fd = -1
        self._read_only = False
        path = os.path.join(self.mount, ".ctl/lease")
        try:
            try:
                self._fd = os.open(path, os.O_RDWR)
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise
                self._fd, self._read_only = os.open(path, os.O_RDONLY), True
        except OSError as error:
            raise self._not_opened(error.errno or errno.EIO) from None
        try:
            self.limits = self._hello()
        except BaseException:
            self.close()
            raise

    def _not_opened(self, number: int) -> ControlError:
        remedies = {
            errno.ENOENT: "no kvcachefs is mounted there; name the directory that it is mounted on",
            errno.ENOTDIR: "no kvcachefs is mounted there; name the directory that it is mounted on",
            errno.ENOTCONN: "its daemon is gone; mount it again",
            errno.EACCES: "mount with allow_other, or ask as the user who mounted",
        }
        return ControlError("opening .ctl/lease", self.mount, number, remedies.get(number))

    def _hello(self) -> Limits:
        try:
            answer, _ = call(self._fd, "HELLO", self.mount, (0,) * 15)
        except ControlError as error:
            if error.errno == errno.EPROTO:
                remedy = f"the daemon does not speak version {abi.VERSION}: use client and daemon of one release"
                raise ControlError("hello", self.mount, errno.EPROTO, remedy) from None
            raise
        features, names, names_bytes, ranges, leases, lease_bytes, client, block, parties = answer[3:12]
        ttl_default, ttl_max, window, queue, prefetch_bytes, tickets = answer[12:]
        return Limits(
            ranges=min(ranges, abi.RANGES_MAX),
            names=names,
            names_bytes=names_bytes,
            leases=leases,
            lease_bytes=lease_bytes,
            lease_client_bytes=client,
            block_bytes=block,
            parties=parties,
            ttl_default=ttl_default / 1000,
            ttl_max=ttl_max / 1000,
            prefetch_window=window,
            prefetch_queue=queue,
            prefetch_bytes=prefetch_bytes,
            tickets=tickets,
            prefetches=bool(features & abi.FEATURE_PREFETCH),
            drains=bool(features & abi.FEATURE_DRAIN),
        )

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        if self.closed:
            raise ValueError("the handle is closed")
        return self._fd

    @property
    def closed(self) -> bool:
        return getattr(self, "_fd", -1) < 0

    def close(self) -> None:
        """Ends the session: its leases and tickets go with it."""
        if not self.closed:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def intern(self, names: Iterable[_Path], base: Optional[Name] = None) -> List[Name]:
        """Makes names numbers: paths from the root of the mount, or from a directory that is interned. All, or none."""
        head = abi.INTERN.size if self._read_only else abi.NAMES_HEADER.size
        room = (abi.IOCTL_BYTES_MAX if self._read_only else self.limits.names_bytes) - head
        done: List[Name] = []
        batch: List[bytes] = []
        size = 0
        try:
            for name in names:
                data = os.fsencode(name) + b"\0"
                if b"\0" in data[:-1]:
                    raise ControlError("interning", os.fsdecode(name), errno.EINVAL, "no path has a zero byte")
                if batch and size + len(data) > room:
                    done += self._send(batch, base)
                    batch, size = [], 0
                batch.append(data)
                size += len(data)
            if batch:
                done += self._send(batch, base)
        except OSError:
            self.forget(done)
            raise
        return done

    def _send(self, batch: List[bytes], base: Optional[Name]) -> List[Name]:
        kind, (id, generation) = (abi.BASE_ROOT, Name(0, 0)) if base is None else (abi.BASE_NAME, base)
        data = b"".join(batch)
        shown = os.fsdecode(batch[0][:-1]) + (f" and {len(batch) - 1} more names" if len(batch) > 1 else "")
        # NAMES answers for the last that this session has sent, so no other thread may come between.
        with self._naming:
            try:
                if self._read_only:
                    fields = (id, generation, len(data), kind, 0, 0)
                    answer, _ = call(self.fileno(), "INTERN", shown, fields, data, count=len(batch))
                    first, generation = answer[7:9]
                else:
                    head = (abi.NAMES_MAGIC, abi.VERSION, kind, id, generation, len(batch), len(data))
                    os.write(self.fileno(), abi.NAMES_HEADER.pack(*head) + data)
                    answer, _ = call(self.fileno(), "NAMES", shown, (0, 0))
                    count, first, generation = answer[2:5]
                    if count != len(batch):
                        remedy = "another process names by the same handle: give each its own"
                        raise ControlError("interning", shown, errno.EBUSY, remedy)
            except OSError as error:
                if isinstance(error, ControlError) and error.remedy:
                    raise
                remedies = {
                    errno.EINVAL: "names are paths below the mount, without a leading /, . or ..",
                    errno.ENOSPC: "forget names that are not needed any more",
                    errno.ESTALE: "the directory's name has been forgotten; intern it again",
                }
                number = error.errno or errno.EIO
                raise ControlError("interning", shown, number, remedies.get(number)) from None
        return [Name(first + at, generation) for at in range(len(batch))]

    def forget(self, names: Sequence[Name]) -> int:
        """Gives numbers back. Returns how many of them there were."""
        forgotten = 0
        for at in range(0, len(names), abi.FORGET_MAX):
            part = names[at : at + abi.FORGET_MAX]
            data = b"".join(abi.SLOT.pack(*name) for name in part)
            answer, _ = call(self.fileno(), "FORGET", self.mount, (0,), data, count=len(part))
            forgotten += answer[3]
        return forgotten

    def lookup(self, ranges: Sequence[Range]) -> Lookup:
        """Which ranges are there, in order. Of many it is one answer all the same: no name has changed meanwhile."""
        step = self.limits.ranges
        parts = [ranges[at : at + step] for at in range(0, len(ranges), step)] or [ranges]
        for _ in range(_LOOKUPS):
            generations: Set[int] = set()
            all_states: list = []
            prefix = present = 0
            for part in parts:
                answer, data = call(self.fileno(), "LOOKUP", self.mount, (0, 0, 0), pack(part), count=len(part))
                generations.add(answer[3])
                if prefix == len(all_states):
                    prefix += answer[4]
                present += answer[5]
                all_states += states(data, len(part))
            if len(generations) == 1:
                return Lookup(generations.pop(), prefix, present, all_states)
        remedy = "names change all the while; ask for fewer at a time"
        raise ControlError("lookup", f"{len(ranges)} ranges", errno.EAGAIN, remedy)

    def classify(self, ranges: Sequence[Range]) -> Window:
        """Where the ranges are, as one window, for one instant."""
        return self._classify(ranges, 0, 0, 0)[0]

    def lease(
        self, ranges: Sequence[Range], *, parties: int = 1, ttl: Optional[float] = None
    ) -> "_lease.Lease":
        """A lease of what is all in L1 now. EAGAIN if it is not: ``acquire`` brings it there."""
        window, (number, given, why) = self._classify(ranges, abi.CLASSIFY_LEASE, millis(ttl), parties)
        if number == 0:
            raise ControlError("lease", f"{len(ranges)} ranges", why, f"the window is {window.tier}")
        return _lease.Lease(self, number, given / 1000)

    def _classify(self, ranges: Sequence[Range], flags: int, ttl: int, parties: int) -> tuple:
        self._fits("classify", ranges)
        fields = (ttl, parties) + (0,) * 10
        answer, data = call(
            self.fileno(), "CLASSIFY", self.mount, fields, pack(ranges), flags=flags, count=len(ranges)
        )
        _, _, _, given, _, _, lease, why, tier, absent, failed, *sums = answer
        window = Window(TIERS.get(tier, "absent"), absent, failed, *sums, states(data, len(ranges)))
        return window, (lease, given, why)

    def attach(self, number: int) -> "_lease.Lease":
        """Takes a share of a lease that another handle of this user was granted, which has told its number."""
        return _lease.attach(self, number)


def identify(file: Union[int, "os.PathLike[str]", object]) -> Id:
    """Which version of a file an open file, or its descriptor, is."""
    fd = file if isinstance(file, int) else file.fileno()  # type: ignore[union-attr]
    answer, _ = call(fd, "ID", f"descriptor {fd}", (0, 0, 0))
    return Id(answer[3], answer[4], bool(answer[5] & abi.STATE_DURABLE))
