"""Conversations that `--data-path` names as text under `--sft`: each file becomes a dataset with a loss mask, once.

`preprocess` makes it, and goes on after a kill. It lies in --data-cache-path, else in the folder `.sft` beside the
text, as NAME-KEY_messages_document. KEY is a hash of all that decides its bytes: text, tokenizer, template,
what is learnt.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path

from megalith.config import DataConfig, TokenizerConfig
from megalith.data.index_cache import IndexCache
from megalith.data.indexed import TEMPLATE, IndexedDataset, idx_path
from megalith.data.preprocess import preprocess
from megalith.data.preprocess_options import PreprocessOptions, ProgressListener, plan_sources
from megalith.data.sft_dataset import has_mask
from megalith.data.sources import SourceOptions
from megalith.data.sources.documents import MESSAGES
from megalith.distributed.machine import usable_cores
from megalith.errors import ConfigError, MegalithError
from megalith.progress import task
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.chat_template import (
    BUILT_IN,
    TOKENIZERS,
    ends_of_turn,
    find_template,
    has_template,
    template_beside,
)

_FLAG, _DEFAULT = "--sft-tokenizer-prompt-format", "default"
_OF_MEGATRON = (_DEFAULT, "identity", "nemotron-h-aligned", "nemotron-nano-v2")
"""Formats that put the end of document behind every conversation; others do where no special token ends an answer."""
_VERSION = 2  # of how conversations become tokens; another one prepares them again
_BLOCK = 1 << 24


class Preparation:
    """How text becomes conversations: template, mask, tokenizer and place.

    Raises:  ConfigError if the tokenizer has no template and none is named, or there is none of that name.
    """

    def __init__(self, data: DataConfig, config: TokenizerConfig, tokenizer: Tokenizer) -> None:
        named = data.sft_tokenizer_prompt_format
        self._name = TOKENIZERS if named in (None, _DEFAULT) else str(named)
        known = f"give {', '.join(BUILT_IN)} or a Jinja file"
        if self._name == TOKENIZERS and template_beside(tokenizer) is None:
            raise ConfigError(f"{_FLAG} {named or 'is missing'}: the tokenizer has no chat template; {known}")
        if not has_template(self._name):
            raise ConfigError(f"{_FLAG} {named}: no such template; {known}")
        self._template = find_template(self._name, tokenizer)
        self._folder, self._config, self._tokenizer = data.data_cache_path, config, tokenizer
        self._loss_mask = "all" if named == _DEFAULT else "assistant"
        is_ended = named not in _OF_MEGATRON and ends_of_turn(tokenizer, self._template)
        self._append_eod = tokenizer.eod is not None and not is_ended

    def key(self, text: str) -> str:
        """Return the hash of all that decides the dataset of a text. Raises ConfigError if it cannot be read."""
        plan = plan_sources(self._options(text))
        if plan.violations:
            raise ConfigError(plan.violations)
        how = [_VERSION, self._template.source, self._loss_mask, self._append_eod, self._tokenizer.fingerprint()]
        digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode())
        with task(f"reading {text}", sum(source.disk_bytes for source in plan.sources), "B") as shown:
            for source in plan.sources:
                digest.update(b"%d " % source.disk_bytes)
                with source.path.open("rb") as file:
                    while block := file.read(_BLOCK):
                        digest.update(block)
                        shown.advance(len(block))
        return digest.hexdigest()[:16]

    def prefix(self, text: str, key: str) -> str:
        """Return the prefix of the dataset of a text."""
        return self._options(text, key).output_prefixes()[MESSAGES]

    def prepare(self, text: str, key: str, say: Callable[[str], None]) -> None:
        """Make the dataset of a text unless it is there, and say where it is.

        Raises:
            DataError: a line cannot be learnt from; the message has its place and the remedy.
            ConfigError: the folder is not writable, or a library for the format is missing.
        """
        options, prefix = self._options(text, key), self.prefix(text, key)
        found = _is_complete(prefix)
        if not found:
            stem = Path(options.output_prefix)
            with IndexCache(stem.parent, stem.name, "").lock():
                if not _is_complete(prefix):
                    self._make(text, options, say)
        dataset = IndexedDataset(prefix, mmap_bin=False)
        learnt = "every token" if self._loss_mask == "all" else "what the assistant says"
        template = "the tokenizer's template" if self._name == TOKENIZERS else f"template {self._name}"
        say(
            f"{text}: {len(dataset)} conversations, {dataset.num_tokens} tokens by {template}, {learnt} is learnt; "
            f"{'found' if found else 'prepared'} in {prefix}"
        )

    def _make(self, text: str, options: PreprocessOptions, say: Callable[[str], None]) -> None:
        listener = ProgressListener()
        listener.note = lambda text: say(text)  # type: ignore[method-assign]
        try:
            with task(f"preparing {text}", unit="B") as shown:
                listener.advanced = lambda snapshot: shown.reach(snapshot.disk)  # type: ignore[method-assign]
                preprocess(options, listener)
        except ConfigError as error:
            place = f"--output-prefix {options.output_prefix}"
            raise ConfigError([one.replace(place, "--data-cache-path") for one in error.violations]) from error
        except MegalithError as error:
            words = ["megalith", "preprocess", "--input", text, "--output-prefix", Path(text).stem, "--loss-mask"]
            words += [self._loss_mask, "--chat-template", self._name, "--bad-lines", "skip"]
            raise type(error)(
                f"{error}\nCorrect the text, give another template by {_FLAG}, or leave such lines out by this command "
                f"and give its {Path(text).stem}_{MESSAGES}_document in place of {text}:\n  {shlex.join(words)} "
                f"{'--append-eod ' * self._append_eod}{self._config.flags_for_moved_files}"
            ) from error

    def _options(self, text: str, key: str = "") -> PreprocessOptions:
        path = Path(text).absolute()
        folder = Path(self._folder) if self._folder else path.parent / ".sft"
        return PreprocessOptions(
            (text,),
            str(folder / f"{path.name}-{key}"),
            self._config,
            SourceOptions(keys=(MESSAGES,)),
            append_eod=self._append_eod,
            chat_template=self._name,
            loss_mask=self._loss_mask,
            as_in_megatron=True,
            workers=usable_cores(),
        )


def _is_complete(prefix: str) -> bool:
    """Return whether preparation has ended: the template is written last."""
    return idx_path(prefix).is_file() and has_mask(prefix) and Path(prefix + TEMPLATE).is_file()
