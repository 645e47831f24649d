"""The vocabulary of a CharacterTokenizer, made from the inputs of a preprocessing run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO

from megalith.data.indexed import open_partial
from megalith.data.preprocess_options import PreprocessOptions, ProgressListener
from megalith.data.sources import BadDocument, Source
from megalith.errors import DataError
from megalith.progress import task
from megalith.tokenizers.character import character_vocabulary


class InputVocabulary:
    """Vocabulary of a run: the one given, or the characters of its inputs, in a locked partial file until `finish`.

    So a run that fails leaves the vocabulary of the existing dataset.

    Attributes:
        tokenizer: tokenizer of the run, with the partial file.
    """

    def __init__(self, options: PreprocessOptions, sources: Iterable[Source], listener: ProgressListener) -> None:
        """Collect the characters and write the partial file, unless a vocabulary is given.

        Raises:  DataError if a source is damaged, the file cannot be written, or another process is writing it.
        """
        self.tokenizer = options.tokenizer
        self._file: IO[bytes] | None = None
        if options.named_tokenizer is options.tokenizer:
            return
        self._path, self._listener = Path(str(options.named_tokenizer.vocab_file)), listener
        found = set[str]()
        with task("collecting characters"):
            for chunk in chain.from_iterable(source.chunks() for source in sources):
                for _, document in chunk.payload.read(options.source.keys).documents:
                    if not isinstance(document, BadDocument):  # the encoding reports it, with its place
                        found.update(*(text if isinstance(text, str) else "".join(text) for text in document))
        self._count = len(found)
        # Evaluation reads whole files, whose line breaks are in no document where each line or paragraph is one.
        self._write(character_vocabulary(found | {"\n"}, with_eod=options.append_eod))

    def _write(self, content: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_partial(self._path, 0)
            self._file.write(content.encode("utf-8"))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.close()
            raise DataError(f"cannot write {self._path}: {error.strerror}") from error
        self.tokenizer = replace(self.tokenizer, vocab_file=str(self._file.name))

    def finish(self) -> None:
        """Give the file its final name. Raises DataError if it cannot be renamed."""
        if self._file is None:
            return
        try:
            os.replace(self._file.name, self._path)
        except OSError as error:
            raise DataError(f"cannot write {self._path}: {error.strerror}") from error
        self._file.close()
        self._file = None
        self._listener.note(f"made --vocab-file {self._path} from the {self._count} characters of the input")

    def close(self) -> None:
        """Remove the partial file, unless `finish` has renamed it."""
        if self._file is not None:
            with suppress(OSError):
                os.unlink(self._file.name)
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                self._file.close()
