"""Reads ELF files for the bundle: the loader, the libraries, and a copy that runs in another directory.

Pure but for `libraries`, which runs the loader, because only the loader has the run paths, its cache and its
default directories.
"""

from __future__ import annotations

import struct
import subprocess
from typing import Final

from holdfast.errors import SandboxError

MAGIC: Final = b"\x7fELF"
_PT_DYNAMIC: Final = 2
_PT_INTERP: Final = 3
#: Entries of the dynamic section with library directories, searched before (15) or after (29) the given path.
_RUN_PATHS: Final = (15, 29)
_DYNAMIC: Final = struct.Struct("<QQ")
#: e_phoff, e_shoff; e_phentsize, e_phnum, e_shentsize, e_shnum, e_shstrndx.
_OFFSETS: Final = struct.Struct("<QQ")
_COUNTS: Final = struct.Struct("<5H")
_AT_OFFSETS: Final = 32
_AT_COUNTS: Final = 54
#: p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz.
_SEGMENT: Final = struct.Struct("<IIQQQQ")


def loader_of(content: bytes, name: str) -> str:
    """Return the loader that a program names."""
    for kind, offset, size in _segments(content, name):
        if kind == _PT_INTERP:
            return content[offset : offset + size].rstrip(b"\0").decode()
    raise SandboxError(
        f"{name} is linked statically and loads no extension modules: make the bundle with another Python"
    )


def relocatable(content: bytes, name: str) -> bytes:
    """Return the file without run paths, and without the parts that only debuggers and linkers read.

    The loader searches a run path before the path that it is given, and in a sandbox that directory may hold other
    libraries. Symbol tables and debug information follow the last segment, which is the last part that a loader
    reads; they are 17 of 23 MB of an interpreter that was built with `-g`.
    """
    segments = _segments(content, name)
    end = max(offset + size for _, offset, size in segments)
    kept = bytearray(content[:end])
    program_headers, _ = _OFFSETS.unpack_from(kept, _AT_OFFSETS)
    entry, count, *_ = _COUNTS.unpack_from(kept, _AT_COUNTS)
    _OFFSETS.pack_into(kept, _AT_OFFSETS, program_headers, 0)
    _COUNTS.pack_into(kept, _AT_COUNTS, entry, count, 0, 0, 0)
    for kind, offset, size in segments:
        if kind == _PT_DYNAMIC:
            entries = list(_DYNAMIC.iter_unpack(kept[offset : offset + size]))
            staying = [_DYNAMIC.pack(*each) for each in entries if each[0] not in _RUN_PATHS]
            # Zeros end the section.
            kept[offset : offset + size] = b"".join(staying).ljust(size, b"\0")
    return bytes(kept)


def libraries(loader: str, path: str) -> dict[str, str]:
    """Return the shared libraries that a file needs, each name with its file on this machine.

    `ldd` calls the same `--list` of the loader. It runs no code of the file, and the loaders of glibc and musl both
    have it.
    """
    done = subprocess.run([loader, "--list", path], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SandboxError(f"{loader} --list {path}: {(done.stderr or done.stdout).strip()}")
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if not arrow:
            continue  # the loader itself, or the part that the kernel maps in
        if rest.startswith("not found"):
            raise SandboxError(f"{path} needs {name}, which this machine does not have")
        file = rest.rpartition(" (")[0] or rest
        if name != loader and file != loader:
            found[name] = file
    return found


def _segments(content: bytes, name: str) -> list[tuple[int, int, int]]:
    """Return kind, offset and length of each segment, and of the table of segments itself."""
    if content[:4] != MAGIC or content[4:6] != b"\x02\x01":
        raise SandboxError(f"{name} is not a 64-bit little-endian ELF file")
    table, _ = _OFFSETS.unpack_from(content, _AT_OFFSETS)
    entry, count, *_ = _COUNTS.unpack_from(content, _AT_COUNTS)
    found = [(0, table, entry * count)]
    for index in range(count):
        kind, _, offset, _, _, size = _SEGMENT.unpack_from(content, table + index * entry)
        found.append((kind, offset, size))
    return found
