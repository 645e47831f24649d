"""Writer of a checkpoint of any format as a Hugging Face model folder: safetensors, config.json and the tokenizer.

One tensor at a time is read and written, in the order of the files, so that memory is bounded by the largest tensors.
The files are those that `save_pretrained` would write of the same weights, byte for byte. The folder is
committed by a rename.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.base import refuse_adapters
from megalith.checkpoint.content import CheckpointContent, Chunk, volume
from megalith.checkpoint.files.commit import temp_folder, write_durably
from megalith.checkpoint.files.folder import CheckpointFolder, open_verified
from megalith.checkpoint.formats.torch_dist import WORD_EMBEDDINGS
from megalith.checkpoint.global_parameters import OUTPUT_LAYER, GlobalParameters
from megalith.checkpoint.sources.adapters import InPrecision, WeightsOnly, args_of
from megalith.checkpoint.sources.huggingface import (
    CONFIG_FILE,
    INDEX_FILE,
    SAFETENSORS_DTYPES,
    WEIGHTS_FILE,
    files_of_tokenizer,
)
from megalith.checkpoint.sources.source import Contents, Source, is_one_checkpoint, short
from megalith.checkpoint.store.store import locate
from megalith.config import ModelConfig
from megalith.config.from_args import refuse_registered_parts
from megalith.errors import CheckpointError, ConfigError
from megalith.models.huggingface import DTYPES, config_of_model, family_for
from megalith.models.huggingface_family import Family
from megalith.models.huggingface_tensors import TheirTensor
from megalith.models.layer_options import for_any_batch
from megalith.progress import advance, task
from megalith.tokenizers.byte_level import END_OF_TEXT, read_byte_pair_vocabulary, tokenizer_json
from megalith.tokenizers.huggingface import TOKENIZER_FILE
from megalith.tokenizers.sentence_piece import MODEL_FILE, load_model
from megalith.tokenizers.word_piece import WordPieceTokenizer, tokenizer_config
from megalith.tokenizers.word_piece import tokenizer_json as word_piece_json

MAX_SHARD_SIZE = "5GB"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_ALIGNMENT = 8
_TOKENIZER_CONFIG, _GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
_TOKENS_OF_GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class ExportOptions:
    """Precision, shard size, vocabulary and family of an export."""

    dtype: str | None = None  # of all weights, one of `DTYPES`; that of each in the checkpoint if None
    max_shard_size: str = MAX_SHARD_SIZE  # bytes of a file, such as 5GB; a larger tensor has a file of its own
    # rows of the vocabulary that are kept; by default the tokens of the checkpoint's tokenizer
    true_vocab_size: int | None = None
    # the family; by default that of its origin, else the first that can describe the model
    model_type: str | None = None


@dataclass
class ExportResult:
    """Path, family and size of an exported folder, with notes."""

    path: Path  # the folder
    family: Family  # what it says it is
    architecture: str  # the class of transformers that it names
    vocab_size: int  # rows of its vocabulary
    bytes: int  # of all weights
    shards: int  # files that they are in
    notes: list[str] = field(default_factory=list)  # for the user


def bytes_of_size(text: str) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 1000000, in powers of ten; a ConfigError if it is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?B|)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size {text} is not a size; write it as 5GB, 500MB or a number of bytes")
    return size


class Weights:
    """Weights of a checkpoint as an export writes them: in `dtype` or in their own, read on demand."""

    def __init__(self, source: Source, dtype: str | None = None) -> None:
        self._source = WeightsOnly(InPrecision(source, getattr(torch, dtype) if dtype else None))

    def contents(self) -> Contents:
        return self._source.contents()

    def read(self, name: str, shape: Sequence[int], params: GlobalParameters) -> Tensor:
        """Read the first rows of a parameter, as many as `shape` says."""
        slot = params.stacking.slot(name)
        tensor = torch.empty(tuple(shape), dtype=self.contents().tensors[slot.key].dtype)
        offset = (*slot.index, *(0,) * tensor.ndim)
        chunk = Chunk(slot.key, tensor[(None,) * len(slot.index)], offset, params.stacked_shape(name))
        self._source.read(CheckpointContent([chunk]))
        return tensor


def export(
    path: Path,
    destination: Path,
    wanted: ExportOptions,
    *,
    iteration: int | None = None,
    check: Callable[[Path, Weights, GlobalParameters, int], None] | None = None,
) -> ExportResult:
    """Write a checkpoint, given as for `locate`, as a Hugging Face model folder; a ConfigError names illegal options.

    Args:
        destination: the folder to make; it may exist if it is empty.
        check: called before the folder gets its name, with the folder as it is built, the weights, the model and the
            rows of the vocabulary; it raises to refuse.
    """
    limit = check_options(wanted)
    refuse_existing(destination)
    about = describe(path, wanted, iteration)
    layout = _Layout.of(about.table, about.params, about.weights.contents(), limit)
    files, notes = about.files, about.notes
    destination = destination.resolve()
    with temp_folder(destination, layout.bytes) as new:
        reader = TensorReader(about)
        with task("exporting", layout.bytes, "B", counts="bytes exported"):
            for name, shard in zip(layout.names, layout.shards, strict=True):
                _write_safetensors(new.path / name, shard, reader)
        if len(layout.shards) > 1:
            files[INDEX_FILE] = _json(layout.index())
        for name, data in files.items():
            write_durably(new.path / name, data)
        if check is not None:
            with task("comparing logits with transformers"):
                check(new.path, about.weights, about.params, about.rows)
        new.commit()
    architecture = about.config.get("architectures", [about.family.architecture])[0]
    return ExportResult(destination, about.family, architecture, about.rows, layout.bytes, len(layout.shards), notes)


def refuse_existing(destination: Path) -> None:
    """Raise a CheckpointError unless `destination` is new or an empty folder, not named as a checkpoint of a run."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{destination} exists already; give a new or an empty folder")
    if is_one_checkpoint(destination):
        raise CheckpointError(f"{destination} has the name of a checkpoint of a run; give a folder of another name")


@dataclass
class Description:
    """A checkpoint as a Hugging Face model: config.json, tensors and tokenizer; no weight is read yet."""

    family: Family
    params: GlobalParameters
    rows: int  # of the vocabulary
    weights: Weights
    table: list[TheirTensor]  # in the order of the `state_dict`
    config: Mapping[str, Any]  # config.json
    files: dict[str, bytes]  # config.json and the tokenizer's
    notes: list[str]  # for the user


def describe(path: Path, wanted: ExportOptions, iteration: int | None) -> Description:
    """Return a checkpoint, given as for `locate`, as a Hugging Face model; all but the shard size is checked."""
    found = locate(path, iteration)
    folder = open_verified(found)
    params, manifest = _params_of(folder), folder.manifest() or {}
    model, notes = for_any_batch(params.model)
    params = replace(params, model=model)
    original = _original(folder, manifest)
    family = family_for(params.model, wanted.model_type or _origin(original, params.model))
    rows = _rows(wanted, params, manifest, original, notes)
    weights = Weights(folder.source, wanted.dtype)
    table = list(family.tensors(params.model, rows))
    contents = weights.contents()
    _check_whole(contents, params, str(found))
    special = (manifest.get("tokenizer") or {}).get("special", {})
    config = config_of_model(
        family,
        params.model,
        rows,
        short(contents.tensors[WORD_EMBEDDINGS].dtype),
        eod=special.get("eod"),
        special=special,
        original=original,
    )
    files = _further_files(found, config, manifest.get("tokenizer") or {}, notes)
    return Description(family, params, rows, weights, table, config, files, notes)


def _params_of(folder: CheckpointFolder) -> GlobalParameters:
    args, where = args_of(folder.source.common()), str(folder.path)
    why = "transformers has no class for them; megalith.api.load_trained reads the weights"
    refuse_registered_parts(args, where, why)
    refuse_adapters(args, where)
    return GlobalParameters.from_args(args, where)


def check_options(wanted: ExportOptions, found: Sequence[str] = ()) -> int:
    """Return the most bytes of a shard; a ConfigError that names all options that are wrong, `found` by others too."""
    wrong, limit = [*found], 0
    try:
        limit = bytes_of_size(wanted.max_shard_size)
    except ConfigError as error:
        wrong += error.violations
    if wanted.dtype is not None and wanted.dtype not in DTYPES:
        wrong.append(f"--dtype {wanted.dtype} is none of {', '.join(DTYPES)}")
    if wanted.true_vocab_size is not None and wanted.true_vocab_size < 1:
        wrong.append(f"--true-vocab-size {wanted.true_vocab_size} is less than 1")
    if wrong:
        raise ConfigError(wrong)
    return limit


def _original(folder: CheckpointFolder, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the config.json that the model came with, if it came from Hugging Face."""
    config = getattr(folder.source, "config", None)
    found = config if config is not None else manifest.get("huggingface", {}).get("config")
    return found if isinstance(found, Mapping) else None


def _origin(original: Mapping[str, Any] | None, model: ModelConfig) -> str | None:
    """Return the family of the original config, if it can describe the model."""
    kind = original.get("model_type") if original is not None else None
    try:
        return family_for(model, kind).model_type if isinstance(kind, str) else None
    except CheckpointError:
        return None


def _rows(
    wanted: ExportOptions,
    params: GlobalParameters,
    manifest: Mapping[str, Any],
    original: Mapping[str, Any] | None,
    notes: list[str],
) -> int:
    """Return the rows of the vocabulary to keep: those beyond the true one are padding for tensor-parallel ranks."""
    known = (original or {}).get("vocab_size") or manifest.get("tokenizer", {}).get("vocab_size")
    rows = wanted.true_vocab_size or known
    if rows is None:
        notes.append(
            f"all {params.vocab_size} rows of the vocabulary are kept, padding included: the checkpoint does not say "
            "how many tokens its tokenizer has; --true-vocab-size N leaves the others out"
        )
        return params.vocab_size
    if rows > params.vocab_size:
        whose = "--true-vocab-size" if wanted.true_vocab_size else "the checkpoint's tokenizer"
        raise CheckpointError(f"{whose} {rows} is more than the {params.vocab_size} rows of the embedding")
    if rows < params.vocab_size:
        notes.append(f"the vocabulary has {rows} rows: {params.vocab_size - rows} rows of padding are left out")
    return int(rows)


def _check_whole(contents: Contents, params: GlobalParameters, where: str) -> None:
    """Check that the checkpoint holds the weights of its model, and no others."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name in params.shapes:
        wanted[params.stacking.slot(name).key] = params.stacked_shape(name)
    lines = [f"{key} is missing" for key in wanted if key not in contents.tensors]
    lines += [f"{key} is not a part of the model" for key in contents.tensors if key not in wanted]
    lines += [
        f"{key} has shape {list(contents.tensors[key].shape)} instead of {list(shape)}"
        for key, shape in wanted.items()
        if key in contents.tensors and contents.tensors[key].shape != shape
    ]
    lines += [
        f"{key} is {short(stored.dtype)}; give --dtype"
        for key, stored in contents.tensors.items()
        if stored.dtype not in _NAMES
    ]
    if lines:
        raise CheckpointError("\n  ".join([f"{where} does not hold the weights of its model:", *lines]))


def _further_files(
    found: Path, config: Mapping[str, Any], card: Mapping[str, Any], notes: list[str]
) -> dict[str, bytes]:
    """Return config.json and the tokenizer's files; `card` is that of the tokenizer, empty if it is not known."""
    files = {name: path.read_bytes() for name, path in files_of_tokenizer(found).items()}
    if not files:
        notes.append("the checkpoint has no files of a tokenizer; copy those that belong to it into the folder")
    elif card.get("class") == "CharacterTokenizer":
        notes.append("transformers has no tokenizer of characters; vocab.json has the id of each")
    elif "merges.txt" in files and not {"tokenizer.json", _TOKENIZER_CONFIG} & set(files):
        files |= _of_byte_pairs(found, config)
    elif "vocab.txt" in files and not {"tokenizer.json", _TOKENIZER_CONFIG} & set(files):
        files |= _of_word_pieces(found / "vocab.txt", card)
    elif MODEL_FILE in files and not {"tokenizer.json", _TOKENIZER_CONFIG} & set(files):
        files[_TOKENIZER_CONFIG] = _json(_of_sentence_piece(found / MODEL_FILE, card))
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):  # it continues texts
        named = {key: config[key] for key in _TOKENS_OF_GENERATION if config.get(key) is not None}
        files.setdefault(_GENERATION_CONFIG, _json({"_from_model_config": True, **named}))
    return {**files, CONFIG_FILE: _json(config)}


def _of_byte_pairs(folder: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files that transformers, `tokenizers` and converters read beside vocab.json and merges.txt."""
    vocabulary = read_byte_pair_vocabulary(*(str(folder / name) for name in ("vocab.json", "merges.txt")))
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.get("n_positions", config.get("max_position_embeddings")),
    }
    return {TOKENIZER_FILE: tokenizer_json(vocabulary).encode("utf-8"), _TOKENIZER_CONFIG: _json(settings)}


def _of_word_pieces(path: Path, card: Mapping[str, Any]) -> dict[str, bytes]:
    """Return those of a vocabulary of WordPiece; with sentinels, as T5 has them, it takes a tokenizer.json."""
    lower, extra_ids = card.get("class", "") != "BertWordPieceCase", card.get("settings", {}).get("vocab_extra_ids", 0)
    if not extra_ids:
        return {_TOKENIZER_CONFIG: _json({"tokenizer_class": "BertTokenizer", "do_lower_case": lower})}
    tokenizer = WordPieceTokenizer(path, lower_case=lower, vocab_extra_ids=extra_ids)
    content = word_piece_json(tokenizer).encode("utf-8")
    return {TOKENIZER_FILE: content, _TOKENIZER_CONFIG: _json(tokenizer_config(tokenizer))}


def _of_sentence_piece(path: Path, card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by which transformers encode with a SentencePiece model as the training did."""
    model = load_model("export", path)
    ids = {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id(), "pad": model.pad_id()}
    special = {f"{role}_token": model.id_to_piece(number) for role, number in ids.items() if number >= 0}
    begins = card.get("class", "Llama2Tokenizer") == "Llama2Tokenizer"
    return {"tokenizer_class": "LlamaTokenizer", "add_bos_token": begins, "add_eos_token": False, **special}


def _json(body: Mapping[str, Any]) -> bytes:
    """Serialise as transformers does."""
    return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode()


# --- the layout of the files ---


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file."""

    tensor: TheirTensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return volume(self.tensor.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Layout:
    """Tensors of each file, in the order of the `state_dict`."""

    shards: list[list[_Entry]]

    @classmethod
    def of(cls, table: Sequence[TheirTensor], params: GlobalParameters, contents: Contents, limit: int) -> _Layout:
        """Cut the tensors, in their order, into files of at most `limit` bytes, as transformers does."""
        shards: list[list[_Entry]] = []
        current: list[_Entry] = []
        for tensor in table:
            slot = params.stacking.slot(tensor.parts[0].parameter)
            entry = _Entry(tensor, contents.tensors[slot.key].dtype)
            if entry.bytes > limit:
                shards.append([entry])
                continue
            if sum(other.bytes for other in current) + entry.bytes > limit:
                shards.append(current)
                current = []
            current.append(entry)
        return cls([*shards, current] if current else shards)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for shard in self.shards for entry in shard)

    @property
    def names(self) -> list[str]:
        if len(self.shards) == 1:
            return [WEIGHTS_FILE]
        count = len(self.shards)
        return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]

    def index(self) -> dict[str, Any]:
        """Return the content of model.safetensors.index.json."""
        named = zip(self.names, self.shards, strict=True)
        elements = sum(volume(entry.tensor.shape) for shard in self.shards for entry in shard)
        return {
            "metadata": {"total_parameters": elements, "total_size": self.bytes},
            "weight_map": {entry.tensor.name: name for name, shard in named for entry in shard},
        }


class TensorReader:
    """Tensors of Hugging Face made of the weights; a parameter that several are made of is read once."""

    def __init__(self, about: Description) -> None:
        self._weights, self._params, self._rows = about.weights, about.params, about.rows
        uses = Counter(name for tensor in about.table for name in {part.parameter for part in tensor.parts})
        self._shared = {name for name, count in uses.items() if count > 1}
        self._kept: tuple[str, Tensor] | None = None

    def tensor(self, tensor: TheirTensor, dtype: torch.dtype) -> Tensor:
        """Read one tensor, contiguous."""
        whole = torch.empty(tensor.shape, dtype=dtype)
        for name, parts in groupby(tensor.parts, lambda part: part.parameter):
            parameter = self._parameter(name)
            for part in parts:
                tensor.rows(whole, part).copy_(parameter.narrow(0, part.at, part.length))
        return whole

    def _parameter(self, name: str) -> Tensor:
        if self._kept is not None and self._kept[0] == name:
            return self._kept[1]
        whole = self._params.shapes[name]
        shape = (self._rows, *whole[1:]) if name in (WORD_EMBEDDINGS, OUTPUT_LAYER) else whole
        tensor = self._weights.read(name, shape, self._params)
        if name in self._shared:
            self._kept = (name, tensor)
        return tensor


def _write_safetensors(path: Path, shard: Sequence[_Entry], reader: TensorReader) -> None:
    """Write one file: the length of the header, the header, the tensors without gaps.

    Tensors are in the order of the library: by dtype, then by name. Source: github.com/huggingface/safetensors.
    """
    order = sorted(shard, key=lambda entry: (list(_NAMES).index(entry.dtype), entry.tensor.name))
    header = json.dumps({"__metadata__": {"format": "pt"}, **dict(_places(order))}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for entry in order:
            flat = reader.tensor(entry.tensor, entry.dtype).view(-1).view(torch.uint8)
            file.write(flat.numpy().data)
            advance("bytes exported", entry.bytes)
        file.flush()
        os.fsync(file.fileno())


def _places(order: Sequence[_Entry]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the header: dtype, shape and byte offsets of each tensor."""
    start = 0
    for entry in order:
        stop = start + entry.bytes
        shape = list(entry.tensor.shape)
        yield entry.tensor.name, {"dtype": _NAMES[entry.dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
