"""What a file is, by its first bytes: names and suffixes are not to be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

NUM_BYTES: Final = 512

PICTURE_FORMATS: Final = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIC")
PICTURE_SUFFIXES: Final = frozenset(
    (".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff")
    + (".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".avif", ".heic", ".heif")
)

TRANSPORT_STREAM: Final = "an MPEG transport stream"

Category = Literal["picture", "video", "audio", "text", "other", "unknown", "empty"]


@dataclass(frozen=True, slots=True)
class Signature:
    """`name` is a picture's format (one of `PICTURE_FORMATS`), or words for a message ("a PDF document")."""

    category: Category
    name: str


_OTHER: Final[tuple[tuple[bytes, Category, str], ...]] = (
    (b"%PDF", "other", "a PDF document (render its pages to PNG first)"),
    (b"PK\x03\x04", "other", "a ZIP archive or office document"),
    (b"\x1f\x8b", "other", "a gzip archive"),
    (b"8BPS", "other", "a Photoshop document"),
    (b"\x00\x00\x01\x00", "other", "an ICO icon"),
    (b"\x00\x00\x02\x00", "other", "a cursor"),
    (b"\x00\x00\x00\x0cjP  ", "other", "a JPEG 2000 picture"),
    (b"\xff\x4f\xff\x51", "other", "a JPEG 2000 picture"),
    (b"\xff\x0a", "other", "a JPEG XL picture"),
    (b"\x00\x00\x00\x0cJXL ", "other", "a JPEG XL picture"),
    (b"icns", "other", "an Apple icon"),
    (b"qoif", "other", "a QOI picture"),
    (b"DDS ", "other", "a DDS texture"),
    (b"%!PS", "other", "a PostScript document"),
    (b"\x7fELF", "other", "a program"),
    (b"version https://git-lfs", "other", "a Git LFS pointer, not the file itself (run `git lfs pull`)"),
    (b"\x1aE\xdf\xa3", "video", "a Matroska or WebM video"),
    (b"FLV\x01", "video", "a Flash video"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "video", "a Windows Media video"),
    (b"\x00\x00\x01\xba", "video", "an MPEG video"),
    (b"\x00\x00\x01\xb3", "video", "an MPEG video"),
    (b"DKIF", "video", "an IVF video"),
    (b"OggS", "video", "an Ogg file"),
    (b"ID3", "audio", "an MP3 sound"),
    (b"fLaC", "audio", "a FLAC sound"),
)
_HEIC_BRANDS: Final = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"))
_AVIF_BRANDS: Final = frozenset((b"avif", b"avis"))
_ISO_BOXES: Final = frozenset((b"moov", b"mdat", b"free", b"wide", b"skip", b"pnot"))
_BMP_HEADER_SIZES: Final = frozenset((12, 16, 40, 52, 56, 64, 108, 124))


def identify(head: bytes) -> Signature:
    """Say what the first `NUM_BYTES` bytes of a file (fewer if it is shorter) belong to."""
    if not head:
        return Signature("empty", "empty")
    picture = _picture(head)
    if picture is not None:
        return Signature("picture", picture)
    for magic, category, name in _OTHER:
        if head.startswith(magic):
            return Signature(category, name)
    if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"WAVE"):
        return Signature("video", "an AVI video") if head[8:12] == b"AVI " else Signature("audio", "a WAVE sound")
    if head[4:8] == b"ftyp" or head[4:8] in _ISO_BOXES:
        return Signature("video", "an MP4 or QuickTime video")
    if head[:1] == b"\x47" and head[188:189] == b"\x47":
        return Signature("video", TRANSPORT_STREAM)
    return _text(head) or Signature("unknown", "of an unknown kind")


def _picture(head: bytes) -> str | None:
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head[:4] in (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"):
        return "TIFF" if head[8:10] != b"CR" else None
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADER_SIZES:
        return "BMP"
    if head[:1] == b"P" and head[1:2] in b"123456f" and head[2:3] in (b" ", b"\t", b"\r", b"\n", b"#"):
        return "PPM"
    if head[4:8] == b"ftyp":
        length = min(int.from_bytes(head[:4], "big"), len(head))
        brands = {head[8:12]} | {head[at : at + 4] for at in range(16, length - 3, 4)}
        if brands & _AVIF_BRANDS:
            return "AVIF"
        if brands & _HEIC_BRANDS or head[8:12] in (b"mif1", b"msf1"):
            return "HEIC"
    return None


def _text(head: bytes) -> Signature | None:
    if b"\x00" in head:
        return None
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # otherwise only the last character is cut
            return None
        text = head[: error.start].decode("utf-8")
    if not text or not all(c.isprintable() or c in "\r\n\t\f\ufeff" for c in text):
        return None
    start = text.lstrip("\ufeff \r\n\t").casefold()
    if start.startswith("<svg") or (start.startswith("<?xml") and "<svg" in start):
        return Signature("other", "an SVG drawing (render it to PNG first)")
    if start.startswith(("<!doctype html", "<html")):
        return Signature("text", "a web page (HTML)")
    return Signature("text", f"text that starts {text[:24]!r}")
