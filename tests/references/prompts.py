"""A case as a family's prompt: its turn markers, and the placeholders its chat template writes for media."""

from __future__ import annotations

from typing import Final

from references.cases import CASES, Piece

_WRAP: Final = {
    "qwen": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    "gemma3": ("<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
    "tiled": ("<|im_start|>User:", "<end_of_utterance>\nAssistant:"),
    "paddleocr_vl": ("<|begin_of_sentence|>User: ", "\nAssistant: "),
    "gemma4": ("<bos><|turn>user\n", "<turn|>\n<|turn>model\n"),
    "lfm2_vl": ("<|startoftext|><|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    "mistral3": ("<bos>[INST]", "[/INST]"),
    "llava": ("USER: ", " ASSISTANT:"),
    "paligemma": ("", ""),  # what goes around it is the processor's
    "internvl": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
}
_PLACEHOLDER: Final = {
    ("qwen", "image"): "<|vision_start|><|image_pad|><|vision_end|>",
    ("qwen", "video"): "<|vision_start|><|video_pad|><|vision_end|>",
    ("gemma3", "image"): "<start_of_image>",
    ("tiled", "image"): "<image>",
    ("tiled", "video"): "<video>",
    ("mistral3", "image"): "[IMG]",
    ("llava", "image"): "<image>\n",
    ("llava", "video"): "<video>\n",
    ("paligemma", "image"): "<image>",
    ("gemma4", "image"): "<|image|>",
    ("gemma4", "video"): "<|video|>",
    ("lfm2_vl", "image"): "<image>",
    ("paddleocr_vl", "image"): "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    ("internvl", "image"): "<IMG_CONTEXT>\n",
    ("internvl", "video"): "<video>\n",
}


def style(kind: str) -> str:
    for family in ("qwen", "llava"):
        if kind.startswith(family):
            return family
    return (
        kind
        if kind in ("paligemma", "gemma3", "gemma4", "lfm2_vl", "mistral3", "internvl", "paddleocr_vl")
        else "tiled"
    )


def case_names(kind: str) -> list[str]:
    """The cases a family takes: those with video only where it takes videos, and what transformers can compute."""
    films = kind.startswith("qwen") or kind in ("smolvlm", "internvl", "gemma4", "llava_onevision")
    # transformers fails on Mistral 3's pictures of a single token, on LLaVA-OneVision's videos of different lengths,
    # on PaliGemma without a picture, and on pictures too long for LFM2-VL's token budget.
    failing = [("mistral3", "tiny"), ("llava_onevision", "videos"), ("paligemma", "text")]
    failing += [("lfm2_vl", name) for name in ("thin", "ribbon", "column")]
    names = [name for name in CASES if (kind, name) not in failing]
    return [name for name in names if films or not any(piece[0] == "video" for piece in media(name))]


def media(name: str) -> list[tuple[str, str]]:
    """The case's media in order: ("image" or "video", name)."""
    return [piece for piece in CASES[name] if isinstance(piece, tuple)]


def pieces(kind: str, name: str) -> list[Piece]:
    """The case with its turn markers, media still apart."""
    before, after = _WRAP[style(kind)]
    return [before, *CASES[name], after]


def placeholder(kind: str, medium: str) -> str:
    return _PLACEHOLDER[style(kind), medium]


def prompt(kind: str, name: str) -> str:
    """The text the chat template would make."""
    parts = pieces(kind, name)
    return "".join(part if isinstance(part, str) else placeholder(kind, part[0]) for part in parts)
