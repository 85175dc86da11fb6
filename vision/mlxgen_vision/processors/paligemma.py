"""PaliGemma's rules: one square picture, and a prompt in which all pictures come first.

After transformers' `processing_paligemma.py`, which follows big_vision: picture tokens, `<bos>`, text, a line's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen.inputs import PreparedMedium
from mlxgen_vision.image import Resample
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.spans import expand_placeholders

Pixels = np.ndarray[Any, Any]
Resize = Callable[[Pixels, tuple[int, int], Resample], Pixels]

IMAGE: Final = "<image>"
BOS: Final = "<bos>"

# For checkpoints without a chat template, as all published ones are: every turn of the user is a prompt of its own.
TEMPLATE: Final = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}{% if message['content'] is string %}{{ bos_token }}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% endif %}{% endfor %}"
    "{{ bos_token }}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% else %}"
    "{{ raise_exception('PaliGemma has turns of user and assistant only') }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class SquareSettings:
    """Pictures are stretched to `side` x `side` pixels."""

    side: int
    resample: Resample
    normalisation: Normalisation

    @classmethod
    def read(cls, path: Path, side: int) -> SquareSettings:
        """From any layout; `side` is the tower's. Raises `UnsupportedError` for settings that make another size."""
        settings = processor_settings.image_settings(path)
        size = settings.get("size") or {"height": side, "width": side}
        if not settings.get("do_resize", True) or size != {"height": side, "width": side}:
            raise UnsupportedError(
                f"the image processor has size {size} and do_resize {settings.get('do_resize', True)}; the tower takes "
                f"{side}x{side} pixels: use the settings published with the model"
            )
        return cls(side, processor_settings.resample(settings, "bicubic"), Normalisation.of(settings))

    def square(self, rgb: Pixels, resize: Resize) -> Pixels:
        """The picture as the tower sees it, uint8 (side, side, 3)."""
        return resize(rgb, (self.side, self.side), self.resample)


def expand(text: str, media: Sequence[PreparedMedium], num_tokens: int) -> str:
    """Every `<image>` as a run of `num_tokens`. A text with pictures and without a `<bos>` gets one behind the last
    picture, and a line's end; one with a `<bos>` gets a line's end only if it has none.

    Raises `PlaceholderError` if there are more or fewer placeholders than media.
    """
    head, found, tail = text.rpartition(IMAGE)
    if found and BOS not in text:
        text = f"{head}{IMAGE}{BOS}{tail}\n"
    elif found and not text.endswith("\n"):
        text = f"{text}\n"
    return expand_placeholders(text, media, {IMAGE: "image"}, lambda medium: IMAGE * num_tokens)
