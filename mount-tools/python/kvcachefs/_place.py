"""Which mount a path is in, and what it is called there."""

import errno
import os
from typing import Tuple, Union

from ._errors import ControlError


def locate(path: Union[str, "os.PathLike[str]"]) -> Tuple[str, str]:
    """The directory on which a path's kvcachefs is mounted, and the name from there. The file may be missing.

    It goes through the mount, so it waits for a daemon that does not answer.
    """
    real = os.path.realpath(path)
    there = real
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    device = os.lstat(there).st_dev
    mount = there
    while mount != "/" and os.lstat(os.path.dirname(mount)).st_dev == device:
        mount = os.path.dirname(mount)
    if not os.path.lexists(os.path.join(mount, ".ctl/lease")):
        raise ControlError(
            "finding its mount", os.fspath(path), errno.EXDEV, f"no kvcachefs is mounted on {mount}"
        )
    name = os.path.relpath(real, mount)
    return mount, "" if name == "." else name
