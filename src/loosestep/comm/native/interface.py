"""The interface between Python and C, read from ``interface.h``, where it is written."""

from __future__ import annotations

import ctypes
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

HEADER = Path(__file__).with_name("interface.h")

# All pointers are addresses, except texts that C returns.
_TYPES: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


class Signature(NamedTuple):
    """What a function takes and returns."""

    arguments: list[Any]
    result: Any


def interface_hash(header: bytes) -> str:
    """Return what a library carries of the header that it was built with."""
    return hashlib.sha256(header).hexdigest()[:16]


def read_constants(header: str) -> dict[str, int]:
    """Return the numbers of every ``enum``.

    >>> read_constants("enum { A = 1, /* one */ B = 44 };")
    {'A': 1, 'B': 44}
    """
    blocks = re.findall(r"enum\s*\{(.*?)\}", _without_comments(header), re.S)
    return {name: int(value) for block in blocks for name, value in _NUMBER.findall(block)}


def read_structures(header: str) -> dict[str, type[ctypes.Structure]]:
    """Return every ``typedef struct`` as ctypes has it.

    >>> pair = read_structures("typedef struct { int64_t *first; double second; } Pair;")["Pair"]
    >>> ctypes.sizeof(pair), [name for name, _ in pair._fields_]
    (16, ['first', 'second'])
    """
    found = re.findall(r"typedef struct\s*\{(.*?)\}\s*(\w+);", _without_comments(header), re.S)
    return {
        name: type(name, (ctypes.Structure,), {"_fields_": [_field(f) for f in _parts(body, ";")]})
        for body, name in found
    }


def read_functions(header: str) -> dict[str, Signature]:
    """Return what every function takes and returns.

    >>> read_functions("float add(const float *x, size_t count);")["add"].result.__name__
    'c_float'
    """
    outside = re.sub(r"typedef struct.*?\}\s*\w+;", "", _without_comments(header), flags=re.S)
    found = re.findall(r"^([\w ]*[ *])(\w+)\(([^)]*)\);", outside, re.M)
    return {
        name: Signature([_field(a)[1] for a in _parts(taken, ",") if a != "void"], _result(given))
        for given, name, taken in found
    }


_NUMBER = re.compile(r"(\w+) = (\d+)")


def _without_comments(header: str) -> str:
    return re.sub(r"/\*.*?\*/", "", header, flags=re.S)


def _parts(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _field(declaration: str) -> tuple[str, Any]:
    """Return name and type of a field or an argument."""
    kind, name = re.fullmatch(r"(.*?)(\w+)", declaration.strip(), re.S).groups()  # type: ignore[union-attr]
    return name, ctypes.c_void_p if "*" in kind else _TYPES[kind.strip()]


def _result(declaration: str) -> Any:
    kind = declaration.strip()
    return ctypes.c_char_p if kind == "const char *" else _TYPES[kind]


_TEXT = HEADER.read_text()
CONSTANTS = read_constants(_TEXT)
STRUCTURES = read_structures(_TEXT)
FUNCTIONS = read_functions(_TEXT)
EXPECTED_HASH = interface_hash(HEADER.read_bytes())
