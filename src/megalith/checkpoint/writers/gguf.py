"""Writer of a checkpoint of any format as a GGUF file for llama.cpp and ollama, with a Modelfile beside it.

The tensors are those of the Hugging Face export under llama.cpp's names, read and written one at a time. In the
architecture llama, rotary positions turn neighbouring rows of queries and keys, so that these are reordered. The
folder is committed by a rename.

Sources:  llama.cpp convert_hf_to_gguf.py (names, types, order of rows); the package gguf (names, format, blocks).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.content import volume
from megalith.checkpoint.files.commit import temp_folder, write_durably
from megalith.checkpoint.formats.torch_dist import WORD_EMBEDDINGS
from megalith.checkpoint.sources.source import short
from megalith.checkpoint.writers.huggingface import (
    Description,
    ExportOptions,
    TensorReader,
    describe,
    refuse_existing,
)
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.huggingface_tensors import TheirTensor
from megalith.nn.rope import LongContext
from megalith.progress import advance, task
from megalith.tokenizers.gguf_vocabulary import GgufVocabulary, read_gguf_vocabulary
from megalith.tokenizers.protocol import import_for

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}
"""--dtype -> gguf's name of the type of the matrices; vectors, routers and positions are in fp32."""
SHORT_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
MODELFILE = "Modelfile"

_ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), "llama"),
    **{"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gpt2": "gpt2"},
}
_IN_FP32 = re.compile(r"position_embd\.weight|.*\.ffn_gate_inp\.weight|rope_freqs\.weight")
_TURNED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
_MOST_OF_FP16 = 65504.0
_CHAT_ML = """{{ range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


@dataclass
class GgufResult:
    """File, type and size of an export, with notes."""

    path: Path  # the folder
    file: Path
    architecture: str
    dtype: str  # a key of `TYPES`
    bytes: int  # of all tensors
    notes: list[str] = field(default_factory=list)  # for the user


@dataclass(frozen=True)
class _Entry:
    """A tensor in the file: of one tensor of Hugging Face, of those of all experts, or given as it is."""

    name: str
    shape: tuple[int, ...]
    type: Any  # gguf.GGMLQuantizationType
    bytes: int
    parts: tuple[TheirTensor, ...] = ()
    turned_heads: int = 0  # heads whose rows are reordered
    data: Tensor | None = None


def export_gguf(
    path: Path,
    destination: Path,
    wanted: ExportOptions,
    *,
    iteration: int | None = None,
    check: Callable[[Path, Description, GgufVocabulary, bool], None] | None = None,
) -> GgufResult:
    """Write a checkpoint, given as for `locate`, as a folder of a GGUF file and a Modelfile.

    Args:
        destination: the folder to make; it may exist if it is empty.
        wanted: dtype is a key of `TYPES` or `SHORT_TYPES`; the size of shards is not used.
        check: called before the folder gets its name, with the file, the model, its vocabulary, and whether the weights
            are in fp32; it raises to refuse.

    Raises:
        ConfigError: an option is wrong.
        DataError: gguf is not installed, or llama.cpp has no tokenizer like that of the checkpoint.
        CheckpointError: llama.cpp has no model like that of the checkpoint, or the destination exists.
    """
    dtype = SHORT_TYPES.get(wanted.dtype or "", wanted.dtype)
    _check_options(dtype, destination, wanted)
    refuse_existing(destination)
    about = describe(path, replace(wanted, dtype=None), iteration)
    library = import_for("--to gguf", "gguf", "gguf")
    architecture, notes = _architecture(about), about.notes
    dtype = dtype or short(about.weights.contents().tensors[WORD_EMBEDDINGS].dtype)
    if about.params.model.activation == "gelu_erf":
        notes.append("llama.cpp computes GELU by its tanh approximation, this model by the error function")
    table = _table(about, architecture, getattr(library.GGMLQuantizationType, TYPES[dtype]), library, notes)
    size = sum(entry.bytes for entry in table)
    destination = destination.resolve()
    name = f"{destination.name}-{TYPES[dtype].lower()}.gguf"
    with temp_folder(destination, size) as new, TemporaryDirectory() as place:
        for file, content in about.files.items():
            (Path(place) / file).write_bytes(content)
        vocabulary = read_gguf_vocabulary(Path(place), about.rows, library)
        special = library.SpecialVocab(place, load_merges=vocabulary.model == "gpt2", n_vocab=about.rows)
        if "eos" not in special.special_token_ids:
            notes.append("no token is known to end a text: llama.cpp takes its default, which may be another token")
        writer = library.GGUFWriter(new.path / name, architecture)
        writer.add_name(destination.name)
        _add_model(writer, about, dtype, library)
        _add_vocabulary(writer, vocabulary, special)
        _write(writer, table, TensorReader(about), library)
        beside = modelfile(name, special.chat_template, about.params.model.max_position_embeddings)
        write_durably(new.path / MODELFILE, beside.encode())
        if check is not None:
            check(new.path / name, about, vocabulary, dtype == "float32")
        new.commit()
    return GgufResult(destination, destination / name, architecture, dtype, size, notes)


def _check_options(dtype: str | None, destination: Path, wanted: ExportOptions) -> None:
    wrong: list[str] = []
    if dtype is not None and dtype not in TYPES:
        wrong.append(f"--dtype {dtype} is none of {', '.join(TYPES)}")
    if wanted.true_vocab_size is not None and wanted.true_vocab_size < 1:
        wrong.append(f"--true-vocab-size {wanted.true_vocab_size} is less than 1")
    if destination.suffix == ".gguf":
        wrong.append(
            f"{destination} is to be a folder, in which --to gguf writes a file and a Modelfile; leave .gguf out"
        )
    if wrong:
        raise ConfigError(wrong)


def _architecture(about: Description) -> str:
    """Return llama.cpp's name of the architecture; a CheckpointError that names all that it has not."""
    kind, model = about.family.model_type, about.params.model
    if kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"--to gguf writes {', '.join(_ARCHITECTURES)}, and the model is a {kind}; write it with --to hf, and "
            "convert that with llama.cpp's convert_hf_to_gguf.py where it has the architecture"
        )
    lacks = {
        "a sliding window in attention": any(window is not None for window in model.windows),
        "layers with experts and layers without": model.mixture and not all(model.experts),
        "weights of experts that do not add up to 1 (norm_topk_prob false)": kind == "qwen3_moe"
        and model.moe_router_pre_softmax,
        "a YaRN scaling with mscale, mscale_all_dim or truncate": model.rotary_kind == "yarn"
        and (model.mscale, model.mscale_all_dim, model.yarn_correction_range_round_to_int) != (1.0, 0.0, True),
    }
    if found := [what for what, has in lacks.items() if has]:
        raise CheckpointError(
            f"llama.cpp's architecture {_ARCHITECTURES[kind]} does not have what this model has: {'; '.join(found)}; "
            "serve it by `megalith serve`, or write it with --to hf for transformers or vLLM"
        )
    return _ARCHITECTURES[kind]


# --- tensors ---


def _table(about: Description, architecture: str, wanted: Any, library: Any, notes: list[str]) -> list[_Entry]:
    """Return the tensors of the file in its order: those of Hugging Face under llama.cpp's names, experts together."""
    model = about.params.model
    kinds = {name: kind for kind, name in library.MODEL_ARCH_NAMES.items()}
    names = library.get_tensor_name_map(kinds[architecture], model.num_layers)
    parts: dict[str, list[TheirTensor]] = {}
    for tensor in about.table:
        name = names.get_name(re.sub(r"\.experts\.\d+\.", ".experts.", tensor.name), try_suffixes=(".weight", ".bias"))
        if name is None:
            raise CheckpointError(
                f"the package gguf has no name for {tensor.name} of {architecture}; install a newer one"
            )
        parts.setdefault(name, []).append(tensor)
    if model.use_rope_scaling:
        freqs = _frequency_factors(model)
        table = [
            _Entry("rope_freqs.weight", tuple(freqs.shape), library.GGMLQuantizationType.F32, freqs.nbytes, data=freqs)
        ]
    else:
        table = []
    table += [_entry(name, tuple(of), about, architecture, wanted, library) for name, of in parts.items()]
    kept = [entry.name for entry in table if wanted.name == "Q8_0" and entry.type.name == "F16"]
    if kept:
        notes.append(f"{len(kept)} matrices are in float16, as their rows are no multiple of 32: {kept[0]} and so on")
    return table


def _entry(
    name: str, parts: tuple[TheirTensor, ...], about: Description, architecture: str, wanted: Any, library: Any
) -> _Entry:
    types, model = library.GGMLQuantizationType, about.params.model
    shape = parts[0].shape[::-1] if parts[0].transposed else parts[0].shape
    if "_exps." in name:
        shape = (len(parts), *shape)
    kind = types.F32 if len(shape) == 1 or _IN_FP32.fullmatch(name) else wanted
    if shape[-1] % library.GGML_QUANT_SIZES[kind][0]:
        kind = types.F16  # as llama.cpp's converter
    block, size = library.GGML_QUANT_SIZES[kind]
    turned = _TURNED.fullmatch(name) if architecture == "llama" else None
    heads = {"q": model.num_attention_heads, "k": model.query_groups}[turned[1]] if turned else 0
    return _Entry(name, shape, kind, volume(shape) // block * size, parts, heads)


def neighbouring_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of queries or keys: row i of the first half of each head before row i of the second.

    Shapes:  [heads * K, ...] -> the same; K is even.
    """
    size = tensor.shape[0] // heads
    return tensor.unflatten(0, (heads, 2, size // 2)).transpose(1, 2).reshape(tensor.shape)


def _frequency_factors(model: ModelConfig) -> Tensor:
    """Return what llama.cpp divides each rotary frequency by under the scaling of Llama 3.1, [K / 2]."""
    exponents = torch.arange(0, model.rotary_size, 2, dtype=torch.float64) / model.rotary_size
    frequencies = 1.0 / float(model.rotary_base) ** exponents
    return (frequencies / LongContext(model.rope_scaling_factor).scaled(frequencies)).float()


def _write(writer: Any, table: list[_Entry], reader: TensorReader, library: Any) -> None:
    fp32 = torch.empty(0).numpy().dtype
    for entry in table:
        writer.add_tensor_info(entry.name, entry.shape, fp32, entry.bytes, raw_dtype=entry.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with task("exporting", sum(entry.bytes for entry in table), "B", counts="bytes exported"):
            for entry in table:
                writer.write_tensor_data(_data(entry, reader, library))
                advance("bytes exported", entry.bytes)
    finally:
        writer.close()
    with writer.path.open("rb") as file:
        os.fsync(file.fileno())


def _data(entry: _Entry, reader: TensorReader, library: Any) -> Any:
    """Read a tensor as the array of its bytes in the file; of experts one at a time is in fp32."""
    arrays = []
    for part in entry.parts:
        tensor = reader.tensor(part, torch.float32)
        tensor = tensor.t() if part.transposed else tensor
        tensor = neighbouring_pairs(tensor, entry.turned_heads) if entry.turned_heads else tensor
        if entry.type.name == "F16" and tensor.abs().max() > _MOST_OF_FP16:
            raise CheckpointError(
                f"{part.name} has values above {_MOST_OF_FP16:g}, the most of float16; give --dtype bfloat16"
            )
        arrays.append(library.quantize(tensor.contiguous().numpy(), entry.type))
    if entry.data is not None:
        return entry.data.numpy()
    if "_exps." not in entry.name:
        return arrays[0]
    whole = torch.empty((len(arrays), *arrays[0].shape), dtype=torch.from_numpy(arrays[0]).dtype).numpy()
    for place, array in zip(whole, arrays, strict=True):
        place[...] = array
    return whole


# --- what stands beside the tensors ---


def _add_model(writer: Any, about: Description, dtype: str, library: Any) -> None:
    """Write the keys of the architecture."""
    model = about.params.model
    kind = "ALL_F32" if dtype == "float32" else f"MOSTLY_{TYPES[dtype]}"
    writer.add_file_type(getattr(library.LlamaFileType, kind))
    writer.add_quantization_version(library.GGML_QUANT_VERSION)
    writer.add_vocab_size(about.rows)
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.ffn_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.query_groups)
    if model.normalization == "LayerNorm":
        writer.add_layer_norm_eps(model.norm_epsilon)
        return
    writer.add_layer_norm_rms_eps(model.norm_epsilon)
    writer.add_key_length(model.head_size)
    writer.add_value_length(model.head_size)
    writer.add_rope_dimension_count(model.rotary_size)
    writer.add_rope_freq_base(float(model.rotary_base))
    if model.rotary_kind == "yarn":
        writer.add_rope_scaling_type(library.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(model.rotary_scaling_factor)
        writer.add_rope_scaling_orig_ctx_len(model.yarn_original_max_position_embeddings)
        writer.add_rope_scaling_yarn_beta_fast(model.yarn_beta_fast or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(model.yarn_beta_slow or 1.0)
    elif model.rotary_seq_len_interpolation_factor is not None:
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(model.rotary_seq_len_interpolation_factor))
    if model.mixture:
        writer.add_expert_count(model.num_experts)
        writer.add_expert_used_count(model.moe_router_topk)
        writer.add_expert_feed_forward_length(model.expert_size)


def _add_vocabulary(writer: Any, vocabulary: GgufVocabulary, special: Any) -> None:
    """Write the tokens, the merges, the ids of special tokens and the chat template."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.model == "llama":
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_prefix)
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def modelfile(file: str, template: str | list[Mapping[str, str]] | None, context: int) -> str:
    """Return the Modelfile of ollama for a GGUF file beside it; `context` in tokens.

    Without a chat template ollama continues texts. ChatML is written in ollama's own language of templates; any other
    template is left to ollama, which knows many by the text in the GGUF file.
    """
    lines = ["# ollama create NAME -f Modelfile", f"FROM ./{file}", f"PARAMETER num_ctx {context}"]
    if template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif "<|im_start|>" in str(template):
        lines += [f'TEMPLATE """{_CHAT_ML}"""', 'PARAMETER stop "<|im_end|>"']
    else:
        lines.append(
            "# the template is tokenizer.chat_template of the file, if ollama knows it; else add TEMPLATE here"
        )
    return "\n".join(lines) + "\n"
