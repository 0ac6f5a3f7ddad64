"""Model folders that can be served: with a tokenizer whose tokens are bytes, or words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def add_tokenizer(folder: Path) -> Path:
    """Write a tokenizer into a model's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + place for place, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return folder


def add_words(folder: Path) -> Path:
    """Write a tokenizer in which each token is a word, so that a stream shows each token of a random model at once."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    count = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(count)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=inner, unk_token="w0").save_pretrained(folder)
    return folder
