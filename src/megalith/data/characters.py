"""The vocabulary of a CharacterTokenizer, made from the inputs of a preprocessing run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from megalith.data.preprocess_options import PreprocessOptions, ProgressListener
from megalith.data.sources import BadDocument, Source
from megalith.errors import DataError
from megalith.progress import task
from megalith.tokenizers.character import character_vocabulary


def with_vocabulary(
    options: PreprocessOptions, sources: Iterable[Source], listener: ProgressListener
) -> PreprocessOptions:
    """Return the options with the file of their vocabulary, written here if it is to be made from the sources.

    Raises:  DataError if a source is damaged, or the file cannot be written.
    """
    tokenizer = options.named_tokenizer
    if tokenizer is options.tokenizer:
        return options
    path, found = Path(str(tokenizer.vocab_file)), set[str]()
    with task("collecting characters"):
        for chunk in chain.from_iterable(source.chunks() for source in sources):
            for _, document in chunk.payload.read(options.source.keys).documents:
                if not isinstance(document, BadDocument):  # the encoding reports it, with its place
                    found.update(*(text if isinstance(text, str) else "".join(text) for text in document))
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Evaluation reads whole files, whose line breaks are in no document where each line or paragraph is one.
        partial.write_text(character_vocabulary(found | {"\n"}, with_eod=options.append_eod), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    listener.note(f"made --vocab-file {path} from the {len(found)} characters of the input")
    return replace(options, tokenizer=tokenizer)
