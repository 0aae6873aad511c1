"""The part of a handle that begins what takes its time, and waits for it."""

import asyncio
import errno
import os
import select
import time
from typing import AsyncIterator, List, Optional, Sequence

from . import _abi as abi
from ._errors import ControlError
from ._lease import Lease
from ._ranges import TIERS, Range, Window, millis, pack, states
from ._tickets import Drain, End, Prefetch, Progress, Stage
from ._wire import call

#: Ends that one read asks for.
_ENDS = 64


class Waiting:
    """Prefetch, drain, and the ends of both."""

    mount: str

    def __init__(self) -> None:
        #: Ends that were read by somebody who waits for another one.
        self._kept: List[End] = []

    def fileno(self) -> int:
        raise NotImplementedError

    def _fits(self, doing: str, ranges: Sequence[Range]) -> None:
        if len(ranges) > abi.RANGES_MAX:
            remedy = f"one answer is about at most {abi.RANGES_MAX}: make them fewer and larger"
            raise ControlError(doing, f"{len(ranges)} ranges", errno.E2BIG, remedy)

    def prefetch(
        self, ranges: Sequence[Range], *, priority: int = 0, deadline: Optional[float] = None, tag: int = 0
    ) -> Prefetch:
        """Brings a window to L1. What is there already is answered at once."""
        return self._prefetch(ranges, 0, tag, deadline, None, 0, priority)

    def acquire(
        self,
        ranges: Sequence[Range],
        *,
        parties: int = 1,
        ttl: Optional[float] = None,
        priority: int = 0,
        deadline: Optional[float] = None,
        tag: int = 0,
    ) -> Prefetch:
        """The same with a lease, in the step in which all of it is in L1."""
        return self._prefetch(ranges, abi.PREFETCH_LEASE, tag, deadline, ttl, parties, priority)

    def forecast(self, ranges: Sequence[Range], *, leased: bool = False, priority: int = 0) -> Prefetch:
        """What would become of it. Nothing is begun, and no lease granted."""
        flags = abi.PREFETCH_ASK | (abi.PREFETCH_LEASE if leased else 0)
        return self._prefetch(ranges, flags, 0, None, None, 0, priority)

    def _prefetch(
        self,
        ranges: Sequence[Range],
        flags: int,
        tag: int,
        deadline: Optional[float],
        ttl: Optional[float],
        parties: int,
        priority: int,
    ) -> Prefetch:
        self._fits("prefetch", ranges)
        fields = (tag, millis(deadline), millis(ttl), parties, priority) + (0,) * 14
        answer, data = call(
            self.fileno(), "PREFETCH", self.mount, fields, pack(ranges), flags=flags, count=len(ranges)
        )
        given = answer[5]
        ticket, lease, status, state, tier, absent, failed, *sums, to_read, ahead, estimate = answer[8:]
        return Prefetch(
            Stage(state),
            ticket or None,
            Lease(self, lease, given / 1000) if lease else None,  # type: ignore[arg-type]
            status,
            Window(TIERS.get(tier, "absent"), absent, failed, *sums, states(data, len(ranges))),
            to_read,
            ahead,
            estimate / 1000 if estimate else None,
        )

    def drain(
        self, ranges: Sequence[Range] = (), *, timeout: Optional[float] = None, tag: int = 0
    ) -> Drain:
        """Begins to wait until what was published is durable: files, all below directories, or everything."""
        self._fits("drain", ranges)
        fields = (tag, millis(timeout), 0, 0, 0)
        answer, data = call(self.fileno(), "DRAIN", self.mount, fields, pack(ranges), count=len(ranges))
        ticket, files, size = answer[5:]
        return Drain(ticket or None, files, size, [state.errno for state in states(data, len(ranges))])

    def failures(self, ticket: int) -> List[str]:
        """The paths of what a drain could not store, from the root of the mount, until its end is read."""
        paths: List[str] = []
        room = bytes(abi.IOCTL_BYTES_MAX - abi.FAILURES.size)
        while True:
            fields = (ticket, len(paths), 0, 0, 0)
            answer, data = call(
                self.fileno(), "FAILURES", f"ticket {ticket}", fields, room, count=len(room)
            )
            count, size, known = answer[5:]
            paths += [os.fsdecode(path) for path in data[:size].split(b"\0")[:-1]]
            if count == 0 or len(paths) >= known:
                return paths

    def progress(self, ticket: int) -> Optional[Progress]:
        """How far a ticket is. None: its end has been read."""
        return self._ask("TICKET", ticket)

    def cancel(self, ticket: int) -> Optional[Progress]:
        """Takes a ticket back. Its end is read like any other. None: that has been read."""
        return self._ask("CANCEL", ticket)

    def _ask(self, command: str, ticket: int) -> Optional[Progress]:
        fields = (ticket,) + (0,) * 13
        try:
            answer, _ = call(self.fileno(), command, f"ticket {ticket}", fields)
        except ControlError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        _, _, _, _, _, _, done, files, failed, _, state, _, _, total, ahead, estimate, age = answer
        left = estimate / 1000 if estimate else None
        return Progress(Stage(state), done, total, files, failed, ahead, left, age / 1000)

    def read_ends(self) -> List[End]:
        """How tickets ended that have by now; does not wait."""
        kept, self._kept = self._kept, []
        try:
            data = os.read(self.fileno(), _ENDS * abi.TICKET_STATE.size)
        except BlockingIOError:
            return kept
        whole = data[: len(data) // abi.TICKET_STATE.size * abi.TICKET_STATE.size]
        return kept + [self._end(*fields) for fields in abi.TICKET_STATE.iter_unpack(whole)]

    def _end(
        self,
        ticket: int,
        tag: int,
        lease: int,
        size: int,
        files: int,
        failed: int,
        status: int,
        state: int,
        kind: int,
        ttl: int,
    ) -> End:
        granted = Lease(self, lease, ttl / 1000) if lease else None  # type: ignore[arg-type]
        return End(ticket, tag, Stage(state), status, granted, size, files, failed)

    def wait(self, timeout: Optional[float] = None) -> List[End]:
        """Waits until tickets have ended, and says how. Empty: the time is over."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            ends = self.read_ends()
            if ends or not self._readable(until):
                return ends

    def wait_for(self, ticket: Optional[int], timeout: Optional[float] = None) -> End:
        """Waits for one ticket; the ends of others are kept for ``read_ends``, ``wait`` and ``ends``.

        TimeoutError: the time is over. A handle that is in an event loop is not asked this: it would not see what is kept.
        """
        if ticket is None:
            raise ValueError("there is no ticket: it ended in the call, or was denied")
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            ends = self.read_ends()
            found = [end for end in ends if end.ticket == ticket]
            self._kept += [end for end in ends if end.ticket != ticket]
            if found:
                return found[0]
            if self.progress(ticket) is None:
                raise ControlError("waiting", f"ticket {ticket}", errno.ENOENT, "its end has been read")
            if not self._readable(until):
                raise TimeoutError(f"ticket {ticket} has not ended within {timeout} s")

    def _readable(self, until: Optional[float]) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        left = None if until is None else max(0.0, until - time.monotonic()) * 1000
        ready = poll.poll(left)
        if any(not events & select.POLLIN for _, events in ready):
            remedy = "the daemon is gone; open a new handle once it is mounted again"
            raise ControlError("waiting for tickets", self.mount, errno.ENOTCONN, remedy)
        return bool(ready)

    async def ends(self) -> AsyncIterator[End]:
        """How tickets end, one after another, in the running event loop. It goes on until it is closed or cancelled."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.fileno(), ready.set)
        try:
            while True:
                ready.clear()
                ends = self.read_ends()
                if not ends:
                    await ready.wait()
                while ends:
                    # What is not taken any more is somebody else's to read.
                    end = ends.pop(0)
                    self._kept = ends + self._kept
                    yield end
                    ends, self._kept = self._kept, []
        finally:
            loop.remove_reader(self.fileno())
