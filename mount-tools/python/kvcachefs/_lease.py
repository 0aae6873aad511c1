"""Leases: given back at the end of ``with``."""

import os
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple, Type

from . import _abi as abi
from ._errors import ControlError
from ._ranges import Range, millis, pack
from ._wire import call

if TYPE_CHECKING:
    from ._handle import Handle

_LIVES = {0: "held", abi.LEASE_GONE: "gone", abi.LEASE_EXPIRED: "expired"}


@dataclass(frozen=True)
class LeaseState:
    """``life`` is held, gone or expired; ``ttl`` seconds are left; ``own`` of ``parties`` shares are this handle's."""

    life: str
    ttl: float
    parties: int
    own: int
    bytes: int
    ranges: int


@dataclass(frozen=True)
class Leased:
    """A range of a lease, by the version of the file that it holds."""

    node: int
    offset: int
    length: int
    held: int


class Lease:
    """What is kept in L1 until it is released. A forked child's copy gives nothing back: that is the parent's."""

    def __init__(self, handle: "Handle", number: int, ttl: float, *, attached: bool = False) -> None:
        self.number = number
        self.ttl = ttl
        self._handle = handle
        self._attached = attached
        self._pid = os.getpid()
        self._held = True

    def __repr__(self) -> str:
        return f"<kvcachefs.Lease {self.number} {'held' if self._held else 'released'}>"

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._let_go()

    def __del__(self) -> None:
        if self._held and self._pid == os.getpid() and not self._handle.closed:
            warnings.warn(f"{self!r} was not released", ResourceWarning, source=self, stacklevel=2)
            self._let_go()

    def _let_go(self) -> None:
        if not self._held or self._pid != os.getpid() or self._handle.closed:
            return
        try:
            self.release()
        except OSError:
            pass  # the daemon is gone, and the lease with it

    def extend(self, ttl: Optional[float] = None) -> LeaseState:
        """Begins its time to live anew."""
        state, _ = self._call("EXTEND", ttl=millis(ttl))
        self.ttl = state.ttl
        return state

    def query(self) -> Tuple[LeaseState, List[Leased]]:
        """How it is now, and what it holds."""
        room = bytes(abi.RANGES_MAX * abi.LEASED.size)
        fields = (self.number, 0, 0, 0, 0, 0, 0)
        answer, data = call(self._handle.fileno(), "QUERY", self._shown(), fields, room, count=abi.RANGES_MAX)
        whole = data[: answer[2] * abi.LEASED.size]
        return _state(answer), [Leased(*one) for one in abi.LEASED.iter_unpack(whole)]

    def release(self) -> LeaseState:
        """Gives back what this handle has of it: all shares that nobody attached to or, if it was attached to, one."""
        self._held = False
        state, _ = self._call("RELEASE", flags=0 if self._attached else abi.RELEASE_ALL_SHARES)
        return state

    def release_share(self) -> LeaseState:
        """Gives back one share of several."""
        return self._call("RELEASE")[0]

    def release_parts(self, parts: Sequence[Range]) -> LeaseState:
        """Gives back parts, as ``item()`` or ``node()`` name them: what has been read is free for others."""
        if not parts:
            raise ValueError("no part: release() gives back all of it")
        return self._call("RELEASE", items=pack(parts), count=len(parts))[0]

    def keep(self) -> int:
        """Leaves it to the handle, with which it ends, unless its time is over before."""
        self._held = False
        return self.number

    def _shown(self) -> str:
        return f"lease {self.number}"

    def _call(
        self, command: str, *, ttl: int = 0, flags: int = 0, items: bytes = b"", count: int = 0
    ) -> Tuple[LeaseState, bytes]:
        fields = (self.number, ttl, 0, 0, 0, 0, 0)
        answer, data = call(
            self._handle.fileno(), command, self._shown(), fields, items, flags=flags, count=count
        )
        return _state(answer), data


def attach(handle: "Handle", number: int) -> Lease:
    answer, _ = call(handle.fileno(), "ATTACH", f"lease {number}", (number, 0, 0, 0, 0, 0, 0))
    return Lease(handle, number, _state(answer).ttl, attached=True)


def _state(answer: tuple) -> LeaseState:
    _, _, _, _, ttl, parties, own, state, size, ranges = answer
    return LeaseState(_LIVES.get(state, "gone"), ttl / 1000, parties, own, size, ranges)


__all__ = ["ControlError", "Lease", "LeaseState", "Leased", "attach"]
