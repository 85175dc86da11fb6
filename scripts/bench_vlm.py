#!/usr/bin/env python3
"""Speed on pictures against mlx-vlm 0.7.10: from files to the first token, to 32 tokens; one picture and eight.

Both run in one process on the same checkpoint, turn about, each through its own streaming call. Install both in an
environment of their own:

    pip install mlx-vlm==0.7.10 "mlx[cpu]" mlxgen
    python scripts/bench_vlm.py [--rounds 15] [--families qwen3_vl gemma3] [--counts 1 8] [--cpu-time]

The checkpoints are those of tests/references, grown: 8 text layers of 512, 12 tower blocks of 384, float32. Each round
has new pictures, so that nothing is found in a feature store. Three phases are told apart:

- input: opening, resizing, tokenising, and the tower, up to the features;
- prefill: from there to the first token;
- decode: the other 31.

A ratio above 1 means mlxgen is faster. On few cores set OPENBLAS_NUM_THREADS to what both are to have.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import io
import pstats
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from bench_tools import Interval, machine, new_folder
from PIL import Image

import mlxgen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from references.prompts import placeholder, style  # noqa: E402
from references.tiny_checkpoints import Family, write_checkpoint  # noqa: E402
from references.tiny_families import FAMILIES  # noqa: E402

NUM_TOKENS = 32
clock = time.perf_counter
PHASES = ("input", "prefill", "decode", "overall")
_WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_QUESTION = "What is in the picture, which colours does it have, and what else is worth telling about it?"


def grown(name: str) -> Family:
    """The family's tiny checkpoint with a small model's numbers; 36 to 45 tokens to a picture of 320 × 240 pixels."""
    tiny = FAMILIES[name]
    text = tiny.text | _WIDE
    if tiny.kind.startswith("qwen"):
        rope = {"mrope_section": [8, 12, 12] if tiny.kind.startswith("qwen2") else [12, 10, 10]}
        if "rope_scaling" in text:
            text |= {"rope_scaling": text["rope_scaling"] | rope}
        vision = tiny.vision | {"depth": 12, "hidden_size": 384, "num_heads": 6, "intermediate_size": 1024}
        vision |= {"out_hidden_size": 512}
        if tiny.kind == "qwen2_5_vl":
            vision |= {"fullatt_block_indexes": [2, 5, 8, 11], "window_size": 112}
        else:
            vision |= {"deepstack_visual_indexes": [2, 5, 8], "num_position_embeddings": 576}
        side = 2 * tiny.vision["patch_size"]
        budget = {"shortest_edge": 4 * side**2, "longest_edge": 36 * side**2}
        return dataclasses.replace(tiny, text=text, vision=vision, image=tiny.image | {"size": budget})
    vision = tiny.vision | {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
    }
    if tiny.kind == "gemma3":
        # mlx-vlm looks for the number of tokens of a picture in the text model's settings.
        text |= {"mm_tokens_per_image": 36, "sliding_window": 256, "query_pre_attn_scalar": 64}
        vision |= {"image_size": 168, "patch_size": 14}
        image = tiny.image | {"size": {"height": 168, "width": 168}}
        return dataclasses.replace(tiny, text=text, vision=vision, image=image, top={"mm_tokens_per_image": 36})
    vision |= {"image_size": 96, "patch_size": 16}
    image = tiny.image | {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 96}}
    return dataclasses.replace(tiny, text=text, vision=vision, image=image, top={"scale_factor": 2})


_TURN = {
    "qwen": ("'<|im_start|>' + message.role + '\\n'", "'<|im_end|>\\n'", "<|im_start|>assistant\n"),
    "gemma3": ("'<start_of_turn>' + message.role + '\\n'", "'<end_of_turn>\\n'", "<start_of_turn>model\n"),
    "tiled": ("message.role | capitalize + ':'", "'<end_of_utterance>\\n'", "Assistant:"),
}


def write(folder: Path, family: Family) -> None:
    """The checkpoint, with a chat template and with the flat settings mlx-vlm reads for Qwen2.5-VL."""
    import json

    write_checkpoint(folder, family)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if family.kind == "qwen2_5_vl":
        path.write_text(json.dumps(family.config()["text_config"] | config))
    before, after, reply = _TURN[style(family.kind)]
    start = {"gemma3": "<bos>", "tiled": "<|im_start|>"}.get(style(family.kind), "")
    mark = placeholder(family.kind, "image")
    (folder / "chat_template.jinja").write_text(
        f"{{{{ '{start}' }}}}{{% for message in messages %}}{{{{ {before} }}}}"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        f"{{% if part.type == 'image' %}}{{{{ '{mark}' }}}}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
        f"{{% endfor %}}{{% endif %}}{{{{ {after} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {reply!r} }}}}{{% endif %}}"
    )


def prompt(family: Family, num_pictures: int) -> str:
    """What the template makes of the turn, for mlx-vlm's call."""
    user, end, reply = {
        "qwen": ("<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
        "gemma3": ("<bos><start_of_turn>user\n", "<end_of_turn>\n", "<start_of_turn>model\n"),
        "tiled": ("<|im_start|>User:", "<end_of_utterance>\n", "Assistant:"),
    }[style(family.kind)]
    return user + placeholder(family.kind, "image") * num_pictures + _QUESTION + end + reply


def pictures(folder: Path, count: int, seed: int) -> list[Path]:
    """New JPEG files of 320 × 240 pixels."""
    stream = np.random.RandomState(seed)
    paths = []
    for number in range(count):
        coarse = Image.fromarray(stream.randint(0, 256, (12, 16, 3)).astype(np.uint8))
        path = folder / f"{number}.jpg"
        coarse.resize((320, 240), Image.Resampling.BICUBIC).save(path, quality=90)
        paths.append(path)
    return paths


@dataclasses.dataclass
class Run:
    """The moments of one reply, in seconds."""

    began: float
    encoded: float = 0.0
    first: float = 0.0
    last: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0

    def phases(self) -> tuple[float, float, float, float]:
        return (self.encoded - self.began, self.first - self.encoded, self.last - self.first, self.last - self.began)


class Ours:
    """mlxgen's session, one for each reply."""

    def __init__(self, folder: Path) -> None:
        self.model = mlxgen.load(folder)
        self._forward = self.model.forward
        self._run = Run(0.0)
        object.__setattr__(self.model, "forward", self._stamped)

    def _stamped(self, *arguments: Any, **named: Any) -> Any:
        if not self._run.encoded:
            self._run.encoded = clock()
        return self._forward(*arguments, **named)

    def __call__(self, _: str, paths: list[Path]) -> Run:
        mlxgen.prefix_cache(self.model).clear()
        run = self._run = Run(clock())
        session = mlxgen.Session(self.model)
        reply = mlxgen.ReplyOptions(max_tokens=NUM_TOKENS)
        for event in session.stream([*(mlxgen.ImagePart(path) for path in paths), _QUESTION], reply=reply):
            if isinstance(event, mlxgen.Token):
                run.num_tokens += 1
                run.first = run.first or clock()
            elif isinstance(event, mlxgen.Finished):
                run.num_prompt_tokens = event.usage.prompt_tokens
        run.last = clock()
        return run


class Theirs:
    """mlx-vlm's `stream_generate`."""

    def __init__(self, folder: Path) -> None:
        import mlx_vlm

        self._library = mlx_vlm
        self.model, self.processor = mlx_vlm.load(str(folder))
        criteria = self.processor.tokenizer.stopping_criteria
        # Random weights would end a reply where they like.
        criteria.__class__ = type("Never", (type(criteria),), {"__call__": lambda self, token: False})
        self.embed = self.model.get_input_embeddings
        self._run = Run(0.0)
        self.model.get_input_embeddings = self._stamped

    def _stamped(self, *arguments: Any, **named: Any) -> Any:
        made = self.embed(*arguments, **named)
        mx.eval(made.inputs_embeds)
        self._run.encoded = clock()
        return made

    def __call__(self, text: str, paths: list[Path]) -> Run:
        run = self._run = Run(clock())
        images = [str(path) for path in paths]
        for made in self._library.stream_generate(
            self.model, self.processor, text, image=images, max_tokens=NUM_TOKENS, temperature=0.0
        ):
            run.first = run.first or clock()
            run.num_tokens = made.generation_tokens
            run.num_prompt_tokens = made.prompt_tokens
        run.last = clock()
        return run


Contestants = dict[str, Callable[[str, list[Path]], Run]]


def compare(
    family: Family, contestants: Contestants, count: int, rounds: int
) -> dict[str, tuple[Interval, float, float]]:
    """Per phase: the ratio's interval and both medians in milliseconds."""
    folder, text = new_folder(), prompt(family, count)
    phases: dict[str, list[tuple[float, ...]]] = {name: [] for name in contestants}
    for number in range(-1, rounds):
        paths = pictures(folder, count, 1000 * count + number + 1)
        runs = {}
        for name in contestants if number % 2 else reversed(contestants):
            runs[name] = contestants[name](text, paths)
        ours, theirs = runs["ours"], runs["theirs"]
        assert ours.num_prompt_tokens == theirs.num_prompt_tokens, (ours, theirs)
        assert ours.num_tokens == NUM_TOKENS, ours
        assert theirs.num_tokens >= NUM_TOKENS, theirs
        if number >= 0:  # the first warms up
            for name, run in runs.items():
                phases[name].append(run.phases())
    table = {}
    for index, phase in enumerate(PHASES):
        ours_s, theirs_s = ([run[index] for run in phases[name]] for name in ("ours", "theirs"))
        ratio = Interval.of([b / a for a, b in zip(ours_s, theirs_s, strict=True)])
        table[phase] = (ratio, 1000 * float(np.median(ours_s)), 1000 * float(np.median(theirs_s)))
    return table


def single_steps(ours: Ours, theirs: Theirs, family: Family, rounds: int) -> tuple[Interval, float, float]:
    """Decode steps of the bare language models after 100 tokens, one by one in turn: the steadiest comparison.

    For the Qwen families the step comes after a picture: its position isn't its place in the cache.
    """
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_vlm.models.cache import make_prompt_cache as make_their_cache

    ids = [50 + number % 200 for number in range(100)]
    vision, language = ours.model.vision, theirs.model.language_model
    inputs = None
    if family.kind.startswith("qwen"):
        positions = np.tile(np.arange(100, dtype=np.int32), (3, 1))
        inputs = mlxgen.PreparedInput(ids, position_ids=positions, rope_delta=-7)
    our_cache, their_cache = make_prompt_cache(vision.language), make_their_cache(language)
    mx.eval(vision.forward(mx.array(ids), cache=our_cache, start=0, inputs=inputs))
    made = theirs.embed(mx.array([ids]), None, mask=None)
    named = {key: value for key, value in made.to_dict().items() if value is not None}
    mx.eval(language(mx.array([ids]), cache=their_cache, **named).logits)

    def our_step(number: int) -> None:
        mx.eval(mx.argmax(vision.forward(mx.array([60]), cache=our_cache, start=100 + number, inputs=inputs)[0, -1]))

    def their_step(_: int) -> None:
        mx.eval(mx.argmax(language(mx.array([[60]]), cache=their_cache, logits_to_keep=1).logits[0, -1]))

    seconds: dict[Callable[[int], None], list[float]] = {our_step: [], their_step: []}
    for number in range(rounds):
        for step in seconds if number % 2 else reversed(seconds):
            began = clock()
            step(number)
            seconds[step].append(clock() - began)
    ratio = Interval.of([b / a for a, b in zip(seconds[our_step], seconds[their_step], strict=True)])
    return ratio, 1000 * float(np.median(seconds[our_step])), 1000 * float(np.median(seconds[their_step]))


def profile(contestant: Callable[[str, list[Path]], Run], family: Family) -> None:
    folder, text = new_folder(), prompt(family, 8)
    contestant(text, pictures(folder, 8, 1))
    paths = pictures(folder, 8, 2)
    watched = cProfile.Profile()
    watched.runcall(contestant, text, paths)
    out = io.StringIO()
    pstats.Stats(watched, stream=out).sort_stats("tottime").print_stats(25)
    print(out.getvalue())


def main() -> int:
    global clock
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--families", nargs="+", default=["qwen2_5_vl", "qwen3_vl", "idefics3", "gemma3"])
    options.add_argument("--counts", nargs="+", type=int, default=[1, 8], help="how many pictures")
    options.add_argument("--cpu-time", action="store_true", help="the process's CPU seconds: where the machine is busy")
    options.add_argument("--steps", type=int, metavar="N", help="compare N decode steps of the bare models instead")
    options.add_argument("--profile", metavar="FAMILY", help="profile one reply to eight pictures instead")
    chosen = options.parse_args()
    if chosen.cpu_time:
        clock = time.process_time
    missed = False
    print(f"{machine()}, mlx-vlm {version('mlx-vlm')}")
    print("| family | pictures | phase | mlxgen | mlx-vlm | ratio | >= 0.97 |")
    for name in [chosen.profile] if chosen.profile else chosen.families:
        family, folder = grown(name), new_folder()
        write(folder, family)
        ours, theirs = Ours(folder), Theirs(folder)
        if chosen.steps:
            ratio, ours_ms, theirs_ms = single_steps(ours, theirs, family, chosen.steps)
            print(f"| {name} | - | one step | {ours_ms:.1f} ms | {theirs_ms:.1f} ms | {ratio} | |", flush=True)
            missed = missed or ratio.low < 0.97
            continue
        contestants: Contestants = {"ours": ours, "theirs": theirs}
        if chosen.profile:
            profile(ours, family)
            return 0
        for count in chosen.counts:
            table = compare(family, contestants, count, chosen.rounds)
            for phase, (ratio, ours_ms, theirs_ms) in table.items():
                kept = ratio.low >= 0.97
                missed = missed or not kept
                cells = (
                    name,
                    count,
                    phase,
                    f"{ours_ms:.0f} ms",
                    f"{theirs_ms:.0f} ms",
                    ratio,
                    "" if kept else "MISSED",
                )
                print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
