"""Generated pictures, clips, questions and answers for the embedded demonstration model.

Everything is a function of a NumPy generator, so a seed names the whole training and evaluation data. The pictures
themselves come from `mlxgen_vision.demo_pictures`; here is what is asked about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from mlxgen_vision.demo_pictures import CANVAS, COLOURS, DIRECTIONS, KINDS, QUADRANTS, Shape, draw_clip, draw_scene
from numpy.typing import NDArray

PATCH, MERGE, TEMPORAL = 14, 2, 2
GRID = CANVAS // PATCH  # patches to a side
CELLS = GRID // MERGE  # picture tokens to a side
PICTURE_TOKENS = CELLS * CELLS
TOKENS_PER_SECOND = 2
SYSTEM = "You are a helpful assistant."
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NUMBERS = ("no", "one", "two", "three", "four")
ORDINALS = ("first", "second", "third")
KIND_NAMES, COLOUR_NAMES, WAYS = list(KINDS), list(COLOURS), list(DIRECTIONS)
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Turn:
    """One question with its only right answer; `kind` names the row of the accuracy table."""

    kind: str
    question: str
    answer: str


@dataclass
class Medium:
    """A picture (one frame) or a clip: the frames as pixel arrays, and the dense labels the tower is taught first."""

    frames: list[NDArray[np.uint8]]
    labels: Ints  # (grid_t, cells, cells, 3): shape kind, colour, motion of the shape centred there; 0 = none
    is_clip: bool
    time_step: int = 0  # M-RoPE time distance of neighbouring temporal patches


@dataclass
class Dialogue:
    """Media shown in the first user turn, and the turns asked about them."""

    media: list[Medium]
    turns: list[Turn]


# ---------------------------------------------------------------------------------------------- pictures


def _pick(rng: np.random.Generator, items: Sequence[str]) -> str:
    return items[int(rng.integers(len(items)))]


def _tint(rng: np.random.Generator, colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(np.clip(v + rng.integers(-16, 17), 0, 255)) for v in COLOURS[colour])
    return red, green, blue


def _background(rng: np.random.Generator) -> tuple[int, int, int]:
    level = int(rng.integers(228, 253))
    red, green, blue = (min(255, level + int(v)) for v in rng.integers(-5, 6, 3))
    return red, green, blue


def _pixels(rng: np.random.Generator, pictures: Sequence[object]) -> list[NDArray[np.uint8]]:
    """RGB arrays; now and then with the noise a camera or a JPEG would leave."""
    sigma = float(rng.uniform(1, 5)) if rng.random() < 0.3 else 0.0
    frames = []
    for picture in pictures:
        array = np.asarray(picture)
        if sigma:
            array = np.clip(array + rng.normal(0, sigma, array.shape), 0, 255).astype(np.uint8)
        frames.append(array)
    return frames


def make_scene(rng: np.random.Generator, num_shapes: int | None = None) -> list[Shape]:
    """One to four shapes in reading order, each in its own quarter; a single one may lie anywhere."""
    count = num_shapes or int(rng.choice([1, 2, 3, 4], p=[0.34, 0.24, 0.22, 0.20]))
    if count == 1 and rng.random() < 0.4:
        radius = float(rng.uniform(14, 30))
        x, y = rng.uniform(radius * 1.1 + 2, CANVAS - radius * 1.1 - 2, 2)
        colour = _pick(rng, COLOUR_NAMES)
        return [Shape(_pick(rng, KIND_NAMES), colour, float(x), float(y), radius, _tint(rng, colour))]
    kinds = KIND_NAMES if rng.random() < 0.5 else [str(k) for k in rng.choice(KIND_NAMES, 2, replace=False)]
    names = list(QUADRANTS)
    shapes = []
    for index in sorted(rng.choice(4, count, replace=False)):
        cx, cy = QUADRANTS[names[index]]
        radius = float(rng.uniform(14, 21.5))
        play = 26 - radius
        colour = _pick(rng, COLOUR_NAMES)
        shapes.append(
            Shape(
                _pick(rng, kinds),
                colour,
                float(cx + rng.uniform(-play, play)),
                float(cy + rng.uniform(-play, play)),
                radius,
                _tint(rng, colour),
            )
        )
    return shapes


def picture_of(rng: np.random.Generator, shapes: list[Shape]) -> Medium:
    """Draws the scene and labels the cell each centre lies in."""
    labels = np.zeros((1, CELLS, CELLS, 3), np.int32)
    for shape in shapes:
        _label(labels[0], shape, 0)
    return Medium(_pixels(rng, [draw_scene(shapes, background=_background(rng))]), labels, is_clip=False)


def _label(cells: Ints, shape: Shape, motion: int) -> None:
    side = CANVAS / CELLS
    row, column = (min(CELLS - 1, max(0, int(v // side))) for v in (shape.y, shape.x))
    cells[row, column] = (KIND_NAMES.index(shape.kind) + 1, COLOUR_NAMES.index(shape.colour) + 1, motion)


def make_clip(rng: np.random.Generator, num_frames: int) -> tuple[Medium, Shape, str | None]:
    """A shape moving one way (or resting, one clip in six) for `num_frames` frames."""
    way = None if rng.random() < 1 / 6 else _pick(rng, WAYS)
    colour = _pick(rng, COLOUR_NAMES)
    radius = float(rng.uniform(13, 19))
    low, high = radius * 1.1 + 1, CANVAS - radius * 1.1 - 1
    step = float(rng.uniform(6, min(18.0, (high - low) / (num_frames - 1))))
    x, y = (float(v) for v in rng.uniform(low, high, 2))
    if way is not None:
        dx, dy = DIRECTIONS[way]
        start = float(rng.uniform(low, high - step * (num_frames - 1)))
        if dx + dy < 0:
            start = low + high - start
        x, y = (start, y) if dx else (x, start)
    shape = Shape(_pick(rng, KIND_NAMES), colour, x, y, radius, _tint(rng, colour))
    frames = draw_clip(shape, way, num_frames=num_frames, step=step, background=_background(rng))
    labels = np.zeros((num_frames // TEMPORAL, CELLS, CELLS, 3), np.int32)
    dx, dy = DIRECTIONS[way] if way is not None else (0, 0)
    for index in range(num_frames // TEMPORAL):
        travelled = step * (TEMPORAL * index + (TEMPORAL - 1) / 2)
        here = Shape(shape.kind, colour, x + dx * travelled, y + dy * travelled, radius)
        _label(labels[index], here, 0 if way is None else WAYS.index(way) + 1)
    time_step = TOKENS_PER_SECOND if rng.random() < 0.8 else TOKENS_PER_SECOND // 2
    return Medium(_pixels(rng, frames), labels, is_clip=True, time_step=time_step), shape, way


# ---------------------------------------------------------------------------------------------- questions

WORDINGS = {
    "count": ("How many shapes are there?", "How many shapes are in the picture?", "How many shapes do you see?"),
    "count by kind": (
        "How many {kind}s are there?",
        "How many {kind}s are in the picture?",
        "How many {kind}s do you see?",
    ),
    "shape": ("What shape is it?", "Which shape is it?", "What is it?", "What shape is this?"),
    "colour": ("What colour is it?", "Which colour is it?", "What color is it?", "What color is this?"),
    "where": ("Where is it?", "Where is the shape?", "Where in the picture is it?"),
    "caption": (
        "Describe the picture.",
        "Describe this picture.",
        "Describe the image.",
        "Describe this image.",
        "What do you see?",
        "What is in the picture?",
        "What is in this picture?",
        "What is in the image?",
    ),
    "colour of": ("What colour is the {kind}?", "Which colour is the {kind}?", "What color is the {kind}?"),
    "where of": ("Where is the {kind}?", "Where in the picture is the {kind}?"),
    "quarter": ("What is in the {place}?", "What is at the {place}?", "What do you see in the {place}?"),
    "direction": (
        "Which way does it move?",
        "Which way is it moving?",
        "Where does it move?",
        "In which direction does it move?",
    ),
    "clip caption": (
        "Describe the video.",
        "Describe this video.",
        "Describe the clip.",
        "What happens?",
        "What happens in the video?",
    ),
    "clip shape": ("What shape is it?", "What is it?", "What moves?"),
    "clip colour": ("What colour is it?", "What color is it?"),
    "which count": ("How many shapes are in the {nth} picture?", "How many shapes are there in the {nth} picture?"),
    "which caption": (
        "Describe the {nth} picture.",
        "What is in the {nth} picture?",
        "What do you see in the {nth} picture?",
    ),
    "each": ("Describe the pictures.", "Describe each picture.", "What is in the pictures?"),
}
# Further wordings for the last part of the training, where capitals and final marks also come and go.
MORE_WORDINGS = {
    "count": ("Count the shapes.", "How many shapes?", "How many shapes can you see?", "How many are there?"),
    "count by kind": ("Count the {kind}s.", "How many {kind}s?", "How many {kind}s can you see?"),
    "shape": ("Name the shape.", "What kind of shape is it?", "Which shape do you see?"),
    "colour": ("Name the colour.", "What colour does it have?", "What is its colour?", "What is its color?"),
    "where": ("Where do you see it?", "Where is it in the picture?", "In which corner is it?"),
    "caption": ("Please describe the picture.", "Describe it.", "What does the picture show?", "Tell me what you see."),
    "clip caption": ("Please describe the video.", "What do you see?", "What does the video show?"),
    "direction": ("Where does it go?", "Which way does it go?", "Which direction?", "Does it move left or right?"),
}
CHAT = (
    ("Hello", "Hello! Show me a picture with coloured shapes."),
    ("Hello!", "Hello! Show me a picture with coloured shapes."),
    ("Hi", "Hello! Show me a picture with coloured shapes."),
    ("What can you do?", "I can describe pictures with coloured shapes and say which way a shape moves."),
    ("Who are you?", "I am a tiny model, trained to show how stopping and resuming works."),
    ("What are you?", "I am a tiny model, trained to show how stopping and resuming works."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
)
UNSEEN = "I see no picture."


def article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def caption(shapes: Sequence[Shape]) -> str:
    """The shapes in reading order: "A red circle, a blue square and a green star."."""
    names = [article(f"{shape.colour} {shape.kind}") for shape in shapes]
    text = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    return text[0].upper() + text[1:] + "."


def quarter_of(shape: Shape) -> str | None:
    """The quarter a centre lies in, or None too near the middle lines to say."""
    if min(abs(shape.x - CANVAS / 2), abs(shape.y - CANVAS / 2)) < 12:
        return None
    return f"{'top' if shape.y < CANVAS / 2 else 'bottom'} {'left' if shape.x < CANVAS / 2 else 'right'}"


def number_of(count: int, noun: str) -> str:
    return f"There {'is' if count == 1 else 'are'} {NUMBERS[count]} {noun}{'' if count == 1 else 's'}."


# Questions that need a position, a comparison or a selection are learned last: late in training they come first.
HARD = ("where", "where of", "quarter", "colour of", "count by kind", "direction", "clip caption", "clip shape")


def _order(rng: np.random.Generator, turns: list[Turn], stage: int) -> list[Turn]:
    """The turns in random order; from stage 1 hard ones come rather first, from stage 2 questions are worded freely."""
    if stage == 0:
        return [turns[i] for i in rng.permutation(len(turns))]
    delay = rng.exponential(size=len(turns)) / [4.0 if turn.kind in HARD else 1.0 for turn in turns]
    turns = [turns[i] for i in np.argsort(delay)]
    return [_freely(rng, turn) for turn in turns] if stage > 1 else turns


def _freely(rng: np.random.Generator, turn: Turn) -> Turn:
    """The question in one of the further wordings now and then, in lower case, without its last mark."""
    question = turn.question
    more = MORE_WORDINGS.get(turn.kind)
    if more and rng.random() < 0.4:
        named = [kind for kind in KIND_NAMES if kind in question]
        question = _pick(rng, more).format(kind=named[0] if named else "")
    if rng.random() < 0.2:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.2:
        question = question[:-1]
    return replace(turn, question=question)


def _ask(rng: np.random.Generator, kind_of_question: str, answer: str, /, **words: str) -> Turn:
    return Turn(kind_of_question, _pick(rng, WORDINGS[kind_of_question]).format(**words), answer)


def picture_turns(rng: np.random.Generator, shapes: list[Shape], stage: int = 0) -> list[Turn]:
    """Every question this scene allows, one wording each, in random order (see `_order`)."""
    turns = [
        _ask(rng, "count", number_of(len(shapes), "shape")),
        _ask(rng, "caption", caption(shapes)),
    ]
    kinds = [shape.kind for shape in shapes]
    kind = _pick(rng, kinds) if rng.random() < 0.7 else _pick(rng, KIND_NAMES)
    turns.append(_ask(rng, "count by kind", number_of(kinds.count(kind), kind), kind=kind))
    places = {quarter_of(shape): shape for shape in shapes}
    if len(shapes) == 1:
        turns.append(_ask(rng, "shape", f"It is {article(kinds[0])}."))
        turns.append(_ask(rng, "colour", f"It is {shapes[0].colour}."))
        if None not in places:
            turns.append(_ask(rng, "where", f"It is in the {quarter_of(shapes[0])}."))
    else:
        unique = [shape for shape in shapes if kinds.count(shape.kind) == 1]
        if unique:
            one = unique[int(rng.integers(len(unique)))]
            turns.append(_ask(rng, "colour of", f"It is {one.colour}.", kind=one.kind))
            one = unique[int(rng.integers(len(unique)))]
            turns.append(_ask(rng, "where of", f"It is in the {quarter_of(one)}.", kind=one.kind))
    if None not in places:
        place = str(_pick(rng, [str(p) for p in places])) if rng.random() < 0.7 else _pick(rng, list(QUADRANTS))
        found = caption([places[place]]) if place in places else "Nothing."
        turns.append(_ask(rng, "quarter", found, place=place))
    return _order(rng, turns, stage)


def clip_turns(rng: np.random.Generator, shape: Shape, way: str | None, stage: int = 0) -> list[Turn]:
    name = article(f"{shape.colour} {shape.kind}")
    moves = "rests" if way is None else f"moves {way}"
    turns = [
        _ask(rng, "direction", f"It {moves}."),
        _ask(rng, "clip caption", f"{name[0].upper()}{name[1:]} {moves}."),
        _ask(rng, "clip shape", f"It is {article(shape.kind)}."),
        _ask(rng, "clip colour", f"It is {shape.colour}."),
    ]
    return _order(rng, turns, stage)


def pictures_turns(rng: np.random.Generator, scenes: list[list[Shape]]) -> list[Turn]:
    """Questions about one of several pictures, and about all."""
    turns = []
    for nth, shapes in zip(ORDINALS, scenes, strict=False):
        turns.append(_ask(rng, "which count", number_of(len(shapes), "shape"), nth=nth))
        turns.append(_ask(rng, "which caption", caption(shapes), nth=nth))
    parts = (f"{nth.capitalize()}: {caption(s)}" for nth, s in zip(ORDINALS, scenes, strict=False))
    turns.append(_ask(rng, "each", " ".join(parts)))
    return [turns[i] for i in rng.permutation(len(turns))]


def chat_turns(rng: np.random.Generator) -> list[Turn]:
    turns = [Turn("chat", *CHAT[i]) for i in rng.permutation(len(CHAT))[:2]]
    kind = _pick(rng, list(WORDINGS))
    unseen = _ask(
        rng, kind, UNSEEN, kind=_pick(rng, KIND_NAMES), nth=_pick(rng, ORDINALS), place=_pick(rng, list(QUADRANTS))
    )
    turns.append(Turn("no picture", unseen.question, UNSEEN))
    return [turns[i] for i in rng.permutation(3)]


def make_dialogue(rng: np.random.Generator, form: str, num_turns: int, easy: bool = False, stage: int = 0) -> Dialogue:
    """A dialogue of a form: "picture", "pictures2", "pictures3", "clip4", "clip6", "clip8" or "chat"."""
    if form == "picture":
        num_shapes = (
            int(rng.integers(1, 3)) if easy else int(rng.choice([1, 1, 1, 1, 2, 2, 3, 3, 4])) if stage else None
        )
        shapes = make_scene(rng, num_shapes)
        return Dialogue([picture_of(rng, shapes)], picture_turns(rng, shapes, stage)[:num_turns])
    if form.startswith("pictures"):
        scenes = [make_scene(rng) for _ in range(int(form[8:]))]
        return Dialogue([picture_of(rng, scene) for scene in scenes], pictures_turns(rng, scenes)[:num_turns])
    if form.startswith("clip"):
        medium, shape, way = make_clip(rng, int(form[4:]))
        return Dialogue([medium], clip_turns(rng, shape, way, stage)[:num_turns])
    return Dialogue([], chat_turns(rng)[:num_turns])


def corpus(rng: np.random.Generator, num_dialogues: int) -> list[str]:
    """Rendered dialogue texts to train the tokenizer on."""
    makers: list[Callable[[], list[Turn]]] = [
        lambda: picture_turns(rng, make_scene(rng)),
        lambda: clip_turns(rng, make_scene(rng, 1)[0], None if rng.random() < 0.2 else _pick(rng, WAYS)),
        lambda: pictures_turns(rng, [make_scene(rng) for _ in range(3)]),
        lambda: chat_turns(rng),
    ]
    texts = []
    for index in range(num_dialogues):
        texts.append(f"system\n{SYSTEM}\n")
        texts += [f"user\n{t.question}\nassistant\n{t.answer}\n" for t in makers[index % 4]()]
    return texts
