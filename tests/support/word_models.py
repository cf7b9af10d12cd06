"""A tokenizer of whole words, and models that write one given word after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.tiny_models import tiny_target


def words(*tokens: str, template: str | None = None, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, of which some are special tokens."""
    vocabulary = ["<unk>", "</s>", "[user]", "Who?", *tokens]
    known = {word: number for number, word in enumerate(dict.fromkeys(vocabulary))}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.chat_template = template
    return fast


def chain(tokenizer: PreTrainedTokenizerFast, pieces: Sequence[str]) -> PreTrainedModel:
    """A model that writes one word after another: each follows the one before it in `pieces`."""
    ids: Any = tokenizer.convert_tokens_to_ids(list(pieces))
    model = tiny_target("llama", vocabulary=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        for one, following in pairwise(ids):
            model.lm_head.weight[following, one] = 1.0
    return model
