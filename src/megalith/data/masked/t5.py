"""T5 dataset: a run of sentences with spans replaced by sentinels, and the spans as targets.

    text        a b c d e f g h, of which c d and g are taken out
    text_enc    a b <extra_id_0> e f <extra_id_1> h [PAD]
    text_dec    [BOS] <extra_id_0> c d <extra_id_1> g [PAD] [PAD]
    labels      <extra_id_0> c d <extra_id_1> g [EOS] -1 -1
    loss_mask   1 1 1 1 1 1 0 0            as dec_mask; enc_mask is 1 on the tokens of text_enc

Source:  Megatron-LM `T5MaskedWordPieceDataset`; Raffel et al. 2020, arXiv:1910.10683, section 3.1.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from megalith.config import DataConfig, ModelConfig
from megalith.data.indexed import IndexedDataset
from megalith.data.masked.dataset import MaskedDataset, MaskedDatasetFactory, MaskedOptions, Masking, mask, pad_to
from megalith.data.samples import SplitSpec
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import require_eod

_ROOM = 2  # tokens of the encoder's sequence that Megatron reserves
NO_LABEL = -1


def decoder_start_token(tokenizer: Tokenizer) -> int:
    """Return the id that starts the decoder: [BOS], else the padding (T5). Raises ConfigError if there is neither."""
    special = tokenizer.special
    start = special.get("bos", special.get("pad", tokenizer.pad))
    if start is None:
        raise ConfigError("the tokenizer has neither [BOS] nor padding, one of which T5's decoder starts with")
    return start


class T5Dataset(MaskedDataset):
    """T5 samples, see the module; all entries are int64, [sequence_length], [decoder_length] or scalar.

    Raises:  ConfigError if the tokenizer has no sentinels, no padding or no end.
    """

    def __init__(self, documents: IndexedDataset, spec: SplitSpec, factory: T5DatasetFactory) -> None:
        tokenizer = factory.tokenizer
        self._decoder_length, self._sentinels = factory.decoder_length, tokenizer.extra_ids
        if not self._sentinels:
            raise ConfigError("the tokenizer has no tokens <extra_id_N>; give --vocab-extra-ids 100")
        if tokenizer.pad is None:
            raise ConfigError("the tokenizer has no padding token, which T5's samples need")
        special = tokenizer.special
        self._begin, self._pad = decoder_start_token(tokenizer), tokenizer.pad
        self._end = special["eos"] if "eos" in special else require_eod(tokenizer, "T5")
        self._unmaskable = [special[role] for role in ("cls", "sep") if role in special]
        super().__init__(
            documents,
            spec,
            factory,
            longest=factory.options.sequence_length - _ROOM,
            min_sentences=1,
            extra_identity={"sequence_length_decoder": factory.decoder_length},
        )

    def _sample(self, sentences: list[NDArray[Any]], target: int, random: RandomState) -> dict[str, NDArray[Any]]:
        tokens = list(chain.from_iterable(sentence.tolist() for sentence in sentences))
        truncated, tokens = len(tokens) > target, tokens[:target]
        spans = mask(
            tokens,
            target,
            random,
            self._options.masking,
            unmaskable=self._unmaskable,
            continues=self._continues,
            replacement=_no_replacement,
        ).spans
        self._require_room(len(spans), sum(len(dropped) for _, dropped in spans))
        encoder_ids, targets, begin = list[int](), list[int](), 0
        for sentinel, (positions, dropped) in zip(self._sentinels, spans, strict=False):
            encoder_ids += [*tokens[begin : positions[0]], sentinel]
            targets += [sentinel, *dropped]
            begin = positions[-1] + 1
        encoder_ids += tokens[begin:]
        text = pad_to(encoder_ids, self._options.sequence_length, self._pad)
        length = len(targets) + 1
        return {
            "text_enc": text,
            "text_dec": pad_to([self._begin, *targets], self._decoder_length, self._pad),
            "labels": pad_to([*targets, self._end], self._decoder_length, NO_LABEL),
            "loss_mask": pad_to([1] * length, self._decoder_length, 0),
            "truncated": np.array(truncated, np.int64),
            "enc_mask": (text != self._pad).astype(np.int64),
            "dec_mask": pad_to([1, *(int(token != self._pad) for token in targets)], self._decoder_length, 0),
        }

    def _require_room(self, spans: int, tokens: int) -> None:
        """Raise DataError if there are too few sentinels, or the decoder's sequence is too short."""
        if spans > len(self._sentinels):
            raise DataError(
                f"a sample of {self.prefix} has {spans} masked spans, but the tokenizer has {len(self._sentinels)} "
                "tokens <extra_id_N>; give a larger --vocab-extra-ids, or a smaller --mask-prob"
            )
        if spans + tokens + 1 > self._decoder_length:
            raise DataError(
                f"a sample of {self.prefix} gives the decoder {spans + tokens + 1} tokens, more than "
                f"--decoder-seq-length {self._decoder_length}; give a larger one, or a smaller --mask-prob"
            )


def _no_replacement(random: RandomState) -> None:
    """Return None without a draw: tokens of a span need no replacement."""
    return


@dataclass(frozen=True)
class T5DatasetFactory(MaskedDatasetFactory):
    """Factory of T5 datasets; the decoder reads `decoder_length` tokens, padding included."""

    class_name = "T5MaskedWordPieceDataset"
    decoder_length: int

    @classmethod
    def from_config(cls, data: DataConfig, model: ModelConfig, tokenizer: Tokenizer, seed: int) -> T5DatasetFactory:
        """Build the factory with the settings of Megatron's pretrain_t5.py."""
        assert data.decoder_seq_length is not None, "a rule of the configuration"
        masking = Masking(data.mask_prob, longest_ngram=10, geometric=True)
        options = MaskedOptions(data.seq_length, seed, masking, data.short_seq_prob)
        return cls(options, tokenizer, data.decoder_seq_length)

    def build(self, documents: IndexedDataset, spec: SplitSpec) -> T5Dataset:
        return T5Dataset(documents, spec, self)
