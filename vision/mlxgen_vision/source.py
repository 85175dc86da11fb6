"""Anything a picture or a video may come from, opened and identified by its content.

Opening reads and hashes; it decodes nothing. What is refused here never reaches a decoder.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MediaError
from mlxgen.inputs import MediaKind
from mlxgen_vision.fetch import fetch
from mlxgen_vision.limits import DEFAULT_LIMITS, MediaLimits, check_size
from mlxgen_vision.signature import NUM_BYTES, PICTURE_SUFFIXES, identify

_BLOCK_BYTES: Final = 1024 * 1024
_IGNORED_NAMES: Final = frozenset(("thumbs.db", "desktop.ini"))
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")

FrameData = bytes | Image.Image | np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class FrameSource:
    """One picture of a folder or list. A file is read again when its turn comes, and must still be the same."""

    source: Path | FrameData
    name: str
    source_hash: str


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A source that was read or hashed, and not decoded.

    `data` is the whole file's bytes (pictures, animations, anything given as bytes); an open binary file at position 0
    (video files: `close()` it); the PIL image or array itself; or the frames of a folder or list, in order.
    `source_hash` is the SHA-256 (hex) of the file's bytes; of the pixels with their layout for arrays and PIL images;
    of the frames' hashes for a folder or list.
    """

    data: FrameData | BinaryIO | tuple[FrameSource, ...]
    name: str
    source_hash: str

    def close(self) -> None:
        """Close the file of a video; for everything else there is nothing to close."""
        if not isinstance(self.data, bytes | tuple | np.ndarray | Image.Image):
            self.data.close()


def open_source(
    source: Any,
    *,
    kind: MediaKind = "image",
    allow_urls: bool = False,
    limits: MediaLimits = DEFAULT_LIMITS,
    cancel: CancelToken = NEVER,
) -> OpenedSource:
    """Open a path, bytes, binary file object, PIL image, array, data URI, base64 text, URL, or (video) frames.

    A string is a data URI, an address, an existing file, base64 text of a known kind of file, or else a path that
    doesn't exist. A file object is read from its beginning if it can seek, otherwise from where it stands. Lists,
    tuples and folders are frames of a video; a folder's are taken in natural order of their names (`2.png` before
    `10.png`), hidden files aside. `http(s)` addresses are opened only with `allow_urls`. Checkpoints come before each
    block of 1 MB and each frame.

    Raises `MediaError` for whatever can't be opened, is empty, or is larger than the limits.
    """
    cancel.checkpoint()
    if isinstance(source, str):
        return _open_text(source, kind, allow_urls, limits, cancel)
    if isinstance(source, os.PathLike):
        return _open_path(Path(os.fsdecode(source)), kind, limits, cancel)
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        return _opened(data, f"bytes ({len(data):,})", limits, cancel)
    if isinstance(source, Image.Image):
        name = f"PIL image ({source.mode}, {source.width}x{source.height})"
        check_size(source.width, source.height, name, limits)
        return OpenedSource(source, name, hash_image(source, cancel=cancel))
    if isinstance(source, np.ndarray):
        return OpenedSource(source, f"array {source.shape} {source.dtype}", hash_array(source))
    if isinstance(source, list | tuple):
        return _open_frames(source, kind, allow_urls, limits, cancel)
    if callable(getattr(source, "read", None)):
        return _open_file_object(source, limits, cancel)
    raise MediaError(
        f"can't read a picture or video from {type(source).__name__}; give a path, bytes, a binary file, a PIL image, "
        "a NumPy array (numpy.asarray(x) makes one), a data URI or base64 text"
    )


def is_address(source: Any) -> bool:
    """Whether opening it means waiting for a server."""
    return isinstance(source, str) and _SCHEME.match(source) is not None


def read_frame(
    frame: FrameSource, *, limits: MediaLimits = DEFAULT_LIMITS, cancel: CancelToken = NEVER
) -> OpenedSource:
    """Open one frame of a folder or list. Raises `MediaError` if its file changed since the list was opened."""
    if not isinstance(frame.source, Path):
        return OpenedSource(frame.source, frame.name, frame.source_hash)
    opened = _open_path(frame.source, "image", limits, cancel)
    if opened.source_hash != frame.source_hash:
        raise MediaError(f"{frame.name}: the file was changed while it was being read; start again with the new one")
    return opened


def hash_array(array: np.ndarray[Any, Any]) -> str:
    """SHA-256 (hex) of an array's type, shape and values in C order."""
    if array.dtype.hasobject:
        raise MediaError(f"an array of {array.dtype} isn't a picture; give uint8, uint16, bool, or float in 0..1")
    digest = hashlib.sha256(f"array {array.dtype.str} {array.shape}\n".encode())
    for row in array if array.ndim > 1 else array[None]:  # row by row: no second copy of a large array
        digest.update(np.ascontiguousarray(row).tobytes())
    return digest.hexdigest()


def hash_image(image: Image.Image, *, cancel: CancelToken = NEVER) -> str:
    """SHA-256 (hex) of a PIL image's mode, size, palette, transparency, orientation and pixels."""
    try:
        image.load()
        palette = image.getpalette("RGBA") if image.mode in ("P", "PA") else None
        about = (image.mode, image.size, palette, image.info.get("transparency"), image.getexif().get(0x0112))
        digest = hashlib.sha256(f"image {about!r}\n".encode())
        rows = max(1, _BLOCK_BYTES // image.width)
        for top in range(0, image.height, rows):  # in strips: no second copy of a large picture
            cancel.checkpoint()
            digest.update(image.crop((0, top, image.width, min(top + rows, image.height))).tobytes())
    except Exception as error:
        raise MediaError(
            f"PIL image: can't be decoded ({error or type(error).__name__}); is its file whole?"
        ) from error
    return digest.hexdigest()


def natural_key(name: str) -> tuple[Any, ...]:
    """A sort key by which `frame2` comes before `frame10`; case counts only between otherwise equal names."""
    parts = re.split(r"(\d+)", name.casefold())
    return (tuple((int(p), "") if i % 2 else (-1, p) for i, p in enumerate(parts)), name)


def _opened(data: bytes, name: str, limits: MediaLimits, cancel: CancelToken) -> OpenedSource:
    if not data:
        raise MediaError(f"{name}: empty; there is no picture in it")
    if len(data) > limits.max_source_bytes:
        raise _too_long(name, len(data), limits)
    digest = hashlib.sha256()
    view = memoryview(data)
    for start in range(0, len(data), _BLOCK_BYTES):
        cancel.checkpoint()
        digest.update(view[start : start + _BLOCK_BYTES])
    return OpenedSource(data, name, digest.hexdigest())


def _too_long(name: str, length: int, limits: MediaLimits) -> MediaError:
    return MediaError(
        f"{name}: {length:,} bytes, more than the limit of {limits.max_source_bytes:,}; give a smaller file"
    )


def _open_text(text: str, kind: MediaKind, allow_urls: bool, limits: MediaLimits, cancel: CancelToken) -> OpenedSource:
    if text[:5].casefold() == "data:":
        return _opened(_decode_data_uri(text, limits), "data URI", limits, cancel)
    scheme = _SCHEME.match(text)
    if scheme:
        if scheme[1].casefold() not in ("http", "https"):
            raise MediaError(f"{text}: addresses of kind {scheme[1]}:// can't be opened; give a path")
        if not allow_urls:
            raise MediaError(
                f"{text}: addresses aren't fetched by default; set MediaOptions(allow_urls=True) to allow it"
            )
        data = fetch(text, policy=limits.url_policy, max_bytes=limits.max_source_bytes, cancel=cancel)
        return _opened(data, text, limits, cancel)
    if not text.strip():
        raise MediaError("an empty string isn't a picture; give a path")
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    if not _exists(path):
        data = _decode_base64(text, limits)
        if data:
            return _opened(data, f"base64 text ({len(text):,} characters)", limits, cancel)
    return _open_path(path, kind, limits, cancel)


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (OSError, ValueError) as error:
        return isinstance(error, PermissionError)
    return True


def _decode_data_uri(text: str, limits: MediaLimits) -> bytes:
    header, comma, payload = text.partition(",")
    if not comma:
        raise MediaError("data URI: no comma; it should look like 'data:image/png;base64,iVBORw0…'")
    if len(payload) > 3 * limits.max_source_bytes:
        raise _too_long("data URI", len(payload), limits)
    raw = unquote_to_bytes(payload)
    if not header.casefold().endswith(";base64"):
        return raw
    try:
        return _base64_bytes(raw)
    except ValueError as error:
        raise MediaError(f"data URI: its base64 text is damaged ({error}); encode the file again") from error


def _decode_base64(text: str, limits: MediaLimits) -> bytes:
    """The bytes of base64 text, or b"" if it doesn't decode to a known kind of file (then it's somebody's path)."""
    if len(text) < 40 or len(text) > 2 * limits.max_source_bytes:
        return b""
    try:
        start = _base64_bytes("".join(text[:100].split()).encode("ascii")[:40])
    except ValueError:
        return b""
    if identify(start).category not in ("picture", "video"):
        return b""
    try:
        return _base64_bytes(text.encode("ascii"))
    except ValueError as error:
        raise MediaError(f"base64 text: damaged ({error}); encode the file again") from error


def _base64_bytes(text: bytes) -> bytes:
    """Decode standard base64; line breaks and missing `=` at the end are fine. Raises ValueError."""
    compact = b"".join(text.split())
    if not _BASE64.fullmatch(compact.decode("ascii")):
        raise ValueError("it has characters that aren't base64")
    bare = compact.rstrip(b"=")
    if len(bare) % 4 == 1:
        raise ValueError("its length is impossible: it was cut")
    try:
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _open_path(path: Path, kind: MediaKind, limits: MediaLimits, cancel: CancelToken) -> OpenedSource:
    name = str(path)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MediaError(f"{_shorten(name)}: no such file{_suggestion(path)}") from error
    except (OSError, ValueError) as error:
        raise MediaError(f"{_shorten(name)}: can't be opened ({_reason(error)})") from error
    if stat.S_ISDIR(status.st_mode):
        return _open_folder(path, kind, limits, cancel)
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{name}: neither a file nor a folder (a device or pipe); read it and give the bytes")
    if not status.st_size:
        raise MediaError(f"{name}: an empty file (0 bytes); was it copied or downloaded completely?")
    try:
        file = open(path, "rb")  # noqa: SIM115  a video's stays open in what is returned
    except OSError as error:
        raise MediaError(f"{name}: can't be opened ({_reason(error)})") from error
    try:
        head = file.read(NUM_BYTES)
        file.seek(0)
        if kind == "video" and identify(head).category != "picture":
            digest = hashlib.sha256()
            for block in _blocks(file, cancel):
                digest.update(block)
            file.seek(0)
            return OpenedSource(file, name, digest.hexdigest())
        with closing(file):
            if status.st_size > limits.max_source_bytes:
                raise _too_long(name, status.st_size, limits)
            return _opened(_read_all(file, name, limits, cancel), name, limits, cancel)
    except OSError as error:
        file.close()
        raise MediaError(f"{name}: can't be read ({_reason(error)})") from error
    except BaseException:
        file.close()
        raise


def _blocks(file: BinaryIO, cancel: CancelToken) -> Iterator[bytes]:
    while True:
        cancel.checkpoint()
        block = file.read(_BLOCK_BYTES)
        if not block:
            return
        yield block


def _read_all(file: BinaryIO, name: str, limits: MediaLimits, cancel: CancelToken) -> bytes:
    data = bytearray()
    for block in _blocks(file, cancel):
        if not isinstance(block, bytes):
            raise MediaError(f"{name}: gives {type(block).__name__}, not bytes; open the file in binary mode ('rb')")
        data += block
        if len(data) > limits.max_source_bytes:
            raise _too_long(name, len(data), limits)
    return bytes(data)


def _open_file_object(file: Any, limits: MediaLimits, cancel: CancelToken) -> OpenedSource:
    given = getattr(file, "name", None)
    name = given if isinstance(given, str) else f"file object ({type(file).__name__})"
    try:
        seekable = getattr(file, "seekable", None)
        if callable(seekable) and seekable():
            file.seek(0)
        data = _read_all(file, name, limits, cancel)
    except MediaError:
        raise
    except (OSError, ValueError) as error:
        raise MediaError(f"{name}: can't be read ({_reason(error)})") from error
    return _opened(data, name, limits, cancel)


def _open_frames(
    sources: Sequence[Any], kind: MediaKind, allow_urls: bool, limits: MediaLimits, cancel: CancelToken
) -> OpenedSource:
    if kind == "image":
        raise MediaError(
            f"a {type(sources).__name__} of {len(sources)} isn't a picture; give each as an image of its own"
        )
    frames = []
    for index, source in enumerate(sources):
        cancel.checkpoint()
        if isinstance(source, list | tuple):
            raise MediaError(f"frame {index} is a {type(source).__name__}; give a flat list of pictures")
        opened = open_source(source, kind="image", allow_urls=allow_urls, limits=limits, cancel=cancel)
        assert isinstance(opened.data, bytes | Image.Image | np.ndarray)
        reopened = Path(os.fsdecode(source)).expanduser() if _is_path(source, opened) else opened.data
        frames.append(FrameSource(reopened, f"frame {index} ({opened.name})", opened.source_hash))
    if not frames:
        raise MediaError("an empty list of frames; a video needs at least one")
    return OpenedSource(tuple(frames), f"list of {len(frames)} frames", _combined(frames))


def _is_path(source: Any, opened: OpenedSource) -> bool:
    if isinstance(source, str):
        return _exists(Path(source).expanduser()) and opened.name == str(Path(source).expanduser())
    return isinstance(source, os.PathLike)


def _open_folder(path: Path, kind: MediaKind, limits: MediaLimits, cancel: CancelToken) -> OpenedSource:
    try:
        names = [n for n in os.listdir(path) if not n.startswith(".") and n.casefold() not in _IGNORED_NAMES]
    except OSError as error:
        raise MediaError(f"{path}: the folder can't be read ({_reason(error)})") from error
    names.sort(key=natural_key)
    pictures = [n for n in names if Path(n).suffix.casefold() in PICTURE_SUFFIXES]
    if kind == "image":
        inside = (
            f"give one of its pictures ('{pictures[0]}' …)" if pictures else "it has no pictures in it; give a file"
        )
        raise MediaError(
            f"{path}: a folder, not a picture; {inside}" + (", or the folder as a video" if pictures else "")
        )
    if not names:
        raise MediaError(f"{path}: an empty folder; a video needs at least one frame")
    if len(pictures) < len(names):
        other = next(n for n in names if Path(n).suffix.casefold() not in PICTURE_SUFFIXES)
        raise MediaError(f"{path}: '{other}' in the folder isn't a picture; keep only the frames of the video in it")
    frames = []
    for name in names:
        opened = _open_path(path / name, "image", limits, cancel)
        frames.append(FrameSource(path / name, opened.name, opened.source_hash))
    return OpenedSource(tuple(frames), str(path), _combined(frames))


def _combined(frames: Sequence[FrameSource]) -> str:
    digest = hashlib.sha256(b"frames\n")
    for frame in frames:
        digest.update(bytes.fromhex(frame.source_hash))
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _shorten(name: str) -> str:
    return name if len(name) <= 300 else f"{name[:120]}… ({len(name):,} characters)"


def _suggestion(path: Path) -> str:
    """What to add after "no such file": the folder that is missing, the closest name that exists."""
    missing = path
    while not missing.parent.is_dir() and missing.parent != missing:
        missing = missing.parent
    where = "" if missing == path else f" (there is no folder {_shorten(missing.name)!r} in {str(missing.parent)!r})"
    try:
        by_fold = {name.casefold(): name for name in sorted(os.listdir(missing.parent))}
    except OSError:
        by_fold = {}
    close = difflib.get_close_matches(missing.name.casefold(), by_fold, n=1, cutoff=0.6)
    if close:
        return f"{where}; did you mean {str(missing.parent / by_fold[close[0]])!r}?"
    return f"{where}; check the path"
