"""How a model's chat template and processor name a picture: found out by trying, not from a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from mlxgen_vision.mlx_vlm_adapter.bridge import Bridge

_MARK: Final = "mlxgen"
_USUAL: Final = ("<image>", "<|image|>", "<|image_pad|>", "<image_soft_token>", "[IMG]")

# "parts": the template writes the placeholder for a part {"type": "image"}. "text": it takes parts but leaves pictures
# out, so the placeholder goes in as text. "none": it takes strings only, or there is no template.
Style = Literal["parts", "text", "none"]


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The text that stands for one picture before the processor expands it."""

    text: str
    style: Style


def find_placeholder(bridge: Bridge) -> Placeholder | None:
    """None where neither the template, nor the processor, nor mlx-vlm's own message format says what it is."""
    bare = _render(bridge, [{"type": "text", "text": _MARK}])
    pictured = _render(bridge, [{"type": "image"}, {"type": "text", "text": _MARK}])
    names = _candidates(bridge)
    if bare is not None and pictured is not None and bare.count(_MARK) == pictured.count(_MARK) == 1:
        for name in names:
            if pictured.count(name) == bare.count(name) + 1:
                return Placeholder(name, "parts")
    told = _from_message_format(bridge)
    if told is None and not names:
        return None
    return Placeholder(told if told is not None else names[0], "text" if bare and bare.count(_MARK) == 1 else "none")


def _render(bridge: Bridge, content: list[dict[str, str]]) -> str | None:
    messages = [{"role": "user", "content": content}]
    for owner in (bridge.tokenizer, bridge.processor):
        if getattr(owner, "chat_template", None) is None:
            continue
        try:
            return str(owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception:  # whatever a template raises: it doesn't take parts
            return None
    return None


def _candidates(bridge: Bridge) -> list[str]:
    """Names the processor has for a picture's place, then the usual ones that are tokens of this vocabulary."""
    named = [
        str(getattr(value, "content", value))
        for owner in (bridge.processor, bridge.tokenizer)
        for name in ("boi_token", "image_token", "image_placeholder")
        if isinstance(value := getattr(owner, name, None), str) or hasattr(value, "content")
    ]
    index = bridge.image_token_index
    if index is not None and index >= 0:
        token: Any = bridge.tokenizer.convert_ids_to_tokens(index)
        named += [token] if isinstance(token, str) else []
    known = bridge.tokenizer.get_vocab()
    return list(dict.fromkeys([*named, *(name for name in _USUAL if name in known)]))


def _from_message_format(bridge: Bridge) -> str | None:
    """What mlx-vlm writes before the text of a message with one picture, for templates that leave pictures out."""
    from mlx_vlm.prompt_utils import get_message_json

    try:
        message = get_message_json(bridge.kind, _MARK, role="user", num_images=1)
    except (KeyError, ValueError):
        return None
    content = message.get("content") if isinstance(message, dict) else message
    if not isinstance(content, str) or content.count(_MARK) != 1:
        return None
    before = content.partition(_MARK)[0].strip()
    return before or None
