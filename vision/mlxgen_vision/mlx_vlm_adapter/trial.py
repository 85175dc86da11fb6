"""The trial at load: what mlxgen will do with a model of mlx-vlm is compared with what mlx-vlm does in one go.

mlxgen encodes one picture at a time, feeds prompts in chunks that may end inside a picture, lets another request run
between two chunks, and gives positions as arguments. A model for which any of that changes the result (pictures that
are processed together, masks over the whole prompt, state that has to stay on the model) is refused here, before
anybody gets a wrong answer. It costs a few prompts of two small pictures.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from mlxgen.cancellation import CancelToken
from mlxgen.errors import MlxgenError, UnsupportedError
from mlxgen.inputs import PreparedInput, PreparedMedium
from mlxgen_vision.mlx_vlm_adapter.bridge import Bridge, Pixels
from mlxgen_vision.mlx_vlm_adapter.model import Manners, MlxVlmModel, unknown_outputs
from mlxgen_vision.mlx_vlm_adapter.placeholder import Placeholder, find_placeholder

_log = logging.getLogger(__name__)

_SIZES: Final = ((168, 224), (224, 168))  # height, width
_NUM_STEPS: Final = 2

# Of the standard deviation of the logits, on average over the vocabulary: float32, and what is coarser. Passes of other
# lengths round differently; a wrong position or mask shows at a tenth and more.
_TOLERANCE: Final = {mx.float32: 1e-3}
_COARSE_TOLERANCE: Final = 0.05


def try_out(bridge: Bridge, notice: str, cancel: CancelToken) -> MlxVlmModel:
    """The model, once it is known how to use it. Raises `UnsupportedError` with what stands against it."""
    try:
        return _try_out(bridge, notice, cancel)
    except MlxgenError:
        raise
    except Exception as error:  # of mlx-vlm, of a processor, of MLX
        reason = " ".join(str(error).split())[:300]
        raise _refusal(bridge, f"a trial with a picture fails in it ({type(error).__name__}: {reason})") from error
    finally:
        bridge.isolation.restore()
        bridge.isolation.forget()


def _refusal(bridge: Bridge, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{bridge.kind} can't be used through mlx-vlm's adapter: {reason}; use mlx-vlm itself for it"
    )


def _try_out(bridge: Bridge, notice: str, cancel: CancelToken) -> MlxVlmModel:
    bridge.isolation.begin()
    bridge.make_cache()
    placeholder = find_placeholder(bridge)
    if placeholder is None:
        raise _refusal(bridge, "nothing says which text stands for a picture")
    pictures = [_picture(size, seed) for seed, size in enumerate(_SIZES)]
    cancel.checkpoint()
    manners = _look(bridge, placeholder, pictures[0])
    model = MlxVlmModel(bridge, manners, notice)
    if not _together_as_alone(model, pictures):
        manners = Manners(placeholder, manners.image_token, manners.num_axes, max_pictures=1)
        model, pictures = MlxVlmModel(bridge, manners, notice), pictures[:1]
        if not _together_as_alone(model, pictures):
            raise _refusal(bridge, "a picture inside a text gets other tokens or pixels than alone")
    cancel.checkpoint()
    _compare(model, pictures, cancel)
    return model


def _picture(size: tuple[int, int], seed: int) -> Pixels:
    """Coarse coloured squares, uint8 RGB."""
    coarse = np.random.default_rng(seed).integers(0, 256, (size[0] // 28, size[1] // 28, 3), dtype=np.uint8)
    return np.ascontiguousarray(coarse.repeat(28, axis=0).repeat(28, axis=1))


def _look(bridge: Bridge, placeholder: Placeholder, picture: Pixels) -> Manners:
    """Which id a picture's rows stand at, and how many axes positions have; both from one picture alone."""
    given = bridge.process(placeholder.text, [picture])
    ids = [int(token) for token in np.array(given["input_ids"]).reshape(-1)]
    if min(ids) < 0:
        raise _refusal(bridge, f"it marks pictures by {min(ids)}, which is no token")
    pictured = bridge.embed(given)
    unknown = unknown_outputs(pictured.others)
    if unknown:
        raise _refusal(bridge, f"its language model wants {', '.join(unknown)} of the whole prompt")
    plain = bridge.embed({"input_ids": given["input_ids"]}).hidden
    if pictured.hidden.shape != plain.shape:
        raise _refusal(bridge, f"it turns {plain.shape[1]} tokens into {pictured.hidden.shape[1]} rows")
    apart = np.array(mx.abs(pictured.hidden - plain).max(axis=-1).astype(mx.float32))[0] > 0
    changed = {token for token, differs in zip(ids, apart.tolist(), strict=True) if differs}
    if len(changed) != 1:
        raise _refusal(bridge, f"a picture stands at {len(changed)} different tokens")
    (token,) = changed
    if any(other == token and not differs for other, differs in zip(ids, apart.tolist(), strict=True)):
        raise _refusal(bridge, "a picture fills only some of the tokens that stand for it")
    known = pictured.position_ids
    if known is None:
        return Manners(placeholder, token, 0)
    if not hasattr(bridge.language, "get_rope_index"):
        raise _refusal(bridge, "nothing tells the positions of a prompt before it is embedded")
    return Manners(placeholder, token, int(known.shape[0]) if known.ndim == 3 else 1)


def _together_as_alone(model: MlxVlmModel, pictures: Sequence[Pixels]) -> bool:
    """Whether the processor makes of pictures in one text what it makes of each alone: ids, and all arrays."""
    text = _text(model, len(pictures))
    together = model.bridge.process(text, pictures)
    alone = [model.bridge.process(model.manners.placeholder.text, [picture]) for picture in pictures]
    expanded = model.expand(text, _media(model, pictures))
    ids = model.bridge.ids_of(together)
    if ids != model.bridge.ids(expanded):
        return False
    length = np.array(together["input_ids"]).size
    return all(
        _is_joined(value, [one.get(name) for one in alone])
        for name, value in together.items()
        if not (isinstance(value, mx.array | np.ndarray) and tuple(value.shape) == (1, length))  # ids, masks, kinds
    )


def _is_joined(whole: Any, pieces: Sequence[Any]) -> bool:
    """Whether `whole` is the pieces one after the other along its first or second axis, perhaps padded with zeros to
    one size, or the same for all."""
    if isinstance(whole, list | tuple):
        entries = [entry for piece in pieces for entry in (piece if isinstance(piece, list | tuple) else [piece])]
        if len(entries) == len(whole):
            return all(_same_values(one, entry) for one, entry in zip(whole, entries, strict=True))
    target, parts = _array(whole), [_array(piece) for piece in pieces]
    if target is None or any(part is None for part in parts):
        return all(_plain(piece) == _plain(whole) for piece in pieces)
    arrays = [part for part in parts if part is not None]
    return any(_stands_in_a_row(target, arrays, axis) for axis in (0, 1)) or all(
        part.shape == target.shape and np.array_equal(part, target) for part in arrays
    )


def _same_values(one: Any, other: Any) -> bool:
    """Whether an entry of a list of pictures is what one picture alone gave, which may have an axis more."""
    first, second = _array(one), _array(other)
    if first is None or second is None:
        return bool(_plain(one) == _plain(other))
    return np.array_equal(first.squeeze(), second.squeeze())


def _stands_in_a_row(target: np.ndarray[Any, Any], parts: Sequence[np.ndarray[Any, Any]], axis: int) -> bool:
    if any(part.ndim != target.ndim or part.ndim <= axis for part in parts):
        return False
    if sum(part.shape[axis] for part in parts) != target.shape[axis]:
        return False
    rebuilt = np.zeros_like(target)
    first = 0
    for part in parts:
        if any(own > room for own, room in zip(part.shape, target.shape, strict=True)):
            return False
        place = [slice(0, size) for size in part.shape]
        place[axis] = slice(first, first + part.shape[axis])
        rebuilt[tuple(place)] = part
        first += part.shape[axis]
    return bool(np.array_equal(rebuilt, target))


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, mx.array):
        return np.array(value.astype(mx.float32))
    return value if isinstance(value, np.ndarray) else None


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return np.array(value).tolist() if isinstance(value, mx.array | np.ndarray) else value


def _text(model: MlxVlmModel, num_pictures: int) -> str:
    middle = " and then ".join([model.manners.placeholder.text] * num_pictures)
    return f"First {middle} what is there?"


def _media(model: MlxVlmModel, pictures: Sequence[Pixels]) -> list[PreparedMedium]:
    media: list[PreparedMedium] = []
    for picture in pictures:
        pixels, geometry = model.arrange(picture)
        media.append(PreparedMedium("image", geometry=geometry, frames=[pixels], num_frames=1, num_parts=1))
    return media


# -- logits ------------------------------------------------------------------------------------------------------------


def _compare(model: MlxVlmModel, pictures: Sequence[Pixels], cancel: CancelToken) -> None:
    wanted, tokens = _in_one_go(model.bridge, _text(model, len(pictures)), pictures)
    cancel.checkpoint()
    found = _as_a_session(model, pictures, tokens)
    places = ["the prompt's last token", *(f"token {number} of the reply" for number in range(1, len(found)))]
    wanted.append(_words_in_one_go(model.bridge))
    found.append(_words_in_chunks(model))
    places.append("the last token of words alone")
    dtype = model.bridge.embed({"input_ids": mx.array([model.bridge.ids("a")])}).hidden.dtype
    for place, want, got in zip(places, wanted, found, strict=True):
        apart = float(np.abs(want - got).mean() / max(float(want.std()), 1e-6))
        _log.debug("%s: %.3g at %s", model.bridge.kind, apart, place)
        if not apart <= _TOLERANCE.get(dtype, _COARSE_TOLERANCE):
            raise _refusal(
                model.bridge,
                f"in chunks, with another request in between, it gives other logits at {place} than in one go (on "
                f"average {apart:.2g} of their standard deviation)",
            )


_WORDS: Final = "Another request, of words alone, that stands between."


def _words_in_one_go(bridge: Bridge) -> np.ndarray[Any, Any]:
    ids = mx.array([bridge.ids(_WORDS)])
    embedded = bridge.embed_in_place({"input_ids": ids})
    others: Mapping[str, Any] = {**embedded.others, "inputs_embeds": embedded.hidden}
    logits = _last(bridge.logits_in_place(ids, bridge.make_cache(), others))
    bridge.isolation.restore()
    return logits


def _words_in_chunks(model: MlxVlmModel) -> np.ndarray[Any, Any]:
    ids = mx.array(model.bridge.ids(_WORDS), dtype=mx.uint32)
    cache = model.bridge.make_cache()
    model.forward(ids[:4], cache=cache, start=0, inputs=None)
    return _last(model.forward(ids[4:], cache=cache, start=4, inputs=None))


def _in_one_go(bridge: Bridge, text: str, pictures: Sequence[Pixels]) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    """Logits as mlx-vlm's own generation computes them, leaving on the model what it leaves; and the likeliest ids."""
    given = bridge.process(text, pictures)
    embedded = bridge.embed_in_place(given)
    beside = {
        name: value for name, value in given.items() if name not in ("input_ids", "pixel_values", "attention_mask")
    }
    others: Mapping[str, Any] = {**beside, **embedded.others, "inputs_embeds": embedded.hidden}
    cache = bridge.make_cache()
    logits = [_last(bridge.logits_in_place(given["input_ids"], cache, others))]
    tokens: list[int] = []
    for _ in range(_NUM_STEPS):
        tokens.append(int(logits[-1].argmax()))
        logits.append(_last(bridge.logits_in_place(mx.array([tokens[-1:]]), cache, {})))
    bridge.isolation.restore()
    return logits, tokens


def _as_a_session(model: MlxVlmModel, pictures: Sequence[Pixels], tokens: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """The same logits the way mlxgen does it, and between any two passes one of a request without pictures."""
    inputs = _inputs(model, pictures)
    other = mx.array(model.bridge.ids(_WORDS), dtype=mx.uint32)
    caches, own = model.bridge.make_cache(), model.bridge.make_cache()
    fed = 0
    logits: list[np.ndarray[Any, Any]] = []
    for start, end in itertools.pairwise([*_cuts(inputs), len(inputs.token_ids)]):
        ids = mx.array(inputs.token_ids[start:end], dtype=mx.uint32)
        last = _last(model.forward(ids, cache=caches, start=start, inputs=inputs))
        model.forward(other[:3], cache=own, start=fed, inputs=None)
        fed += 3
        logits = [last]
    for number, token in enumerate(tokens):
        at = len(inputs.token_ids) + number
        logits.append(_last(model.forward(mx.array([token], dtype=mx.uint32), cache=caches, start=at, inputs=inputs)))
        _last(model.forward(other[:1], cache=own, start=fed, inputs=None))
        fed += 1
    return logits


def _inputs(model: MlxVlmModel, pictures: Sequence[Pixels]) -> PreparedInput:
    media = _media(model, pictures)
    for medium in media:
        medium.features = [features for features in model.encode(medium, 0) if features is not None]
    given = model.bridge.process(_text(model, len(pictures)), pictures)
    ids = [int(token) for token in np.array(given["input_ids"]).reshape(-1)]
    spans = model.locate(ids, media)
    position_ids, delta = model.positions(ids, media, spans)
    return PreparedInput(ids, media, spans, position_ids, delta)


def _cuts(inputs: PreparedInput) -> list[int]:
    """Starts of chunks: one inside every picture, and one for the last three tokens."""
    inside = {(span.start + span.end) // 2 for span in inputs.spans if span.end - span.start > 1}
    return sorted({0, *sorted(inside)[:2], len(inputs.token_ids) - 3})


def _last(logits: mx.array) -> np.ndarray[Any, Any]:
    return np.array(logits[0, -1].astype(mx.float32))
