"""A byte-level BPE tokenizer of 307 entries: ChatML specials, all 256 bytes, a few merges.

Every byte is a token of its own, so random ids decode to fragments of UTF-8 sequences, which is what a detokenizer
has to cope with. The merges are spelled out, not trained, so that the ids never change.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
EOS_TOKEN = "<|im_end|>"

# "Ġ" is how byte-level BPE writes a space.
_MERGES = (
    "Ġ t|h e|Ġ a|i n|r e|o n|Ġt he|e r|Ġ s|a t|Ġ w|e n|o r|Ġ o|a n|Ġ b|i s|e d|Ġ c|o u|n d|in g|Ġ f|e s|Ġo f|Ġ p"
    "|a l|a r|l l|i t|Ġ m|a s|Ġ h|u s|us er|s t|an t|Ġ in|l e|i st|i on|Ġ d|Ġt o|Ã ©|ð Ł|ðŁ ĺ|Ġa nd"
)
MERGES = tuple(dict.fromkeys(tuple(pair.split(" ")) for pair in _MERGES.split("|")))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(_BYTES) + len(MERGES)


def build_tokenizer() -> Tokenizer:
    entries = [*SPECIAL_TOKENS, *_BYTES, *("".join(pair) for pair in MERGES)]
    vocab = {entry: index for index, entry in enumerate(entries)}
    assert len(vocab) == len(entries) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "add_bos_token": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
