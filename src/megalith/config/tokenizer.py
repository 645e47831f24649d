"""The settings of the tokenizer, apart from the other groups: preprocessing needs no others."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megalith.config.fields import setting
from megalith.registry import Registered

_NEEDED = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SFTTokenizer": ("tokenizer_model",),
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
    "SFTTokenizer": ("tokenizer_special_tokens", "tokenizer_hf_no_include_special_tokens"),
    "SentencePieceTokenizer": ("vocab_extra_ids",),
    "TikTokenizer": ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens", "tokenizer_special_tokens"),
    "BertWordPieceLowerCase": ("vocab_extra_ids",),
    "BertWordPieceCase": ("vocab_extra_ids",),
    "NullTokenizer": ("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
}
"""Kind of tokenizer -> the settings that it takes besides."""

TIKTOKEN_SIZE = 1 << 17  # ids of a TikTokenizer without --vocab-size
_TIKTOKEN_NAMES = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and its files."""

    tokenizer_type: str = setting(
        "GPT2BPETokenizer",
        help="kind of tokenizer; SFTTokenizer is HuggingFaceTokenizer",
        choices=tuple(_NEEDED),
        registers="tokenizer",
        later=("MultimodalTokenizer", "NullMultimodalTokenizer", "ByteLevelTokenizer"),
        later_with="work on images and raw bytes, which is not built",
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
    def is_hugging_face(self) -> bool:
        """Return whether --tokenizer-model is a folder with tokenizer.json."""
        return self.tokenizer_type in ("HuggingFaceTokenizer", "SFTTokenizer")

    @property
    def taken(self) -> tuple[str, ...]:
        """Return the settings that this kind of tokenizer uses, apart from itself; all for a registered one."""
        if isinstance(self.tokenizer_type, Registered):
            return tuple(about.name for about in fields(self) if about.name != "tokenizer_type")
        return (*_NEEDED.get(self.tokenizer_type, ()), *_TAKEN.get(self.tokenizer_type, ()))

    @property
    def unread(self) -> dict[str, str]:
        """Flag -> value of the settings that are set and that this kind of tokenizer does not look at."""
        others = [about for about in fields(self) if about.name not in ("tokenizer_type", *self.taken)]
        set_ = {about.name: getattr(self, about.name) for about in others if getattr(self, about.name) != about.default}
        return {_flag(name): str(value) for name, value in set_.items()}

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
        if not self.is_hugging_face and "tokenizer_model" in self.taken:
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
        size = self.vocab_size or TIKTOKEN_SIZE
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
