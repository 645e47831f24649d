"""The settings of the data."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting


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
        "are blended; with --sft also files of conversations",
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
    data_cache_path: str | None = setting(
        None, help="folder of the index caches, and of what --sft makes of text; beside the data by default"
    )
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
    sft: bool = setting(
        False,
        help="supervised fine-tuning: rows of whole conversations without attention from one to another, the loss on "
        "the tokens that PREFIX_loss_mask names alone; --calculate-per-token-loss is on by default",
    )
    sft_packing: bool = setting(
        True, help="with --sft: as many conversations in a row as fit (best fit), instead of one", ours=True
    )
    sft_overlong: str = setting(
        "refuse",
        help="with --sft: conversations of more than --seq-length + 1 tokens are an error, cut at the end, or left out",
        choices=("refuse", "truncate", "drop"),
        ours=True,
    )
    sft_sample_prompts: int = setting(
        0,
        help="with --sft: held-out prompts that are answered at each evaluation, in log, report and trackers (greedy, "
        "at most 64 tokens); not with pipeline or context parallelism or FSDP2",
        unit="prompts",
        at_least=0,
        ours=True,
    )
    sft_tokenizer_prompt_format: str | None = setting(
        None,
        help="with --sft and conversations as text: the chat template, as --chat-template of megalith preprocess has "
        "it; default: the tokenizer's, every token learnt; without the flag: the tokenizer's, answers learnt",
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
        return self.reset_attention_mask or self.dataloader_inter_document_masking or self.sft

    @property
    def has_data_source(self) -> bool:
        """Return whether any flag names data."""
        paths = (self.data_path, *self.paths_of_splits)
        return any(paths) or self.data_args_path is not None or self.per_split_data_args_path is not None
