"""Reader of Hugging Face model folders in model space: config.json beside safetensors files, in one piece or shards.

A folder was written by `save_pretrained`, or is a snapshot in the hub's cache, whose files are links. Tensors are
mapped into memory and copied once, into their destination. Nothing is unpickled and nothing is downloaded: a folder
whose weights are in pytorch_model.bin only is refused with the remedy.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalith.checkpoint.content import CheckpointContent, Chunk, check_filled, fill
from megalith.checkpoint.files.hashing import require_file
from megalith.checkpoint.formats.torch_dist import CHECKPOINT_VERSION, WORD_EMBEDDINGS
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.source import Contents, StoredTensor, listing, short
from megalith.config.families import Objective
from megalith.config.groups import PrecisionConfig, TokenizerConfig
from megalith.config.saved_args import weights_args
from megalith.errors import CheckpointError, OtherModelError
from megalith.models.huggingface import DTYPES, HuggingFaceModel, model_of_config
from megalith.models.huggingface_gpt2 import PREFIX as GPT2_PREFIX
from megalith.models.huggingface_tensors import OUTPUT_LAYER, Part, TheirTensor, follows_from_config
from megalith.progress import advance
from megalith.tokenizers.huggingface import TOKENIZER_FILE, holds_tokenizer, tokenizer_files
from megalith.tokenizers.sentence_piece import MODEL_FILE
from megalith.tokenizers.word_piece import EXTRA_IDS

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_AGAIN = "download or copy the folder again"
_GPT2_FILES = ("vocab.json", "merges.txt")
_BERT_FILE, _TOKENIZER_CONFIG = "vocab.txt", "tokenizer_config.json"
_COUNTS = (
    *("n_layer", "num_hidden_layers", "num_layers", "num_decoder_layers", "num_nextn_predict_layers"),
    *("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"),
)
_PLAUSIBLE = 4096  # layers or experts; above it the weights are counted first
_OF_THE_VOCABULARY = {
    "embedding.word_embeddings.weight": 0.0,
    "output_layer.weight": 0.0,
    "lm_head.output_layer.weight": 0.0,
    "output_layer.bias": -1e4,
}
"""Weights with a row for each token -> value of padding rows, with which the loss is that of the true vocabulary."""
SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # in the library's order


@dataclass(frozen=True)
class _Stored:
    """Name, file, shape and dtype of a tensor, from the header of its file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Held:
    """Tensor of the table, the part that a parameter takes of it, and where it is stored."""

    stored: _Stored
    tensor: TheirTensor
    part: Part


class HuggingFaceSource:
    """A folder that `save_pretrained` of Hugging Face wrote, or the snapshot of one in the hub's cache."""

    format = "huggingface"
    config_file, weights_file = CONFIG_FILE, WEIGHTS_FILE

    def __init__(self, path: Path) -> None:
        self.path = path
        self._again: list[tuple[_Stored, TheirTensor]] = []

    @cached_property
    def config(self) -> dict[str, Any]:
        found = _json(self.path / self.config_file)
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path / self.config_file} holds no JSON object")
        return found

    @cached_property
    def about(self) -> HuggingFaceModel:
        """Model that config.json describes; a CheckpointError if it asks for what this version does not have."""
        self._check_counts()
        found = model_of_config(self.config, str(self.path / CONFIG_FILE))
        return replace(found, model=found.family.settled(found.model, self._stored))

    def _check_counts(self) -> None:
        """Refuse more layers or experts than there are tensors, before anything is made for each of them."""
        for key in _COUNTS:
            count = self.config.get(key)
            if isinstance(count, (int, float)) and count > _PLAUSIBLE and count > len(self._stored):
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} says {key} {count}, and the weights beside it are {len(self._stored)} "
                    f"tensors; {_AGAIN}"
                )

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding here."""
        return self.about.family.rows(self.about.vocab_size)

    @cached_property
    def _params(self) -> GlobalParameters:
        return GlobalParameters.from_config(self.about.model, self.vocab_size)

    @cached_property
    def _stored(self) -> dict[str, _Stored]:
        """Tensors of the files by name, from the headers."""
        found: dict[str, _Stored] = {}
        for file, names in _weight_files(self.path, self.weights_file).items():
            with _open(file) as opened:
                held = set(opened.keys())
                if lacking := sorted((names or held) - held):
                    raise CheckpointError(f"{file} lacks {', '.join(lacking[:3])}, which {INDEX_FILE} says is in it")
                for name in sorted(names or held):
                    view = opened.get_slice(name)
                    found[name] = _Stored(name, file, tuple(view.get_shape()), str(view.get_dtype()))
        return found

    @cached_property
    def _held(self) -> dict[str, dict[tuple[int, ...], list[_Held]]]:
        """Key in model space -> index on its leading axes (layer, expert) -> tensors in the files, checked."""
        table, described = self._table(), self.config_file
        stored, lines = dict(self._stored), []
        found: dict[str, dict[tuple[int, ...], list[_Held]]] = {}
        for tensor in table:
            held = next(filter(None, (stored.pop(name, None) for name in _spellings(tensor.name))), None)
            if held is None:
                lines.append(f"{tensor.name} is missing")
            elif held.shape != tensor.shape:
                lines.append(f"{held.name} has shape {list(held.shape)}; by {described} it has {list(tensor.shape)}")
            elif held.dtype not in SAFETENSORS_DTYPES:
                lines.append(f"{held.name} is {held.dtype}; this version reads {', '.join(SAFETENSORS_DTYPES)}")
            elif tensor.again:
                self._again.append((held, tensor))
            else:
                for part in tensor.parts:
                    slot = self._params.stacking.slot(part.parameter)
                    found.setdefault(slot.key, {}).setdefault(slot.index, []).append(_Held(held, tensor, part))
        tied = not self.about.model.untie_embeddings_and_output_weights
        further = [name for name in stored if not follows_from_config(name) and not (tied and name == OUTPUT_LAYER)]
        lines += [f"{name} is not a part of the model that {described} describes" for name in further]
        if lines:
            raise CheckpointError(listing(f"the weights in {self.path} are not those of its {described}", lines))
        return found

    def _table(self) -> Iterable[TheirTensor]:
        """Return the tensors that the files should hold."""
        return self.about.family.tensors(self.about.model, self.about.vocab_size)

    def contents(self) -> Contents:
        tensors = {}
        for key, by_index in self._held.items():
            held = [item for items in by_index.values() for item in items]
            dtype = SAFETENSORS_DTYPES[held[0].stored.dtype]
            for item in held:
                dtype = torch.promote_types(dtype, SAFETENSORS_DTYPES[item.stored.dtype])
            tensors[key] = StoredTensor(self._params.stacked_shape(held[0].part.parameter), dtype, len(held))
        return Contents(tensors, frozenset())

    def common(self) -> dict[str, Any]:
        """Return the common state; the args describe the files, on one process, with the tokenizer of the folder."""
        about, dtype = self.about, self.dtype
        precision = PrecisionConfig(fp16=dtype == "float16", bf16=dtype == "bfloat16")
        args = weights_args(about.model, precision, self.tokenizer)
        return {
            "args": Namespace(**args, padded_vocab_size=self.vocab_size),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": 0,
        }

    @property
    def dtype(self) -> str:
        """Name of the dtype of the word embedding, which is that of the model."""
        dtype = self.contents().tensors["embedding.word_embeddings.weight"].dtype
        assert short(dtype) in DTYPES
        return short(dtype)

    @property
    def tokenizer(self) -> TokenizerConfig:
        """Tokenizer in the folder; if there is none that can be read, one whose construction fails with the reason."""
        found = (
            _word_pieces(self.path, self.about.model.family.objective) if (self.path / _BERT_FILE).is_file() else None
        )
        if found is not None:
            return found
        vocabulary, merges = (self.path.absolute() / name for name in _GPT2_FILES)
        alone = not (self.path / TOKENIZER_FILE).is_file() and self.about.family.model_type == "gpt2"
        if alone and vocabulary.is_file() and merges.is_file():
            return TokenizerConfig("GPT2BPETokenizer", vocab_file=str(vocabulary), merge_file=str(merges))
        pieces = self.path.absolute() / MODEL_FILE
        if pieces.is_file() and not holds_tokenizer(self.path):  # as Meta distributed Llama 2
            return TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(pieces))
        return TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(self.path.absolute()))

    def facts(self) -> dict[str, Any]:
        """Return the manifest's entries about the folder, from which an export can write the same config.json again."""
        return {"huggingface": {"config": self.config}, "tokenizer_files": sorted(files_of_tokenizer(self.path))}

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        assert not content.objects, "a Hugging Face folder has no objects"
        with ExitStack() as stack:
            files = _Files(stack)
            for chunk in content.chunks:
                check_filled(str(self.path), chunk, self._fill(chunk, files))
                advance("bytes read", chunk.nbytes)
        return {}

    def _fill(self, chunk: Chunk, files: _Files) -> int:
        """Copy into a chunk its rows of the tensors in the files; returns the number of elements."""
        by_index, copied = self._held[chunk.key], 0
        spans = [range(start, start + size) for start, size in zip(chunk.offset, chunk.tensor.shape, strict=True)]
        rows = len(next(iter(by_index)))  # the dimension of the chunk that parts are counted along
        first, last = spans[rows].start, spans[rows].stop
        for index in product(*spans[:rows]):
            for item in by_index[index]:
                if item.part.at < last and first < item.part.at + item.part.length:
                    held = item.tensor.rows(files.tensor(item.stored), item.part)
                    offset = (*index, item.part.at, *(0,) * (held.ndim - 1))
                    held = held[(None,) * rows]
                    copied += fill(chunk, [Chunk(chunk.key, held, offset, chunk.global_shape)])
        return copied + self._pad(chunk)

    def _pad(self, chunk: Chunk) -> int:
        """Fill the padding rows of a chunk; return the number of elements."""
        if chunk.key not in _OF_THE_VOCABULARY:
            return 0
        first = chunk.offset[0]
        start = max(first, self.about.vocab_size)
        count = min(first + chunk.tensor.shape[0], self.vocab_size) - start
        if count <= 0:
            return 0
        padding = chunk.tensor.narrow(0, start - first, count).fill_(_OF_THE_VOCABULARY[chunk.key])
        return padding.numel()

    def changed(self, part: int = 0, parts: int = 1) -> list[str]:
        return []  # the format has no checksums

    def problems(self) -> list[str]:
        try:
            self.contents()
            self.common()
            return self._two_outputs()
        except OtherModelError:
            raise
        except CheckpointError as error:
            return [str(error)]

    def _two_outputs(self) -> list[str]:
        """List tensors that the files hold twice and differ: in older ones the output layer although it is the
        embedding, and both of them in layers of multi-token prediction."""
        pairs = [
            (held, tensor.parts[0].parameter, "the layers of prediction have no own") for held, tensor in self._again
        ]
        second = self._stored.get(OUTPUT_LAYER)
        if second is not None and not self.about.model.untie_embeddings_and_output_weights:
            pairs.append((second, WORD_EMBEDDINGS, "tie_word_embeddings"))
        problems = []
        with ExitStack() as stack:
            files = _Files(stack)
            for held, parameter, why in pairs:
                (first,) = self._held[parameter][()]
                if held.shape != first.stored.shape or not torch.equal(files.tensor(held), files.tensor(first.stored)):
                    problems.append(
                        f"{held.file}: {held.name} is not {first.stored.name}, and {self.path / CONFIG_FILE} says that "
                        f"they are one ({why})"
                    )
        return problems


def _spellings(name: str) -> tuple[str, ...]:
    """Return the names of a tensor in files: older ones have no prefix (GPT-2), or the norms of TensorFlow (BERT)."""
    of_tensorflow = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    return name, name.removeprefix(GPT2_PREFIX), of_tensorflow


def _word_pieces(folder: Path, objective: Objective) -> TokenizerConfig | None:
    """Return the tokenizer of a vocab.txt, for masked words, or for spans if its configuration counts the sentinels."""
    file = folder / _TOKENIZER_CONFIG
    read = _json(file) if file.is_file() else {}
    found = read if isinstance(read, dict) else {}
    kind = "BertWordPieceLowerCase" if bool(found.get("do_lower_case", True)) else "BertWordPieceCase"
    vocabulary, extra_ids = str(folder.absolute() / _BERT_FILE), found.get(EXTRA_IDS)
    if objective == "masked":
        return TokenizerConfig(kind, vocab_file=vocabulary)
    if objective == "spans" and isinstance(extra_ids, int) and extra_ids > 0:
        return TokenizerConfig(kind, vocab_file=vocabulary, vocab_extra_ids=extra_ids)
    return None


def files_of_tokenizer(folder: Path) -> dict[str, Path]:
    """Return name -> path of the tokenizer's files in a folder, those of Hugging Face and those of GPT-2."""
    plain = {name: folder / name for name in (*_GPT2_FILES, _BERT_FILE) if (folder / name).is_file()}
    return {**plain, **tokenizer_files(folder)}


class _Files:
    """The files of a folder, opened as they are needed; the stack closes them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._opened = stack, dict[Path, Any]()

    def tensor(self, stored: _Stored) -> Tensor:
        if stored.file not in self._opened:
            self._opened[stored.file] = self._stack.enter_context(_open(stored.file))
        with _naming(stored.file):
            tensor: Tensor = self._opened[stored.file].get_tensor(stored.name)
        return tensor


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        with _naming(file):
            opened: Any = safe_open(file, framework="pt", device="cpu")
            stack.enter_context(opened)
        yield opened


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn the errors of the safetensors library into one that names the file and the remedy."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; {_AGAIN}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut short: {error}; {_AGAIN}") from error


def _json(path: Path) -> Any:
    try:
        require_file(path)
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {_AGAIN}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; {_AGAIN}") from error


def _weight_files(path: Path, whole: str) -> dict[Path, set[str]]:
    """Return the files with the weights, each with the tensors that the index names; `whole` without an index."""
    index = path / INDEX_FILE
    if not index.exists():
        if (path / whole).exists():
            return {path / whole: set()}
        raise CheckpointError(_no_weights(path))
    body = _json(index)
    by_tensor = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(by_tensor, dict) or not by_tensor or not all(isinstance(f, str) for f in by_tensor.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor: file; {_AGAIN}")
    files: dict[Path, set[str]] = {}
    for name, file in by_tensor.items():
        if Path(file).name != file:
            raise CheckpointError(f"{index}: {file!r} is not a file beside it")
        files.setdefault(path / file, set()).add(name)
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(sorted(missing))}, which {INDEX_FILE} names; {_AGAIN}")
    return files


def _no_weights(path: Path) -> str:
    if any(path.glob("pytorch_model*")):
        return (
            f"{path} has its weights in pytorch_model.bin, a pickle, which is never opened here; convert it once with "
            "transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW, safe_serialization=True)"
        )
    return f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; {_AGAIN}"
