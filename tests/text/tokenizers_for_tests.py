"""Small tokenizers of every kind the detokenizer tells apart, built here so that nothing has to be downloaded."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEXTS = ("Hello, world! The café is naïve: 你好 👩‍👩‍👧 ½ ١٢٣\n\n\tdef f(x):  return x", "   leading and trailing  ")
"""What a round trip has to survive."""


def byte_level(special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")) -> Tokenizer:
    """GPT-2's kind: bytes and a few merges, `<think>` and `</think>` added but not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("l", "l"), ("Ã", "©"), ("ð", "Ł"), ("c", "a"), ("ĳ", "©")]
    entries = [*special, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Llama 2's kind: "▁" for a space, one put in front of the text, `<0x..>` for what has no token."""
    special = ["<unk>", "<s>", "</s>"]
    chars = ["▁", *"abcdefghijklmnopqrstuvwxyzHTW,.!:()"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("l", "l")]
    entries = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *chars, *("".join(pair) for pair in merges)]
    model = models.BPE(
        vocab={entry: i for i, entry in enumerate(entries)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tail = [decoders.Strip(content=" ", left=1, right=0)] if strip else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def metaspace() -> Tokenizer:
    """T5's kind: a Metaspace decoder, which the detokenizer has no special way for."""
    entries = ["<unk>", *"▁abcdefghijklmnopqrstuvwxyzHTW,.!:()éï½", "▁the", "▁a"]
    tokenizer = Tokenizer(models.Unigram([(entry, -float(i)) for i, entry in enumerate(entries)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind: continuation pieces start with ##."""
    entries = ["[UNK]", "hello", "world", ",", "##s", "##ing", "a", "n", "##t", "'"]
    tokenizer = Tokenizer(models.WordPiece({entry: i for i, entry in enumerate(entries)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer


def split_bytes() -> Tokenizer:
    """Byte-level inside a Sequence with a step of its own, so that only the window can decode it."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex("☃"), "*")])
    return tokenizer


def hugging_face(tokenizer: Tokenizer, chat_template: str | None = None, **options: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options)
    wrapped.chat_template = chat_template
    return wrapped
