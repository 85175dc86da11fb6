"""The manifest of one generation: which files make it up, their hashes, and how much of the journal they go with.

It is one JSON object on one line whose last key, `xxh3`, is the hash of everything before it, so that the file is
valid JSON for any tool and a flipped bit anywhere in it is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import xxhash

from mlxgen.errors import InvalidValueError
from mlxgen.snapshot import jsontext
from mlxgen.snapshot.journal import MAX_JOURNAL_BYTES, JournalPin

SCHEMA_MAJOR: Final = 1
SCHEMA_MINOR: Final = 0
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_DATA_FILE_BYTES: Final = 16 << 30
MAX_FILES: Final = 100_000

MANIFEST_NAME: Final = re.compile(r"manifest-([0-9]{6,12})\.json")
DATA_NAME: Final = re.compile(r"([a-z][a-z0-9_]{0,31})-([0-9]{3,12})\.safetensors")
KIND: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")

_T = TypeVar("_T")
_FORMAT: Final = "mlxgen-snapshot"
_HEX128: Final = re.compile(r"[0-9a-f]{32}")
_TAIL: Final = re.compile(rb',"xxh3":"([0-9a-f]{32})"\}\n')
_TAIL_BYTES: Final = len(',"xxh3":""}\n') + 32


class ManifestError(ValueError):
    """A manifest that isn't one. Callers turn it into a reason for falling back."""


class UnknownSchemaError(ManifestError):
    """A manifest of a major version this code doesn't know. `certain` is false when its hash doesn't hold either."""

    def __init__(self, message: str, *, certain: bool) -> None:
        super().__init__(message)
        self.certain = certain


@dataclass(frozen=True)
class FileEntry:
    """One immutable data file: its name in the folder, size, xxh3_128 (hex), kind, and its owner's small JSON notes."""

    name: str
    bytes: int
    xxh3: str
    kind: str
    meta: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """One generation. `body` is what the layer above keeps here; `pin` is the part of the journal it goes with."""

    generation: int
    journal_id: str
    pin: JournalPin
    files: tuple[FileEntry, ...]
    body: dict[str, Any]
    schema: tuple[int, int] = (SCHEMA_MAJOR, SCHEMA_MINOR)

    def of_kind(self, kind: str) -> list[FileEntry]:
        """The files of one kind, in the order they were committed in."""
        return [entry for entry in self.files if entry.kind == kind]


def manifest_name(generation: int) -> str:
    """`manifest-000007.json`."""
    name = f"manifest-{generation:06d}.json"
    if not MANIFEST_NAME.fullmatch(name):
        raise InvalidValueError(f"generation {generation} is over the limit of 12 digits; begin a new snapshot")
    return name


def data_name(kind: str, number: int) -> str:
    """`kv-000003.safetensors`; three digits for `prep`, six otherwise, more when they run out."""
    if not KIND.fullmatch(kind):
        raise InvalidValueError(f"file kind {kind!r}; use a-z, 0-9 and _, beginning with a letter, at most 32")
    name = f"{kind}-{number:0{3 if kind == 'prep' else 6}d}.safetensors"
    if not DATA_NAME.fullmatch(name):
        raise InvalidValueError(f"file number {number} is over the limit of 12 digits; begin a new snapshot")
    return name


def encode(manifest: Manifest) -> bytes:
    """The file's bytes; equal manifests give equal bytes. Raises `InvalidValueError` over a limit."""
    pin = manifest.pin
    files = [
        {"name": entry.name, "bytes": entry.bytes, "xxh3": entry.xxh3, "kind": entry.kind, "meta": entry.meta}
        for entry in manifest.files
    ]
    value = {
        "format": _FORMAT,
        "schema": {"major": manifest.schema[0], "minor": manifest.schema[1]},
        "generation": manifest.generation,
        "journal": {
            "id": manifest.journal_id,
            "bytes": pin.length,
            "xxh3": pin.xxh3,
            "records": pin.num_records,
        },
        "files": files,
        "body": manifest.body,
    }
    head = jsontext.encode(value)[:-1]
    data = head + b',"xxh3":"%b"}\n' % xxhash.xxh3_128(head).hexdigest().encode()
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidValueError(
            f"a manifest of {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}; keep its body small"
        )
    return data


def decode(data: memoryview, generation: int) -> Manifest:
    """Read and check a manifest named for this generation. Raises `ManifestError`.

    Unknown keys and minor versions are accepted; an unknown major version is an `UnknownSchemaError`.
    """
    raw = bytes(data)
    tail = _TAIL.fullmatch(raw, max(len(raw) - _TAIL_BYTES, 0))
    intact = tail is not None and tail[1] == xxhash.xxh3_128(raw[:-_TAIL_BYTES]).hexdigest().encode()
    try:
        value = jsontext.decode(raw, unique_keys=True)
    except jsontext.JsonTextError as exc:
        raise ManifestError(f"it isn't strict JSON: {exc}") from exc
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise ManifestError("it isn't a manifest of mlxgen")
    schema = _get(value, "schema", dict)
    major, minor = _count(schema, "major"), _count(schema, "minor")
    if major != SCHEMA_MAJOR:
        message = f"it has schema {major}.{minor}, this version of mlxgen reads {SCHEMA_MAJOR}.x"
        raise UnknownSchemaError(message, certain=intact)
    if not intact:
        raise ManifestError("it fails its own hash")
    if _count(value, "generation") != generation:
        raise ManifestError(f"it is generation {value['generation']} under the name of {generation}")
    journal = _get(value, "journal", dict)
    pin = JournalPin(_count(journal, "bytes", MAX_JOURNAL_BYTES), _hex128(journal, "xxh3"), _count(journal, "records"))
    files = _get(value, "files", list)
    if len(files) > MAX_FILES:
        raise ManifestError(f"it names {len(files)} files, the limit is {MAX_FILES}")
    entries = tuple(_entry(item) for item in files)
    if len({entry.name for entry in entries}) != len(entries):
        raise ManifestError("it names a file twice")
    body = _get(value, "body", dict)
    return Manifest(generation, _hex128(journal, "id"), pin, entries, body, (major, minor))


def check_entry(entry: FileEntry) -> None:
    """Raise `ManifestError` unless the entry could stand in a manifest."""
    found = DATA_NAME.fullmatch(entry.name)
    if found is None or found[1] != entry.kind:
        raise ManifestError(f"the file name {entry.name!r} of kind {entry.kind!r} isn't KIND-NUMBER.safetensors")
    if type(entry.bytes) is not int or not 0 <= entry.bytes <= MAX_DATA_FILE_BYTES:
        raise ManifestError(f"{entry.name} of {entry.bytes!r} bytes, the limit is {MAX_DATA_FILE_BYTES}")


def _entry(item: Any) -> FileEntry:
    if not isinstance(item, dict):
        raise ManifestError("an entry of files isn't an object")
    meta = _get(item, "meta", dict) if "meta" in item else {}
    entry = FileEntry(
        _get(item, "name", str), _count(item, "bytes"), _hex128(item, "xxh3"), _get(item, "kind", str), meta
    )
    check_entry(entry)
    return entry


def _get(found: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    value = found.get(key)
    if type(value) is not kind:
        raise ManifestError(f"{key} is {value!r:.60}, not of type {kind.__name__}")
    return value


def _count(found: Mapping[str, Any], key: str, limit: int = 2**62) -> int:
    value = _get(found, key, int)
    if not 0 <= value <= limit:
        raise ManifestError(f"{key} is {value}, outside 0 to {limit}")
    return value


def _hex128(found: Mapping[str, Any], key: str) -> str:
    value = _get(found, key, str)
    if not _HEX128.fullmatch(value):
        raise ManifestError(f"{key} is {value!r:.60}, not 32 hex digits")
    return value
