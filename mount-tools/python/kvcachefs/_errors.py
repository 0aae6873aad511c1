"""What failed: an OSError with its errno, in one line that names the thing and the remedy."""

import os
from typing import Optional


class ControlError(OSError):
    """A request that failed as a whole. What is wrong with one range of it is the state of that range."""

    def __init__(self, doing: str, thing: object, errno: int, remedy: Optional[str] = None) -> None:
        super().__init__(errno, os.strerror(errno))
        self.doing = doing
        self.thing = str(thing)
        self.remedy = remedy

    def __str__(self) -> str:
        line = f"{self.thing}: {self.doing}: {self.strerror}"
        return f"{line}; {self.remedy}" if self.remedy else line
