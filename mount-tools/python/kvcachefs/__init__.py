"""The client of a kvcachefs mount's control files, as docs/CONTROL.md says what they do.

    with kvcachefs.Handle("/mnt/kv") as handle:
        window = [kvcachefs.Range(name) for name in handle.intern(["qwen3-8b/rank0/3fa9.kv"])]
        answer = handle.acquire(window, parties=2)
        lease = answer.lease or handle.wait_for(answer.ticket).lease
        with lease:
            ...  # nothing of it moves

No dependency, no C. What is taken is given back by ``with``, by ``close()`` and ``release()``, and when the process ends.
"""

from ._errors import ControlError
from ._handle import Handle, Id, Limits, identify
from ._lease import Lease, Leased, LeaseState
from ._place import locate
from ._ranges import Lookup, Name, Range, State, Window, item, node
from ._tickets import Drain, End, Prefetch, Progress, Stage

__all__ = [
    "ControlError",
    "Drain",
    "End",
    "Handle",
    "Id",
    "Lease",
    "LeaseState",
    "Leased",
    "Limits",
    "Lookup",
    "Name",
    "Prefetch",
    "Progress",
    "Range",
    "Stage",
    "State",
    "Window",
    "identify",
    "item",
    "locate",
    "node",
]
