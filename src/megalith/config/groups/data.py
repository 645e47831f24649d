"""The settings of the data and of its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting

_WORK_DATA = "the complete data path"


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from and how they are cut into samples."""

    seq_length: int = setting(help="tokens of one sample", unit="tokens", at_least=1)
    data_path: tuple[str, ...] = setting((), help="prefix of a .bin/.idx pair, without the ending")
    split: str = setting("969, 30, 1", help="parts for training, validation and test")
    mock_data: bool = setting(False, help="made-up data, to try a configuration")
    data_cache_path: str | None = setting(None, help="folder of the index caches; beside the data unless given")
    num_workers: int = setting(2, help="threads that read data ahead; 0 reads between the steps", at_least=0)
    eod_mask_loss: bool = setting(False, help="no loss on end-of-document tokens")
    mmap_bin_files: bool = setting(True, help="read .bin files through a memory map")
    dataloader_type: str = setting(
        "single",
        help="order of the samples",
        choices=("single",),
        later=("cyclic", "external"),
        later_with=_WORK_DATA,
    )


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and its files."""

    tokenizer_type: str = setting(
        "GPT2BPETokenizer",
        help="kind of tokenizer",
        choices=("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"),
        later=(
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
            "ByteLevelTokenizer",
        ),
        later_with=_WORK_DATA,
    )
    vocab_file: str | None = setting(None, help="vocab.json of the GPT-2 tokenizer")
    merge_file: str | None = setting(None, help="merges.txt of the GPT-2 tokenizer")
    tokenizer_model: str | None = setting(None, help="folder of the HuggingFaceTokenizer, with its tokenizer.json")
    vocab_size: int | None = setting(None, help="number of ids of the NullTokenizer", unit="tokens", at_least=1)

    @property
    def lacking(self) -> tuple[str, ...]:
        """The flags that this kind of tokenizer needs and that are not given."""
        if self.tokenizer_type == "NullTokenizer":
            return () if self.vocab_size else ("--vocab-size",)
        if self.tokenizer_type == "HuggingFaceTokenizer":
            return () if self.tokenizer_model else ("--tokenizer-model",)
        files = {"--vocab-file": self.vocab_file, "--merge-file": self.merge_file}
        return tuple(flag for flag, file in files.items() if not file)
