"""What a shared library says of itself: ELF of 64 bits, little-endian."""

import struct
from pathlib import Path

LOAD, GNU_STACK, GNU_RELRO = 1, 0x6474E551, 0x6474E552
DYNAMIC, DYNSYM = 6, 11
TEXTREL, BIND_NOW, RPATH, RUNPATH, FLAGS, FLAGS_1 = 22, 24, 15, 29, 30, 0x6FFFFFFB


class Library:
    """`segments`: flags by kind. `dynamic`: value by tag. `exported`, `imported`: names of symbols."""

    def __init__(self, path):
        self.data = Path(path).read_bytes()
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no ELF file of 64 bits, little-endian")
        segments, sections = struct.unpack_from("<QQ", self.data, 0x20)
        segment_size, segment_count, section_size, section_count = struct.unpack_from("<HHHH", self.data, 0x36)
        self.segments = dict(
            struct.unpack_from("<II", self.data, segments + i * segment_size) for i in range(segment_count)
        )
        headers = [
            struct.unpack_from("<IIQQQQII", self.data, sections + i * section_size) for i in range(section_count)
        ]
        self.dynamic, self.exported, self.imported = {}, set(), set()
        for _, kind, _, _, offset, size, link, _ in headers:
            if kind == DYNAMIC:
                self.dynamic = dict(struct.iter_unpack("<QQ", self.data[offset : offset + size]))
            elif kind == DYNSYM:
                strings = headers[link][4]
                for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", self.data[offset : offset + size]):
                    start = strings + name
                    text = self.data[start : self.data.index(b"\0", start)].decode()
                    if text and info >> 4:  # 0: local
                        (self.exported if section else self.imported).add(text)
