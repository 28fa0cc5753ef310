"""The policy's tokenizer: byte-level BPE, so that any text can be encoded, with the action tags as ordinary tokens.

transformers loads the tokenizer of every Qwen2 checkpoint as its ``Qwen2Tokenizer``, which brings that family's
splitting rules and its own end token along; so it is made as one from the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def train_tokenizer(texts: Iterable[str], vocabulary: int = 3000) -> PreTrainedTokenizerFast:
    """Learn the merges from ``texts`` (free of tags). Names in them should follow a space, as they do in use.

    The tags are added as ordinary tokens: decoding with ``skip_special_tokens`` keeps them. Text comes back from
    encoding and decoding in Unicode's composed form (NFC).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": EOS}
    rules = Qwen2Tokenizer(vocab={PAD: 0, EOS: 1}, merges=[], **special).backend_tokenizer
    core = Tokenizer(models.BPE())
    core.normalizer, core.pre_tokenizer, core.decoder = rules.normalizer, rules.pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    learned = json.loads(core.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=learned["vocab"], merges=merges, clean_up_tokenization_spaces=False, **special)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
