"""What takes its time: a window that is brought to L1, or a drain, and how it ends."""

import enum
from dataclasses import dataclass
from typing import List, Optional

from . import _abi as abi
from ._lease import Lease
from ._ranges import Window


class Stage(enum.IntEnum):
    NONE = abi.TICKET_NONE
    QUEUED = abi.TICKET_QUEUED
    RUNNING = abi.TICKET_RUNNING
    DONE = abi.TICKET_DONE
    DENIED = abi.TICKET_DENIED
    CANCELLED = abi.TICKET_CANCELLED
    FAILED = abi.TICKET_FAILED


@dataclass(frozen=True)
class Prefetch:
    """Where a window was, and what becomes of it.

    DONE: all of it is in L1, and ``lease`` is there if it was asked for. QUEUED, RUNNING: ``ticket`` is its number. DENIED:
    ``errno`` says why. ``estimate`` is in seconds, and None if it is not known yet.
    """

    stage: Stage
    ticket: Optional[int]
    lease: Optional[Lease]
    errno: int
    window: Window
    bytes_to_read: int
    ahead: int
    estimate: Optional[float]


@dataclass(frozen=True)
class End:
    """How a ticket ended: DONE, or DENIED, CANCELLED or FAILED with an ``errno``."""

    ticket: int
    tag: int
    stage: Stage
    errno: int
    lease: Optional[Lease]
    bytes: int
    files: int
    failed: int


@dataclass(frozen=True)
class Progress:
    """How far a ticket is."""

    stage: Stage
    bytes: int
    bytes_total: int
    files: int
    failed: int
    ahead: int
    estimate: Optional[float]
    age: float


@dataclass(frozen=True)
class Drain:
    """What is waited for. Without a ticket nothing is: ``errnos`` says what is wrong with a range."""

    ticket: Optional[int]
    files: int
    bytes: int
    errnos: List[int]
