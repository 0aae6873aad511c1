"""One ioctl: a structure with items behind it goes in, what came in its place goes out."""

import errno
import fcntl
from typing import Tuple

from . import _abi as abi
from ._errors import ControlError

_REMEDIES = {
    errno.ENOTCONN: "the daemon is gone; open a new handle once it is mounted again",
    errno.ECONNABORTED: "the daemon is gone; open a new handle once it is mounted again",
    errno.ENOTTY: "this daemon does not understand that; use one of this client's release",
}


def call(
    fd: int, command: str, thing: object, fields: tuple, items: bytes = b"", *, flags: int = 0, count: int = 0
) -> Tuple[tuple, bytes]:
    """Sends a request, and returns the fields of the answer behind its header's three, and the items."""
    head = abi.COMMANDS[command][1]
    data = bytearray(head.pack(abi.VERSION, flags, count, *fields) + items)
    if len(data) > abi.IOCTL_BYTES_MAX:
        raise ControlError(command.lower(), thing, errno.E2BIG, "ask for fewer at a time")
    try:
        # The kernel writes the answer into the same memory, however long it is.
        fcntl.ioctl(fd, abi.number(command, len(data)), data)
    except OSError as error:
        number = error.errno or errno.EIO
        raise ControlError(command.lower(), thing, number, _REMEDIES.get(number)) from None
    return head.unpack_from(data), bytes(data[head.size :])
