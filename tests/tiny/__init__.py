"""Tiny seeded text models, written as real checkpoint folders, for every cache kind mlx-lm has.

`folder(kind)` is built once per test run; `load(kind)` is what `mlx_lm.load` makes of it. All are float32, random but
seeded, and scaled so that what they say depends on the whole context: greedy replies wander instead of repeating one
token, sampled ones are varied, and a wrong position, mask or cache row changes the output. Special tokens are very
unlikely, so that a reply of a few dozen tokens practically never ends by itself; pass any other id as a stop token.
"""

from tiny.models import KINDS, LlamaShape, folder, load, make, make_llama
from tiny.tokenizer import CHAT_TEMPLATE, EOS_TOKEN, SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer

__all__ = [
    "CHAT_TEMPLATE",
    "EOS_TOKEN",
    "KINDS",
    "SPECIAL_TOKENS",
    "VOCAB_SIZE",
    "LlamaShape",
    "folder",
    "load",
    "make",
    "make_llama",
    "write_tokenizer",
]
