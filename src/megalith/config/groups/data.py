"""The settings of the data and of its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megalith.config.fields import setting
from megalith.registry import Registered


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from and how they are cut into samples."""

    seq_length: int = setting(
        help="tokens per sample; for T5 those of the encoder",
        aliases=("--encoder-seq-length",),
        unit="tokens",
        at_least=1,
    )
    decoder_seq_length: int | None = setting(None, help="decoder tokens per sample of T5", unit="tokens", at_least=1)
    mask_prob: float = setting(0.15, help="fraction of tokens that BERT and T5 predict", above=0, below=1)
    short_seq_prob: float = setting(0.1, help="fraction of shortened samples of BERT and T5", at_least=0, at_most=1)
    data_path: tuple[str, ...] = setting(
        (),
        help="prefix of a .bin/.idx pair, without extension; several prefixes, or alternating weights and prefixes, "
        "are blended",
    )
    data_args_path: str | None = setting(None, help="file with the arguments of --data-path")
    train_data_path: tuple[str, ...] = setting((), help="like --data-path, for training only")
    valid_data_path: tuple[str, ...] = setting((), help="like --data-path, for validation only")
    test_data_path: tuple[str, ...] = setting((), help="like --data-path, for the test only")
    per_split_data_args_path: str | None = setting(
        None, help='JSON file with the arguments of these three: {"train": [...], "valid": [...], "test": [...]}'
    )
    mid_level_dataset_surplus: float = setting(
        0.005,
        help="fraction by which each dataset of a weighted blend is built larger than its weight requires",
        at_least=0,
    )
    padded_vocab_size: int | None = setting(
        None,
        help="rows of the embedding; by default the vocabulary size rounded up to a multiple of "
        "--make-vocab-size-divisible-by x --tensor-model-parallel-size",
        unit="tokens",
        at_least=1,
    )
    split: str = setting("969, 30, 1", help="relative sizes of training, validation and test split")
    mock_data: bool = setting(False, help="synthetic data, to try a configuration")
    data_source: tuple[str, ...] = setting(
        (), help="registered datasets, instead of --data-path", registers="dataset", ours=True
    )
    data_source_weights: tuple[float, ...] = setting(
        (), help="weight of each dataset of --data-source; required for several", above=0, ours=True
    )
    data_cache_path: str | None = setting(None, help="folder of the index caches; beside the data by default")
    num_workers: int = setting(2, help="threads that prefetch data; 0 reads between steps", at_least=0)
    num_dataset_builder_threads: int = setting(
        1, help="threads that open and index the datasets of a blend", at_least=1
    )
    eod_mask_loss: bool = setting(False, help="no loss on end-of-document tokens")
    reset_position_ids: bool = setting(False, help="restart positions at 0 after each end-of-document token")
    reset_attention_mask: bool = setting(
        False, help="restrict attention to documents, which end-of-document tokens end"
    )
    dataloader_inter_document_masking: bool = setting(
        False,
        help="like --reset-attention-mask and --reset-position-ids, at the document boundaries of the dataset instead "
        "of end-of-document tokens",
    )
    full_validation: bool = setting(False, help="evaluate the whole validation split once in each evaluation")
    multiple_validation_sets: bool = setting(
        False, help="evaluate the datasets of --valid-data-path separately instead of blended"
    )
    validation_set_names: tuple[str, ...] = setting((), help="names of these sets; their numbers by default")
    mmap_bin_files: bool = setting(True, help="read .bin files by memory mapping")
    dataloader_type: str = setting(
        "single",
        help="order of samples: that of the dataset (single), or reshuffled each epoch (cyclic)",
        choices=("single", "cyclic", "external"),
    )

    @property
    def paths_of_splits(self) -> tuple[tuple[str, ...], ...]:
        """Return the arguments of the data flags for training, validation and test."""
        return self.train_data_path, self.valid_data_path, self.test_data_path

    @property
    def masks_documents(self) -> bool:
        """Return whether attention is restricted to documents."""
        return self.reset_attention_mask or self.dataloader_inter_document_masking

    @property
    def has_data_source(self) -> bool:
        """Return whether any flag names data."""
        paths = (self.data_path, *self.paths_of_splits)
        return any(paths) or self.data_args_path is not None or self.per_split_data_args_path is not None


_NEEDED = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "CharacterTokenizer": ("vocab_file",),
    "NullTokenizer": ("vocab_size",),
}
"""Kind of tokenizer -> the settings that it cannot do without."""

_TAKEN = {
    "HuggingFaceTokenizer": ("tokenizer_special_tokens", "tokenizer_hf_no_include_special_tokens"),
    "SentencePieceTokenizer": ("vocab_extra_ids",),
    "TikTokenizer": ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens", "tokenizer_special_tokens"),
    "BertWordPieceLowerCase": ("vocab_extra_ids",),
    "BertWordPieceCase": ("vocab_extra_ids",),
    "NullTokenizer": ("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
}
"""Kind of tokenizer -> the settings that it takes besides."""

_TIKTOKEN_SIZE = 1 << 17  # ids of a TikTokenizer without --vocab-size
_TIKTOKEN_NAMES = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and its files."""

    tokenizer_type: str = setting(
        "GPT2BPETokenizer",
        help="kind of tokenizer",
        choices=tuple(_NEEDED),
        registers="tokenizer",
        later=("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer", "ByteLevelTokenizer"),
        later_with="work on images, instruction tuning and raw bytes, which is not built",
    )
    vocab_file: str | None = setting(
        None, help="vocab.json of GPT-2 or of characters, or vocab.txt of BERT", aliases=("--vocab",)
    )
    merge_file: str | None = setting(None, help="merges.txt of the GPT-2 tokenizer")
    tokenizer_model: str | None = setting(
        None,
        help="tokenizer.model of SentencePiece kinds, vocabulary of TikTokenizer, or folder of HuggingFaceTokenizer "
        "(or name of a model in the hub's cache)",
    )
    vocab_size: int | None = setting(
        None, help="number of ids of NullTokenizer, or of TikTokenizer (131072 by default)", unit="tokens", at_least=1
    )
    vocab_extra_ids: int = setting(
        0, help="number of tokens <extra_id_0> and on after the vocabulary, as T5 needs", unit="tokens", at_least=0
    )
    tiktoken_pattern: str | None = setting(
        None, help="regular expression of TikTokenizer; v2 by default", choices=("v1", "v2")
    )
    tiktoken_num_special_tokens: int = setting(
        1000, help="number of special ids of TikTokenizer, before its others", unit="tokens", at_least=1
    )
    tokenizer_special_tokens: tuple[str, ...] = setting(
        (),
        help="special tokens: the first ones of TikTokenizer, or additional ones of HuggingFaceTokenizer",
        aliases=("--tiktoken-special-tokens",),
    )
    tokenizer_hf_no_include_special_tokens: bool = setting(
        False, help="HuggingFaceTokenizer adds no special tokens around a text"
    )
    null_tokenizer_eod_id: int | None = setting(
        None,
        help="end-of-document id of NullTokenizer, which then has --vocab-size ids as in Megatron after 0.16",
        at_least=0,
    )
    null_tokenizer_pad_id: int | None = setting(
        None, help="padding id of such a NullTokenizer; -1 for none", at_least=-1
    )

    @property
    def missing_flags(self) -> tuple[str, ...]:
        """Return the flags that this kind of tokenizer requires and that are not given."""
        return tuple(_flag(name) for name in _NEEDED.get(self.tokenizer_type, ()) if not getattr(self, name))

    @property
    def taken(self) -> tuple[str, ...]:
        """Return the settings that this kind of tokenizer uses, apart from itself; all for a registered one."""
        if isinstance(self.tokenizer_type, Registered):
            return tuple(about.name for about in fields(self) if about.name != "tokenizer_type")
        return (*_NEEDED.get(self.tokenizer_type, ()), *_TAKEN.get(self.tokenizer_type, ()))

    @property
    def flags_for_moved_files(self) -> str:
        """Return the flags for the same tokenizer with files in other folders."""
        own = {about.name: about.default for about in fields(self)}
        given = {name: getattr(self, name) for name in self.taken if getattr(self, name) != own[name]}
        files = {*self.named_files, "tokenizer_model"}
        words = [f"--tokenizer-type {self.tokenizer_type}"]
        for name, value in given.items():
            shown = "FILE" if name in files else " ".join(value) if isinstance(value, tuple) else str(value)
            words.append(_flag(name) if value is True else f"{_flag(name)} {shown}")
        return " ".join(words)

    @property
    def named_files(self) -> dict[str, str]:
        """Setting -> the file that it names, as far as it must be one: Hugging Face's may be a folder or a name."""
        names = ["vocab_file", "merge_file"]
        if self.tokenizer_type != "HuggingFaceTokenizer" and "tokenizer_model" in self.taken:
            names.append("tokenizer_model")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def contradictions(self) -> list[str]:
        """Return an error for each setting that is invalid for this kind of tokenizer; opens no file."""
        if self.tokenizer_special_tokens and "tokenizer_special_tokens" not in self.taken:
            names = " ".join(self.tokenizer_special_tokens)
            return [
                f"--tokenizer-special-tokens {names}: --tokenizer-type {self.tokenizer_type} takes none; "
                "TikTokenizer and HuggingFaceTokenizer do"
            ]
        if self.tokenizer_type == "TikTokenizer":
            return self._contradictions_of_tiktoken()
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size:
            ids = {
                "--null-tokenizer-eod-id": self.null_tokenizer_eod_id,
                "--null-tokenizer-pad-id": self.null_tokenizer_pad_id,
            }
            return [
                f"{flag} {number} is not below --vocab-size {self.vocab_size}"
                for flag, number in ids.items()
                if number is not None and number >= self.vocab_size
            ]
        return []

    @property
    def has_separate_eod(self) -> bool:
        """Return whether this is Megatron's NullTokenizer after 0.16, whose last id ends a document."""
        return self.null_tokenizer_eod_id is not None or self.null_tokenizer_pad_id is not None

    def _contradictions_of_tiktoken(self) -> list[str]:
        names, num_special = self.tokenizer_special_tokens, self.tiktoken_num_special_tokens
        size = self.vocab_size or _TIKTOKEN_SIZE
        found = []
        if lacking := [token for token in _TIKTOKEN_NAMES if names and token not in names]:
            found.append(f"--tokenizer-special-tokens lacks {' '.join(lacking)}, which TikTokenizer needs")
        if twice := sorted({token for token in names if names.count(token) > 1}):
            found.append(f"--tokenizer-special-tokens names {' '.join(twice)} more than once")
        least = len(names or _TIKTOKEN_NAMES)
        if not least <= num_special < size:
            found.append(
                f"--tiktoken-num-special-tokens {num_special}: there are {least} special tokens with a name and "
                f"--vocab-size {size} ids in all; give a number from {least} to {size - 1}"
            )
        return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
