from __future__ import annotations

import hashlib
import io
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlxgen_vision.contact_sheet import contact_sheet
from mlxgen_vision.image import bounded_size, load_image, resize
from mlxgen_vision.limits import MediaLimits
from PIL import Image
from vision_input.inputs import encoded, pattern, png, quarters

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import InvalidValueError, MediaError
from mlxgen.request import MediaOptions

PLAIN = MediaOptions()

# The transposition that undoes being stored with each EXIF orientation is the orientation's own; this is its inverse.
STORED_AS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def stored(upright: np.ndarray[Any, Any], orientation: int) -> tuple[Image.Image, Image.Exif]:
    image = Image.fromarray(upright)
    turn = STORED_AS[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return (image if turn is None else image.transpose(turn)), exif


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_exif_orientation_of_every_kind_of_source(tmp_path: Any, orientation: int, kind: str) -> None:
    upright = quarters(32, 48)
    image, exif = stored(upright, orientation)
    options: dict[str, Any] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    data = encoded(image, kind, exif=exif, **options)
    path = tmp_path / f"picture.{kind.lower()}"
    path.write_bytes(data)
    reopened = Image.open(io.BytesIO(data))
    for source in (path, str(path), data, io.BytesIO(data), reopened):
        loaded = load_image(source, PLAIN)
        assert loaded.original_size == (32, 48)
        assert np.abs(loaded.rgb.astype(int) - upright).max() <= (3 if kind == "JPEG" else 0), type(source)
    decoded = np.asarray(image)  # an array has no orientation: taken as it is
    assert (load_image(decoded, PLAIN).rgb == decoded).all()


def test_undefined_orientations_and_damaged_exif_leave_the_picture_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    data = encoded(pattern(8, 12), "PNG", exif=exif)
    assert (load_image(data, PLAIN).rgb == pattern(8, 12)).all()


def test_transparent_pixels_become_white_whatever_colour_they_have() -> None:
    rgba = np.zeros((2, 3, 4), np.uint8)  # black, as the text that must not show through
    rgba[0, 0] = (10, 20, 30, 255)
    rgba[1, 1] = (0, 0, 0, 51)  # a fifth
    expected = np.full((2, 3, 3), 255, np.uint8)
    expected[0, 0], expected[1, 1] = (10, 20, 30), (204, 204, 204)
    image = Image.fromarray(rgba)
    for source in (rgba, image, encoded(image, "PNG"), encoded(image, "WEBP", lossless=True, exact=True)):
        assert (load_image(source, PLAIN).rgb == expected).all()
    assert (load_image(rgba.astype(np.float32) / 255, PLAIN).rgb == expected).all()


def test_palette_with_transparency() -> None:
    image = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8)).convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for transparency, second in ((1, (255, 255, 255)), (bytes([255, 0, 255]), (255, 255, 255)), (None, (0, 255, 0))):
        options = {} if transparency is None else {"transparency": transparency}
        rgb = load_image(encoded(image, "PNG", **options), PLAIN).rgb
        assert tuple(rgb[0, 1]) == second
        assert tuple(rgb[0, 0]) == (255, 0, 0)
        assert tuple(rgb[1, 0]) == (0, 0, 255)


def test_grey_with_alpha_and_one_colour_transparency() -> None:
    la = Image.merge("LA", (Image.new("L", (2, 1), 40), Image.fromarray(np.array([[255, 0]], np.uint8))))
    for source in (la, encoded(la, "PNG")):
        assert load_image(source, PLAIN).rgb[0, :, 0].tolist() == [40, 255]
    grey = Image.fromarray(np.array([[7, 8]], np.uint8))
    assert load_image(encoded(grey, "PNG", transparency=8), PLAIN).rgb[0, :, 0].tolist() == [7, 255]
    rgb = Image.fromarray(np.array([[(1, 2, 3), (1, 2, 4)]], np.uint8))
    assert load_image(encoded(rgb, "PNG", transparency=(1, 2, 3)), PLAIN).rgb[0, :, 1].tolist() == [255, 2]


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    gradient = np.linspace(0, 65535, 256 * 8).astype(np.uint16).reshape(8, 256)
    expected = np.rint(gradient * 255.0 / 65535).astype(np.uint8)
    image = Image.fromarray(gradient)
    assert image.mode == "I;16"
    sources = [image, gradient, gradient.astype(">u2"), encoded(image, "PNG"), encoded(image, "TIFF")]
    sources.append(Image.fromarray(gradient.astype(np.int32)))
    sources.append(b"P5 256 8 65535\n" + gradient.astype(">u2").tobytes())
    for source in sources:
        assert (load_image(source, PLAIN).rgb == expected[:, :, None]).all()
    assert "0..65535" in str(load_image(Image.fromarray(gradient.astype(np.int32)), PLAIN).note)


def test_sixteen_bit_colour_and_transparent_grey() -> None:
    values = np.array([[[0, 30000, 65535], [257, 256, 40000]]], np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    rgb = load_image(png(2, 1, 16, 2, rows), PLAIN).rgb
    assert np.abs(rgb.astype(int) - np.rint(values * 255.0 / 65535)).max() <= 1
    grey = np.array([[1000, 60000]], np.uint16)
    data = png(2, 1, 16, 0, b"\0" + grey.astype(">u2").tobytes(), (b"tRNS", (1000).to_bytes(2, "big")))
    assert load_image(data, PLAIN).rgb[0, :, 0].tolist() == [255, 233]


def test_floating_point_pixels() -> None:
    unit = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    expected = np.rint(unit * 255).astype(np.uint8)
    for source in (unit, unit.astype(np.float64), unit.astype(np.float16), Image.fromarray(unit)):
        assert np.abs(load_image(source, PLAIN).rgb[:, :, 0].astype(int) - expected).max() <= (source is not unit)
    for wrong in (unit * 255, unit - 0.1, np.where(unit > 0.5, np.nan, unit), unit + np.inf):
        for source in (wrong, Image.fromarray(wrong.astype(np.float32))):
            with pytest.raises(MediaError, match=r"outside 0\.\.1"):
                load_image(source, PLAIN)


def test_other_colour_modes() -> None:
    rgb = Image.fromarray(quarters(8, 8))
    one_bit = rgb.convert("1")
    assert set(np.unique(load_image(encoded(one_bit, "PNG"), PLAIN).rgb)) <= {0, 255}
    images = {mode: rgb.convert(mode) for mode in ("CMYK", "YCbCr", "HSV", "RGBX")}
    images |= {"RGBa": rgb.convert("RGBA").convert("RGBa"), "La": rgb.convert("LA").convert("La")}
    images |= {"PA": rgb.quantize(8).convert("PA"), "P": rgb.quantize(8)}
    for mode, image in images.items():
        assert image.mode == mode
        reference = rgb.convert("L").convert("RGB") if mode == "La" else rgb
        found = load_image(image, PLAIN).rgb.astype(int)
        assert np.abs(found - np.asarray(reference)).max() <= 4, mode
    for data in (encoded(rgb.convert("CMYK"), "JPEG", quality=100), encoded(rgb.convert("CMYK"), "TIFF")):
        assert np.abs(load_image(data, PLAIN).rgb.astype(int) - quarters(8, 8)).mean() < 4


def test_lab_is_converted_with_its_white_point() -> None:
    lab = Image.new("LAB", (2, 2), (136, 128 + 80, 128 + 67))  # about (53.2, 80, 67): the red of sRGB
    red = load_image(lab, PLAIN).rgb[0, 0].astype(int)
    assert red[0] > 245
    assert red[1] < 40
    assert red[2] < 40


def test_arrays_of_every_shape_and_wrong_ones() -> None:
    rgb = pattern(4, 6)
    assert (load_image(rgb, PLAIN).rgb == rgb).all()
    assert (load_image(rgb[::-1, ::-1], PLAIN).rgb == rgb[::-1, ::-1]).all()
    assert (load_image(rgb[:, :, :1], PLAIN).rgb == rgb[:, :, :1]).all()
    assert (load_image(rgb[:, :, 0], PLAIN).rgb == rgb[:, :, :1]).all()
    assert load_image(rgb > 100, PLAIN).rgb[0, 3].tolist() == [255, 0, 255]
    wrong = [np.zeros(5, np.uint8), np.zeros((3, 9, 9), np.uint8), np.zeros((4, 4, 2), np.uint8), rgb[None]]
    wrong += [rgb.astype(np.int64), np.zeros((0, 4, 3), np.uint8), np.zeros((2, 2), object), np.zeros((2, 2), complex)]
    for source in wrong:
        with pytest.raises(MediaError):
            load_image(source, PLAIN)
    with pytest.raises(MediaError, match="moveaxis"):
        load_image(np.zeros((3, 20, 30), np.uint8), PLAIN)


def test_the_source_array_is_not_shared() -> None:
    rgb = pattern(4, 6)
    loaded = load_image(rgb, PLAIN).rgb
    loaded[:] = 0
    assert rgb.any()


@pytest.mark.parametrize(("height", "width"), [(8, 2000), (1, 1), (2000, 8)])
def test_extreme_shapes(height: int, width: int) -> None:
    loaded = load_image(encoded(pattern(height, width), "PNG"), PLAIN)
    assert (loaded.rgb == pattern(height, width)).all()
    smaller = load_image(pattern(height, width), MediaOptions(max_image_size=1000, max_pixels=5000)).rgb
    assert smaller.shape[0] * smaller.shape[1] <= 5000
    assert max(smaller.shape) <= 1000


def _lying_files() -> dict[str, bytes]:
    side = 20_000
    vp8x = b"VP8X" + (10).to_bytes(4, "little") + b"\0\0\0\0" + (16382).to_bytes(3, "little") * 2
    gif = bytearray(encoded(pattern(8, 8), "GIF"))
    gif[6:10] = (20_000).to_bytes(2, "little") * 2
    bmp = bytearray(encoded(pattern(8, 8), "BMP"))
    bmp[18:26] = side.to_bytes(4, "little") * 2
    tiff = encoded(pattern(8, 8), "TIFF")
    for tag in (256, 257):  # width and height, one 16- or 32-bit value each
        at = max(tiff.find(struct.pack("<HHII", tag, kind, 1, 8)) for kind in (3, 4))
        tiff = tiff[:at] + struct.pack("<HHII", tag, 4, 1, side) + tiff[at + 12 :]
    return {
        "PNG": png(side, side, 8, 2, bytes(6000)),
        "WebP": b"RIFF" + (6000).to_bytes(4, "little") + b"WEBP" + vp8x + bytes(5970),
        "GIF": bytes(gif),
        "BMP": bytes(bmp),
        "PPM": b"P6 20000 20000 255\n" + bytes(6000),
        "TIFF": tiff,
    }


@pytest.mark.parametrize("kind", ["PNG", "WebP", "GIF", "BMP", "PPM", "TIFF"])
def test_a_small_file_that_claims_to_be_huge_is_refused_at_once(kind: str) -> None:
    data = _lying_files()[kind]
    started = time.perf_counter()
    with pytest.raises(MediaError, match=r"claims .* more than the limit of 178,956,970"):
        load_image(data, PLAIN)
    assert time.perf_counter() - started < 0.1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc for the peak of memory")
def test_refusing_huge_claims_takes_no_memory(tmp_path: Any) -> None:
    for kind in ("PNG", "WebP", "GIF", "BMP", "PPM", "TIFF"):
        (tmp_path / kind).write_bytes(_lying_files()[kind])
    code = (
        "import sys, numpy\n"
        "from mlxgen.errors import MediaError\n"
        "from mlxgen.request import MediaOptions\n"
        "from mlxgen_vision.image import load_image\n"
        "from vision_input.inputs import resident_bytes\n"
        "load_image(numpy.zeros((8, 8, 3), numpy.uint8), MediaOptions())\n"
        "before = resident_bytes()\n"
        "for path in sys.argv[1:]:\n"
        "    try: load_image(path, MediaOptions())\n"
        "    except MediaError: continue\n"
        "    raise SystemExit(f'{path} was not refused')\n"
        "grown = resident_bytes() - before\n"
        "raise SystemExit(f'{grown:,} bytes' if grown > 20_000_000 else 0)\n"
    )
    folder = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n" + code, *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc for the peak of memory")
def test_many_large_pictures_take_the_memory_of_one(tmp_path: Path) -> None:
    """12 megapixels are 48 MB in Pillow and 36 MB as an array; five of them kept would be more than 180 MB."""
    path = tmp_path / "large.jpg"
    Image.new("RGB", (4000, 3000), (10, 200, 30)).save(path)
    code = (
        "import sys, numpy\n"
        "from mlxgen.request import MediaOptions\n"
        "from mlxgen_vision.image import load_image\n"
        "from vision_input.inputs import resident_bytes\n"
        "load_image(numpy.zeros((8, 8, 3), numpy.uint8), MediaOptions())\n"
        "before = resident_bytes()\n"
        "for _ in range(5):\n"
        "    small = load_image(sys.argv[1], MediaOptions(max_image_size=400)).rgb\n"
        "    assert small.shape == (300, 400, 3)\n"
        "grown = resident_bytes() - before\n"
        "raise SystemExit(f'{grown:,} bytes' if grown > 170_000_000 else 0)\n"
    )
    folder = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n" + code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_limit_can_be_lowered() -> None:
    limits = MediaLimits(max_source_pixels=100)
    load_image(pattern(10, 10), PLAIN, limits=limits)
    for source in (pattern(10, 11), encoded(pattern(10, 11), "PNG"), Image.fromarray(pattern(10, 11))):
        with pytest.raises(MediaError, match="more than the limit of 100"):
            load_image(source, PLAIN, limits=limits)


@pytest.mark.slow
def test_96_megapixels_are_loaded() -> None:
    white = encoded(Image.new("1", (12_000, 8_000), 1), "PNG")
    loaded = load_image(white, MediaOptions(max_image_size=600))
    assert loaded.original_size == (8_000, 12_000)
    assert loaded.rgb.shape == (400, 600, 3)
    assert (loaded.rgb == 255).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_half_a_file_is_one_clear_error(tmp_path: Any, kind: str) -> None:
    rng = np.random.default_rng(0)
    data = encoded(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), kind)
    path = tmp_path / "half.jpg"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(MediaError, match="truncated or damaged") as caught:
        load_image(path, PLAIN)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_cut_of_a_file_is_a_picture_or_a_media_error() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        data = encoded(pattern(6, 7), kind)
        for length in range(0, len(data), 3):
            try:
                load_image(data[:length], PLAIN)
            except MediaError:
                continue


def test_an_animation_as_an_image_is_its_first_frame_and_says_so() -> None:
    frames = [Image.new("RGB", (6, 4), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        options: dict[str, Any] = {} if kind == "TIFF" else {"duration": 100}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        loaded = load_image(data, PLAIN)
        assert loaded.rgb[0, 0, 0] > 240
        assert "first" in str(loaded.note)
        assert "video" in str(loaded.note)
    assert load_image(encoded(frames[0], "GIF"), PLAIN).note is None
    assert load_image(encoded(frames[0], "PNG"), PLAIN).note is None


def test_source_hash_is_of_the_bytes_and_of_the_pixels(tmp_path: Any) -> None:
    data = encoded(pattern(5, 6), "PNG")
    (tmp_path / "a.png").write_bytes(data)
    expected = hashlib.sha256(data).hexdigest()
    for source in (data, tmp_path / "a.png", io.BytesIO(data)):
        assert load_image(source, PLAIN).source_hash == expected
    one, other = pattern(5, 6), pattern(5, 6)
    other[0, 0, 0] ^= 1
    assert load_image(one, PLAIN).source_hash == load_image(one.copy(), PLAIN).source_hash
    assert load_image(one, PLAIN).source_hash != load_image(other, PLAIN).source_hash
    assert load_image(one.reshape(6, 5, 3), PLAIN).source_hash != load_image(one, PLAIN).source_hash
    images = [Image.fromarray(one), Image.fromarray(other), Image.fromarray(one).convert("RGBA")]
    assert len({load_image(image, PLAIN).source_hash for image in images}) == 3


def test_a_cancelled_token_stops_before_anything_is_read() -> None:
    token = CancelToken()
    token.cancel()

    class Untouchable:
        def read(self, size: int = -1) -> bytes:
            raise AssertionError("was read")

    with pytest.raises(Cancelled):
        load_image(Untouchable(), PLAIN, cancel=token)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (MediaOptions(), (300, 400)),
        (MediaOptions(max_image_size=400), (300, 400)),
        (MediaOptions(max_image_size=200), (150, 200)),
        (MediaOptions(max_pixels=30_000), (150, 200)),
        (MediaOptions(max_pixels=29_999), (149, 199)),
        (MediaOptions(min_pixels=480_000), (600, 800)),
        (MediaOptions(min_pixels=480_000, max_image_size=500), (375, 500)),
        (MediaOptions(max_pixels=1), (1, 1)),
    ],
)
def test_bounds_on_size(options: MediaOptions, expected: tuple[int, int]) -> None:
    assert bounded_size((300, 400), options) == expected
    loaded = load_image(pattern(300, 400), options)
    assert loaded.rgb.shape[:2] == expected
    assert loaded.original_size == (300, 400)


def test_impossible_options_are_refused() -> None:
    bad = [{"max_pixels": 0}, {"max_image_size": -1}, {"fps": 0.0}, {"fps": float("nan")}, {"max_frames": 0}]
    bad += [{"min_pixels": 10, "max_pixels": 5}, {"max_pixels": 1.5}]
    for options in bad:
        with pytest.raises(InvalidValueError):
            load_image(pattern(4, 4), MediaOptions(**options))  # type: ignore[arg-type]


# Of Pillow 12.3.0's Image.resize on the same pictures; Pillow 13 gives others where the height shrinks more.
PILLOW_12 = {
    ("bicubic", (90, 40), (20, 33)): "976e01b55c2afef7",
    ("bicubic", (64, 48), (28, 28)): "8c762869e3d38e05",
    ("bicubic", (16, 20), (41, 50)): "a08f57af5de203ae",
    ("bicubic", (300, 20), (30, 18)): "6bc43e92657d281f",
    ("bilinear", (90, 40), (20, 33)): "7e709449b78b0f7e",
    ("bilinear", (300, 20), (30, 18)): "0a2b27ce0ab8eb62",
    ("lanczos", (90, 40), (20, 33)): "e05f722afb6bbc2d",
    ("lanczos", (300, 20), (30, 18)): "ce99f33b210266a5",
    ("nearest", (90, 40), (20, 33)): "f3cf827e49903438",
}


@pytest.mark.parametrize("case", PILLOW_12)
def test_resize_rounds_as_the_models_were_trained(case: Any) -> None:
    resample, source, target = case
    out = resize(pattern(*source), target, resample)
    assert out.shape == (*target, 3)
    assert hashlib.sha256(out.tobytes()).hexdigest()[:16] == PILLOW_12[case]


def test_resize_refuses_what_it_cannot_do() -> None:
    with pytest.raises(InvalidValueError):
        resize(pattern(4, 4), (0, 4), "bicubic")
    with pytest.raises(InvalidValueError):
        resize(pattern(4, 4), (4, 4), "box")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError):
        resize(pattern(4, 4).astype(np.float32), (4, 4), "bicubic")


def test_contact_sheet_shows_every_picture_in_order() -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    images = [np.full((30, 40, 3), colour, np.uint8) for colour in colours]
    sheet = np.asarray(contact_sheet(images, ["one", "two " * 50, "three"], cell=64))
    found = [tuple(int(v) for v in sheet[y, x]) for y, x in ((40, 40), (40, 112), (128, 40))]
    assert found == colours
    assert (sheet[72:90] < 128).all(axis=2).any()  # captions are drawn
    with pytest.raises(InvalidValueError):
        contact_sheet(images, ["one"])
    with pytest.raises(InvalidValueError):
        contact_sheet([], [])
