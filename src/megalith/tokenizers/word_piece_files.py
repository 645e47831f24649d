"""A WordPiece tokenizer with T5's sentinels as files that transformers reads.

Its `BertTokenizer` knows neither [BOS], [EOS] and <extra_id_N>, which Megatron puts behind the vocabulary, nor texts
without [CLS] and [SEP] around them; a tokenizer.json says both. Where the `tokenizers` library takes words apart
otherwise than Megatron (`word_piece`), so does the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.tokenizers.word_piece import LONGEST_WORD, WordPieceTokenizer

EXTRA_IDS = "extra_ids"
"""In tokenizer_config.json: how many tokens <extra_id_N> there are."""
_TOKENS_OF_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def tokenizer_json(tokenizer: WordPieceTokenizer) -> str:
    """The content of tokenizer.json: the same ids, and nothing around a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece

    ids = {token: number for number, token in enumerate(tokenizer.tokens)}
    engine = Tokenizer(WordPiece(ids, unk_token=_token(tokenizer, "unk"), max_input_chars_per_word=LONGEST_WORD))
    engine.normalizer = normalizers.BertNormalizer(lowercase=tokenizer.lower_case)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    special = [*(_token(tokenizer, role) for role in _TOKENS_OF_ROLES), *_sentinels(tokenizer)]
    engine.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    text: str = engine.to_str(pretty=True)
    return text + "\n"


def tokenizer_config(tokenizer: WordPieceTokenizer) -> Mapping[str, Any]:
    """The content of tokenizer_config.json beside it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "do_lower_case": tokenizer.lower_case,
        EXTRA_IDS: len(tokenizer.extra_ids),
        **{f"{role}_token": _token(tokenizer, role) for role in _TOKENS_OF_ROLES},
    }


def _token(tokenizer: WordPieceTokenizer, role: str) -> str:
    return tokenizer.tokens[tokenizer.special[role]]


def _sentinels(tokenizer: WordPieceTokenizer) -> list[str]:
    return [tokenizer.tokens[number] for number in tokenizer.extra_ids]
