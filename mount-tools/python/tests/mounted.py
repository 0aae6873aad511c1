"""The module on a real mount, given as argument, in which d/f0000 to d/f0003 are not in L1; run by mount-tools/tests/languages.rs."""

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import time
import unittest

import kvcachefs
from kvcachefs import _abi as abi

MOUNT = sys.argv.pop(1)
NAMES = [f"d/f{at:04}" for at in range(4)]


def leases():
    with open(os.path.join(MOUNT, ".ctl/stats")) as stats:
        return int(dict(line.split() for line in stats if line.startswith("leases "))["leases"])


def until(what):
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit, "never"
        time.sleep(0.005)


class Mounted(unittest.TestCase):
    def setUp(self):
        self.handle = kvcachefs.Handle(MOUNT)
        self.addCleanup(self.handle.close)
        self.window = [kvcachefs.Range(name) for name in self.handle.intern(NAMES)]

    def raises(self, number, call, *args, **words):
        with self.assertRaises(kvcachefs.ControlError) as caught:
            call(*args, **words)
        self.assertEqual(caught.exception.errno, number, str(caught.exception))
        return str(caught.exception)

    def test_a_waiting_by_poll(self):  # first, while nothing is in L1
        self.assertEqual(self.handle.classify(self.window).tier, "l2")
        self.assertEqual(self.handle.forecast(self.window[:1]).bytes_to_read, self.handle.classify(self.window[:1]).bytes)
        answer = self.handle.acquire(self.window[:2], parties=2, tag=9)
        self.assertIsNotNone(answer.ticket)
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        self.assertTrue(poll.poll(60_000))
        (end,) = self.handle.read_ends()
        self.assertEqual((end.ticket, end.tag, end.stage), (answer.ticket, 9, kvcachefs.Stage.DONE))
        self.assertEqual(self.handle.read_ends(), [])
        self.assertIsNone(self.handle.progress(answer.ticket))
        self.assertIsNone(self.handle.cancel(answer.ticket))
        with end.lease as lease, kvcachefs.Handle(MOUNT) as rank:
            with rank.attach(lease.number) as share:
                self.assertEqual(share.query()[0].own, 1)
                with open(os.path.join(MOUNT, NAMES[0]), "rb") as file:
                    self.assertEqual(kvcachefs.identify(file).node, share.query()[1][0].node)
                share.release_parts([kvcachefs.item(0)])
            self.assertEqual(lease.extend(100).own, 1)
        self.assertEqual(leases(), 0)

    def test_b_waiting_in_an_event_loop(self):
        tickets = {self.handle.prefetch([one], tag=at).ticket for at, one in enumerate(self.window[2:])} - {None}
        self.assertEqual(len(tickets), 2)

        async def main():
            got = []
            async for end in self.handle.ends():
                got.append(end)
                if len(got) == 2:
                    return got

        ended = asyncio.run(asyncio.wait_for(main(), 60))
        self.assertEqual({end.ticket for end in ended}, tickets)
        self.assertEqual({end.tag for end in ended}, {0, 1})
        with self.assertRaises(ValueError):
            self.handle.wait_for(None)
        self.raises(errno.ENOENT, self.handle.wait_for, ended[0].ticket)

    def test_c_a_lease_ends_with_its_block_its_handle_and_its_process(self):
        with self.handle.lease(self.window):
            self.assertEqual(leases(), 1)
            child = os.fork()
            if child == 0:
                sys.exit(0)  # what the child has of it is not its own to give back
            os.waitpid(child, 0)
            self.assertEqual(leases(), 1)
        self.assertEqual(leases(), 0)
        other = kvcachefs.Handle(MOUNT)
        other.lease([kvcachefs.Range(other.intern(NAMES[:1])[0])]).keep()
        self.assertEqual(leases(), 1)
        other.close()
        until(lambda: leases() == 0)
        self.assertRaises(ValueError, other.fileno)
        script = "import kvcachefs, sys, time; h = kvcachefs.Handle(sys.argv[1]); l = h.lease([kvcachefs.Range(n) for n in h.intern(sys.argv[2:])]); print(l.number, flush=True); time.sleep(600)"
        dying = subprocess.Popen([sys.executable, "-c", script, MOUNT, *NAMES], stdout=subprocess.PIPE)
        self.assertTrue(dying.stdout.readline())
        self.assertEqual(leases(), 1)
        dying.send_signal(signal.SIGKILL)
        dying.wait()
        dying.stdout.close()
        until(lambda: leases() == 0)

    def test_d_many(self):
        long = "x" * 250
        names = self.handle.intern(f"none/{long}{at}" for at in range(6000))
        ranges = self.window * 126 + [kvcachefs.Range(names[-1])]
        found = self.handle.lookup(ranges)
        self.assertEqual((found.prefix, found.present, found.states[-1].errno), (504, 504, errno.ENOENT))
        for call in (self.handle.classify, self.handle.lease, self.handle.acquire, self.handle.prefetch):
            self.assertIn("at most 500", self.raises(errno.E2BIG, call, ranges))
        self.assertEqual(self.handle.forget(names), 6000)
        self.assertEqual(self.handle.lookup([kvcachefs.Range(names[0])]).states[0].errno, errno.ESTALE)
        self.assertIn("leading /", self.raises(errno.EINVAL, self.handle.intern, ["fine", "../x"]))

    def test_e_places(self):
        self.assertEqual(kvcachefs.locate(os.path.join(MOUNT, "d/none")), (os.path.realpath(MOUNT), "d/none"))
        self.assertEqual(kvcachefs.locate(MOUNT), (os.path.realpath(MOUNT), ""))
        self.raises(errno.EXDEV, kvcachefs.locate, "/proc/self")
        self.assertIn("no kvcachefs is mounted there", self.raises(errno.ENOENT, kvcachefs.Handle, "/proc"))
        self.addCleanup(setattr, abi, "VERSION", abi.VERSION)
        abi.VERSION = 9
        self.assertIn("one release", self.raises(errno.EPROTO, kvcachefs.Handle, MOUNT))

    def test_f_drain(self):
        self.assertTrue(self.handle.limits.drains)
        with open(os.path.join(MOUNT, "new"), "wb") as file:
            file.write(b"x" * 1_000_000)
        drain = self.handle.drain([kvcachefs.Range(self.handle.intern(["new"])[0])], timeout=60)
        self.assertEqual(self.handle.wait_for(drain.ticket, 60).stage, kvcachefs.Stage.DONE)


if __name__ == "__main__":
    unittest.main()
