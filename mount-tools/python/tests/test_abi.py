"""The layouts of the module are those of the C header: every structure field by field, every number by name."""

import re
import unittest
from pathlib import Path

from kvcachefs import _abi as abi

HEADER = (Path(__file__).parents[2] / "include/kvcachefs.h").read_text()
CODES = {"uint64_t": "Q", "uint32_t": "I", "int32_t": "i", "uint16_t": "H", "uint8_t": "B"}
SIZES = {"Q": 8, "I": 4, "i": 4, "H": 2, "B": 1}


def formats():
    """The structures of the header as formats, with what is reserved as so many x."""
    text = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    known = {}
    for name, body in re.findall(r"struct kvcachefs_(\w+) \{(.*?)\};", text, flags=re.S):
        format = ""
        for kind, field, many in re.findall(r"((?:struct )?\w+) (\w+)(?:\[(\d+)\])?;", body):
            if kind.startswith("struct"):
                format += known[kind.split("kvcachefs_")[1]]
            elif field.startswith("reserved"):
                format += "x" * SIZES[CODES[kind]] * int(many or 1)
            else:
                format += CODES[kind] * int(many or 1)
        known[name] = format
    return known


def spelled_out(format):
    """4I as IIII, without blanks and the byte order."""
    return re.sub(r"(\d*)([QIiHBx])", lambda found: found[2] * int(found[1] or 1), format.strip("= ")).replace(" ", "")


class Layouts(unittest.TestCase):
    def test_structures(self):
        known = formats()
        self.assertEqual(len(known), 19)
        for name, format in known.items():
            ours = getattr(abi, name.upper())
            self.assertEqual(spelled_out(ours.format), format, name)

    def test_numbers(self):
        compared = 0
        for name, value in re.findall(r"#define KVCACHEFS_(\w+) (\d+)\s", HEADER):
            if hasattr(abi, name):
                self.assertEqual(getattr(abi, name), int(value), name)
                compared += 1
        self.assertGreater(compared, 30)
        # And each of ours is one of the header's.
        for name in vars(abi):
            if isinstance(getattr(abi, name), int):
                self.assertRegex(HEADER, rf"#define KVCACHEFS_{name}\b")

    def test_commands(self):
        for name, number, rest in re.findall(r"#define KVCACHEFS_IOC_(\w+)(?:\(n\))?[ \\\n]+KVCACHEFS_IOC\((\d+), (.*)\)", HEADER):
            ours, head, item = abi.COMMANDS[name]
            self.assertEqual(ours, int(number), name)
            structures = [getattr(abi, found.upper()).size for found in re.findall(r"struct kvcachefs_(\w+)", rest)]
            expected = [head.size] + ([item] if item > 1 else [])
            self.assertEqual(structures, expected, name)
        self.assertEqual(abi.number("HELLO", 88), 0xC0584B01)


if __name__ == "__main__":
    unittest.main()
