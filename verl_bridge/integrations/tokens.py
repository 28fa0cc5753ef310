"""Text to token ids, in every host alike."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of text that a corpus had a part in: control tokens spelt out in it stay text."""
    return _text_tokenizer(tokenizer).encode(text, add_special_tokens=False, split_special_tokens=True)


@lru_cache(maxsize=4)
def _text_tokenizer(tokenizer: Any) -> Any:
    """A copy of our own: the switch is a state of the tokenizer, and verl uses the shared one from other threads."""
    return copy.deepcopy(tokenizer)
