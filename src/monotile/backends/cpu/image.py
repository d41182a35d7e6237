"""Link an object file to an image, once, when a kernel is compiled: lay out its sections and apply its relocations. A
process that loads it from the disk cache only fills in the addresses of imported functions.

All references inside an image are relative, so it runs at any page boundary. Calls of imported functions go through
stubs that read the address from a word at the end of the image. The known relocations are those that LLVM emits for
position-independent code in the small model; any other makes `link` raise `Unlinkable`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import loader

_X86_64, _AARCH64 = 62, 183  # e_machine
_SYMBOLS, _RELA, _PROGBITS = 2, 4, 1  # sh_type
_WRITE, _ALLOC, _THREAD_LOCAL = 1, 2, 0x400  # sh_flags
_GLOBAL, _FUNCTION = 1, 2  # binding and type of a symbol
_UNDEFINED, _RESERVED = 0, 0xFF00  # section numbers
_ALIGNMENT_LIMIT = 4096  # the smallest page of any system

# jmp *slot(%rip); and adrp x16, slot; ldr x16, [x16, slot]; br x16
_X86_STUB = bytes.fromhex("ff2500000000cccc")
_ARM_STUB = bytes.fromhex("10000090100240f900021fd61f2003d5")


class Unlinkable(Exception):
    """An object that uses something images do not support."""


@dataclass
class _Section:
    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


@dataclass
class _Symbol:
    name: str
    binding: int
    kind: int
    section: int
    value: int


@dataclass
class _Layout:
    """The image under construction: bytes, offsets of the sections, and the stub and word of each import."""

    code: bytearray = field(default_factory=bytearray)
    sections: dict[int, int] = field(default_factory=dict)
    stubs: dict[str, int] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)

    def append(self, data: bytes, alignment: int) -> int:
        self.code += bytes(-len(self.code) % alignment)
        place = len(self.code)
        self.code += data
        return place


def link(data: bytes) -> bytes:
    """Return the image of an ELF object file for x86-64 or AArch64."""
    try:
        return _link(data)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise Unlinkable(f"not a whole ELF object: {error}") from error


def _link(data: bytes) -> bytes:
    machine, sections = _header(data)
    symbols = _symbols(data, sections)
    layout = _Layout()
    for n, section in enumerate(sections):
        if _is_loaded(section):
            if section.alignment > _ALIGNMENT_LIMIT:
                raise Unlinkable(f"{section.name} is aligned to {section.alignment}")
            content = data[section.offset : section.offset + section.size]
            layout.sections[n] = layout.append(content, max(1, section.alignment))
    relocations = list(_relocations(data, sections, layout))
    _add_stubs(layout, machine, [symbols[r.symbol] for r in relocations])
    for relocation in relocations:
        symbol = symbols[relocation.symbol]
        target = layout.stubs.get(symbol.name) if symbol.section == _UNDEFINED else _place(symbol, layout)
        if target is None:
            raise Unlinkable(f"nothing defines {symbol.name!r}")
        call = relocation.kind in _CALLS[machine]
        if symbol.section == _UNDEFINED and not call:
            raise Unlinkable(f"relocation {relocation.kind} takes the address of the import {symbol.name!r}")
        patch = _patch_x86 if machine == _X86_64 else _patch_arm
        patch(layout.code, relocation.kind, relocation.place, target + relocation.addend)
    functions = [
        (s.name, _place(s, layout)) for s in symbols if s.binding == _GLOBAL and s.kind == _FUNCTION and s.section
    ]
    names = [f"{name} {place}\n" for name, place in functions]
    names += [f"{loader.IMPORT}{name} {place}\n" for name, place in layout.words.items()]
    table = "".join(names).encode("ascii")
    return loader.HEADER.pack(loader.MAGIC, len(layout.code), len(table)) + bytes(layout.code) + table


# ---- reading ---------------------------------------------------------------------------------------------------------


def _header(data: bytes) -> tuple[int, list[_Section]]:
    if data[:7] != b"\x7fELF\x02\x01\x01":
        raise Unlinkable("not a little-endian ELF object of 64 bits")
    kind, machine = struct.unpack_from("<HH", data, 16)
    (table,) = struct.unpack_from("<Q", data, 40)
    entry, count, names = struct.unpack_from("<HHH", data, 58)
    if kind != 1 or machine not in (_X86_64, _AARCH64) or entry != 64:
        raise Unlinkable(f"not a relocatable object for a processor that is known: type {kind}, machine {machine}")
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, table + n * entry) for n in range(count)]
    strings = raw[names][4]
    sections = []
    for name, sort, flags, _, offset, size, link, info, alignment, _ in raw:
        if sort != 8 and offset + size > len(data):  # 8: a section of zeros, which has no bytes here
            raise Unlinkable("a section ends beyond the file")
        sections.append(_Section(_text(data, strings + name), sort, flags, offset, size, link, info, alignment))
    return machine, sections


def _symbols(data: bytes, sections: list[_Section]) -> list[_Symbol]:
    found = []
    for table in sections:
        if table.kind == _SYMBOLS:
            strings = sections[table.link].offset
            for offset in range(table.offset, table.offset + table.size, 24):
                name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", data, offset)
                found.append(_Symbol(_text(data, strings + name), info >> 4, info & 15, section, value))
    return found


def _is_loaded(section: _Section) -> bool:
    """True if the section is loaded. Unwinding tables are not: no exception passes through a kernel."""
    if not section.flags & _ALLOC or section.name == ".eh_frame" or not section.size:
        return False
    if section.flags & (_WRITE | _THREAD_LOCAL) or section.kind != _PROGBITS:
        raise Unlinkable(f"the section {section.name} holds variables")
    return True


@dataclass
class _Relocation:
    place: int
    kind: int
    symbol: int
    addend: int


def _relocations(data: bytes, sections: list[_Section], layout: _Layout) -> Iterator[_Relocation]:
    for table in sections:
        if table.kind == 9:
            raise Unlinkable(f"{table.name} has relocations without addends")
        if table.kind == _RELA and table.info in layout.sections:
            base, size = layout.sections[table.info], sections[table.info].size
            for at in range(table.offset, table.offset + table.size, 24):
                offset, info, addend = struct.unpack_from("<QQq", data, at)
                if offset + 4 > size:
                    raise Unlinkable(f"a relocation lies beyond {sections[table.info].name}")
                yield _Relocation(base + offset, info & 0xFFFFFFFF, info >> 32, addend)


def _text(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset)
    if not 0 <= offset <= end:
        raise Unlinkable("a name lies beyond the file")
    return data[offset:end].decode("ascii")


def _place(symbol: _Symbol, layout: _Layout) -> int:
    if symbol.section >= _RESERVED or symbol.section not in layout.sections:
        raise Unlinkable(f"{symbol.name!r} lies in section {symbol.section}, which is not loaded")
    return layout.sections[symbol.section] + symbol.value


# ---- relocations -----------------------------------------------------------------------------------------------------

# x86-64: 2 is PC32, 4 is PLT32, which may go through a stub. AArch64: 282 and 283 are jump and call.
_CALLS = {_X86_64: (4,), _AARCH64: (282, 283)}
_LOW_12 = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}  # add, and loads of 1 to 16 bytes: how far offsets shift


def _add_stubs(layout: _Layout, machine: int, used: list[_Symbol]) -> None:
    names = list(dict.fromkeys(s.name for s in used if s.section == _UNDEFINED))
    for name in names:
        if not name or " " in name or "\n" in name:
            raise Unlinkable(f"an import is called {name!r}")
        layout.stubs[name] = layout.append(_X86_STUB if machine == _X86_64 else _ARM_STUB, 16)
    for name in names:
        word, stub = layout.append(bytes(8), 8), layout.stubs[name]
        layout.words[name] = word
        if machine == _X86_64:
            _patch_x86(layout.code, 2, stub + 2, word - 4)
        else:
            _patch_arm(layout.code, 275, stub, word)
            _patch_arm(layout.code, 286, stub + 4, word)


def _patch_x86(code: bytearray, kind: int, place: int, target: int) -> None:
    if kind not in (2, 4):
        raise Unlinkable(f"relocation {kind} of x86-64 is not known")
    distance = target - place
    if not -(2**31) <= distance < 2**31:
        raise Unlinkable(f"{distance} bytes are too far for a reference")
    struct.pack_into("<i", code, place, distance)


def _patch_arm(code: bytearray, kind: int, place: int, target: int) -> None:
    """Apply a relocation of AArch64. `target` and `place` are offsets in the image, which begins at a page boundary: so
    their low 12 bits are those of the addresses."""
    (word,) = struct.unpack_from("<I", code, place)
    if kind in _CALLS[_AARCH64]:
        distance = target - place
        if distance % 4 or not -(2**27) <= distance < 2**27:
            raise Unlinkable(f"{distance} bytes are too far for a call, or not whole instructions")
        word = (word & 0xFC000000) | ((distance >> 2) & 0x3FFFFFF)
    elif kind == 275:  # the page of the target, in pages from here
        pages = (target >> 12) - (place >> 12)
        if not -(2**20) <= pages < 2**20:
            raise Unlinkable(f"{pages} pages are too far for a reference")
        word = (word & 0x9F00001F) | ((pages & 3) << 29) | (((pages >> 2) & 0x7FFFF) << 5)
    elif kind in _LOW_12:
        shift, low = _LOW_12[kind], target & 0xFFF
        if low & ((1 << shift) - 1):
            raise Unlinkable(f"relocation {kind} of AArch64 refers to something that is not aligned")
        word = (word & ~(0xFFF << 10)) | ((low >> shift) << 10)
    else:
        raise Unlinkable(f"relocation {kind} of AArch64 is not known")
    struct.pack_into("<I", code, place, word)
