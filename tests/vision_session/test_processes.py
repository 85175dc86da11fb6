"""Other processes: resuming in a new one, kills among the pictures, and how much memory and time a unit takes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np
import pytest
from harness import Outcome, StopAt
from PIL import Image
from vision_harness import tiny_vlm
from vision_harness.jobs import Counts, counting, job, model, new_session, pixels, remove_prepared, reply, sources

from mlxgen.cancellation import CancelToken
from mlxgen.errors import MediaError
from mlxgen.request import ImagePart, MediaOptions, VideoPart
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

TESTS = Path(__file__).resolve().parent.parent

# What the other processes run: resume each snapshot given, and print what its reply comes to.
RESUME = """
import json, sys
from harness import Outcome
from mlxgen import resume
for path in sys.argv[1:]:
    with resume(path) as session:
        outcome = Outcome()
        finished = outcome.take(session.continue_())
        print(json.dumps({"tokens": [t[:4] for t in outcome.values], "text": finished.text}), flush=True)
"""

# Many pictures, saved as they go; a line for each event.
MANY = """
import sys
from pathlib import Path
from mlxgen import ImagePart, InputProgress, MediaOptions, Session, load
session = Session(load(sys.argv[1]))
session.add([*[ImagePart(path) for path in sorted(Path(sys.argv[2]).iterdir())], "?"])
session.autosave(sys.argv[3])
for event in session.prepare_media():
    print(event.phase, event.index, flush=True)
"""

# Peak memory after a few large pictures, and after many.
MEMORY = """
import resource, sys
from mlxgen import ImagePart, MediaOptions, Session, load
session = Session(load(sys.argv[1]))
options = MediaOptions(min_pixels=100_000, max_pixels=120_000)
for count in (2, int(sys.argv[2])):
    session.add([*[ImagePart(path, options) for path in sys.argv[3 : 3 + count]], "?"])
    for _ in session.prepare_media():
        pass
    kept = sum(frame.nbytes for medium in session.state.media for frame in medium.frames)
    features = {id(array): array.nbytes for m in session.state.media for part in m.features for array in part.values()}
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, kept + sum(features.values()), flush=True)
"""


def start(code, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, **options)


def test_a_new_process_goes_on_where_the_prepared_files_are_gone(tmp_path) -> None:
    expected, begun, paths = [], [], []
    for family in ("qwen2_5_vl", "qwen3_5", "smolvlm", "gemma3"):
        whole, token = Outcome(), StopAt()
        session = new_session(family, counting(model(family), Counts()))
        whole.take(session.stream(job(family, sources(tmp_path / family)), reply=reply(), cancel=token))
        # Among the pictures, in the tower, in prefill, in decode.
        for share in (0.1, 0.6, 0.85, 0.95):
            stop_at = int(token.count * share)
            folder = sources(tmp_path / f"{family}{stop_at}")
            session, outcome = new_session(family, counting(model(family), Counts())), Outcome()
            stopped = outcome.take(session.stream(job(family, folder), reply=reply(), cancel=StopAt(stop_at)))
            assert stopped.finish_reason == "cancelled"
            paths.append(session.save(tmp_path / f"{family}{stop_at}.mlxgen"))
            remove_prepared(session)
            expected.append(whole)
            begun.append(outcome)
    process = start(RESUME, *paths)
    lines = [json.loads(line) for line in process.communicate()[0].splitlines()]
    assert process.returncode == 0
    assert len(lines) == len(paths)
    for line, whole, outcome in zip(lines, expected, begun, strict=True):
        tokens = [list(value[:4]) for value in outcome.values] + line["tokens"]
        assert tokens == [list(value[:4]) for value in whole.values]
        assert line["text"] == whole.finished.text


def test_a_kill_in_the_thirtieth_of_forty_pictures_loses_at_most_one(tmp_path) -> None:
    family, folder = "gemma3", tmp_path / "pictures"
    folder.mkdir()
    for number in range(40):
        Image.fromarray(pixels(60, 90, number)).save(folder / f"{number:02}.png")
    process = start(MANY, tiny_vlm.folder(family), folder, tmp_path / "a.mlxgen")
    for line in process.stdout:
        if line == "prepare 29\n":
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    for number in range(29):
        (folder / f"{number:02}.png").unlink()
    with resume(tmp_path / "a.mlxgen", options=ResumeOptions(model=model(family))) as session:
        prepared = [medium.prepared for medium in session.state.media]
        assert prepared[:29] == [True] * 29
        events = list(session.prepare_media())
        assert sum(event.phase == "prepare" for event in events) == 40 - sum(prepared) <= 11
        assert all(medium.encoded for medium in session.state.media)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Two JPEGs of 12 megapixels."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(2):
        large = Image.fromarray(pixels(300, 400, number)).resize((4000, 3000), Image.Resampling.BILINEAR)
        large.save(folder / f"{number}.jpg", quality=85)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_pictures_of_twelve_megapixels_take_the_memory_of_what_is_kept_of_them(count, photos, tmp_path) -> None:
    for number in range(20):
        for photo in photos:
            shutil.copy(photo, tmp_path / f"{number}{photo.name}")
    process = start(MEMORY, tiny_vlm.folder("qwen2_5_vl"), count, *sorted(tmp_path.glob("*.jpg")))
    (few, kept_of_few), (many, kept) = (map(int, line.split()) for line in process.communicate()[0].splitlines())
    assert kept > count * 100_000 * 3
    assert many - few < 1.5 * (kept - kept_of_few) + 30 * 2**20, "a picture alone has 36 MB of pixels"


TOWER = """
import time
import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlxgen_vision.towers.qwen2_5_vl import Qwen25VLTower, Qwen25VLVisionConfig

tower = Qwen25VLTower(Qwen25VLVisionConfig.from_dict({"out_hidden_size": 2048}))
tower.update(tree_map(lambda a: mx.random.normal(a.shape, scale=0.02), tower.parameters()))
mx.eval(tower.parameters())
runs = [0]

class Counted:
    def __init__(self, block):
        self.block = block

    def __call__(self, *args):
        runs[-1] += 1
        return self.block(*args)

tower.blocks = [Counted(block) for block in tower.blocks]
patches = np.random.default_rng(0).normal(size=(64, 1176)).astype(np.float32)
last_s = time.perf_counter()
for _ in tower.encode(patches, 8, 8):
    now_s = time.perf_counter()
    print(runs[-1], now_s - last_s, flush=True)
    runs.append(0)
    last_s = now_s
"""


@pytest.mark.slow
def test_a_step_of_a_real_tower_is_a_tenth_of_a_second_or_one_block() -> None:
    """1280 wide, 32 blocks, on this machine as it is (with OpenBLAS where there is one)."""
    blas = next(iter(Path("/usr/lib").glob("*/openblas-pthread/libblas.so.3")), None)
    environment = {**os.environ, **({} if blas is None else {"LD_PRELOAD": str(blas)})}
    command = [sys.executable, "-c", TOWER]
    output = subprocess.run(command, env=environment, text=True, check=True, capture_output=True).stdout
    steps = [(int(blocks), float(seconds)) for blocks, seconds in map(str.split, output.splitlines())]
    assert sum(blocks for blocks, _ in steps) == 32
    slowest_block_s = max((seconds for blocks, seconds in steps if blocks == 1), default=0.0)
    # Twice, because another program may take the machine away at any moment.
    assert max(seconds for _, seconds in steps) <= 2 * max(slowest_block_s, 0.1)


class Watch(CancelToken):
    """Measures the longest stretch of this thread's own work between two checkpoints."""

    __slots__ = ("count", "last_s", "longest_s")

    def __init__(self) -> None:
        super().__init__()
        self.count, self.longest_s, self.last_s = 0, 0.0, time.thread_time()

    def checkpoint(self) -> None:
        now_s = time.thread_time()
        self.count, self.longest_s, self.last_s = self.count + 1, max(self.longest_s, now_s - self.last_s), now_s


def test_a_long_clip_is_never_further_from_a_checkpoint_than_a_frame(tmp_path) -> None:
    clip = tmp_path / "clip.mp4"
    with av.open(str(clip), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        picture = pixels(240, 320, 0)
        for number in range(2000):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    for family in ("qwen2_5_vl", "smolvlm"):
        watch = Watch()
        began_s = time.thread_time()
        session = Session(model(family))
        session.add([VideoPart(clip, MediaOptions(max_frames=16)), "?"])
        frames = [event for event in session.prepare_media(cancel=watch) if event.phase == "prepare"]
        whole_s = time.thread_time() - began_s
        assert len(frames) == 16
        assert watch.count > 2000, "one for every packet that is counted"
        assert watch.longest_s < max(0.1, whole_s / 10), "a frame or a step, not the clip"


def test_a_large_photo_is_one_unit(photos) -> None:
    watch = Watch()
    began_s = time.thread_time()
    session = Session(model("qwen2_5_vl"))
    session.add([*map(ImagePart, photos), "?"])
    events = list(session.prepare_media(cancel=watch))
    whole_s = time.thread_time() - began_s
    assert len(events) == 4
    assert watch.longest_s < 0.8 * whole_s, "not both pictures"


def test_a_truncated_photo_costs_its_turn_only(photos, tmp_path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(photos[0].read_bytes()[:200_000])
    session = new_session("qwen2_5_vl")
    with pytest.raises(MediaError, match=r"broken\.jpg: a truncated or damaged JPEG"):
        session.send([ImagePart(broken), "?"], reply=reply())
    session.undo()
    assert session.send([ImagePart(photos[1]), "?"], reply=reply()).finish_reason == "length"


def test_what_is_prepared_is_in_the_snapshot_at_once_and_no_larger_than_its_pixels(tmp_path) -> None:
    family, folder = "qwen2_5_vl", sources(tmp_path / "media")
    session = new_session(family)
    path = session.autosave(tmp_path / "a.mlxgen")
    sizes = []
    for number, event in enumerate(session.stream(job(family, folder), reply=reply())):
        if number == 12:
            break
        if getattr(event, "phase", None) == "prepare" and event.kind == "image":
            copy = Path(shutil.copytree(path, tmp_path / f"{number}", ignore=shutil.ignore_patterns(".tmp-*", "lock")))
            # The one before is on the disk; this one is being written.
            with resume(copy, options=ResumeOptions(model=model(family))) as again:
                prepared = [medium.prepared for medium in again.state.media]
                assert sum(prepared) >= event.index
                assert again.unfinished
        sizes.append(sum(file.stat().st_size for file in path.glob("prep-*.safetensors")))
    session.close()
    kept = sum(frame.nbytes for medium in session.state.media for frame in medium.frames)
    features = sum(array.nbytes for m in session.state.media for part in m.features for array in part.values())
    assert kept + features <= sum(file.stat().st_size for file in path.glob("prep-*")) < kept + features + 16 * 1024
