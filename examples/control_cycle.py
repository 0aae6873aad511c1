#!/usr/bin/env python3
"""One request of an inference engine against a kvcachefs mount, from lookup to release.

    PYTHONPATH=mount-tools/python examples/control_cycle.py /mnt/kv qwen3-8b/rank0/3fa9.kv

The first process is the scheduler. It starts itself again as the rank that reads: in an engine that is a worker process of its
own, which has been told the number of the lease.
"""

import os
import subprocess
import sys

import kvcachefs


def scheduler(mount: str, names: list) -> None:
    # One handle for the life of the engine. What is asked for by it goes when the process dies.
    with kvcachefs.Handle(mount) as handle:
        window = [kvcachefs.Range(name) for name in handle.intern(names)]
        found = handle.lookup(window)
        print(f"lookup {found.prefix} of {len(window)}")
        if found.prefix < len(window):
            sys.exit("a range is missing, and is computed instead")

        # One share for the rank, one that the scheduler keeps.
        answer = handle.acquire(window, parties=2, deadline=30, tag=42)
        if answer.stage is kvcachefs.Stage.DENIED:
            sys.exit(f"denied, and computed instead: {os.strerror(answer.errno)}")
        lease = answer.lease
        if lease is None:
            # An engine goes on with other requests: it has handle.fileno() in its poll or event loop, or `async for end in
            # handle.ends()`, and finds the request by end.tag.
            print("waiting")
            end = handle.wait_for(answer.ticket)
            if end.lease is None:
                sys.exit(f"not brought: {os.strerror(end.errno)}")
            lease = end.lease
        print("acquired")
        with lease:
            subprocess.run([sys.executable, __file__, "--rank", str(lease.number), mount, *names], check=True)
        print("released")


def rank(number: int, mount: str, names: list) -> None:
    with kvcachefs.Handle(mount) as handle, handle.attach(number) as lease:
        _, held = lease.query()
        size = 0
        for at, name in enumerate(names):
            with open(os.path.join(mount, name), "rb") as file:
                # A name may lead to other bytes by now; the lease holds a version.
                if kvcachefs.identify(file).node != held[at].node:
                    sys.exit(f"{name}: replaced since it was leased")
                size += len(file.read())
            # What has been read is free for others; the last part gives the share back.
            lease.release_parts([kvcachefs.item(at)])
        print(f"rank read {size} bytes")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    elif len(sys.argv) > 2:
        scheduler(sys.argv[1], sys.argv[2:])
    else:
        sys.exit("usage: control_cycle.py MOUNT NAME... (from the root of the mount)")
