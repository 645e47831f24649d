"""A miniature's model in other programs, of the same weights and batch: transformers, and the real Megatron.

Both compute in fp64, what they force into fp32 included (`megatron_core.InFp64`), so that the bound is that of layouts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megalith.assemble.huggingface import quiet
from megalith.checkpoint.files.folder import CheckpointFolder
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.adapters import args_of
from megalith.checkpoint.store.store import locate
from megalith.checkpoint.writers.huggingface import Weights
from megalith.config import ModelConfig
from megalith.config.groups import PrecisionConfig, TokenizerConfig
from megalith.config.saved_args import weights_args
from megalith.errors import ConfigError, install_command
from megalith.models.families import model_class
from megalith.models.language_model import LanguageModel
from megalith.models.saved import saved_tensors
from megalith.prove import megatron_core
from megalith.prove.compare import ROUNDING, compare_tensor, depth
from megalith.prove.miniature import SAVED
from megalith.prove.outside import Outside, described
from megalith.prove.record import Piece
from megalith.train.moe import begin_step

CORE_FOLDER = "MEGALITH_MEGATRON_CORE"
_ROWS, _SECONDS = 2, 120
Tensors = dict[str, Tensor]


def compare_reference(rank: int, reference: str, checkpoints: Path, folder: Path) -> Outside:
    """Compare the model of the checkpoint of step `SAVED` with that of a reference: outputs, losses, every gradient.

    Args:
        folder: Of the export; files that are exchanged lie beside it.

    Raises:
        ConfigError: The reference cannot compute it.
    """
    source = CheckpointFolder(locate(checkpoints, SAVED)).source
    params = GlobalParameters.from_args(args_of(source.common()), str(checkpoints))
    batch = _batch(params)
    found = Outside("")
    if reference == "megatron":
        weights = _weights(Weights(source), params)
        found.what, theirs = _of_megatron(params, weights, batch, folder)
        ours = _ours(params.model, params.vocab_size, weights, batch)
    else:
        about = described(checkpoints)
        if isinstance(about, str):
            raise ConfigError(f"--reference transformers: no model there is like this one; leave it out ({about})")
        model = _without_auxiliaries(params.model)
        found.what, theirs = _of_transformers(about.table, params, batch, folder)
        ours = _ours(model, params.vocab_size, _weights(about.weights, params), batch)
    alone = sorted(key for key in ours if key not in theirs and key.startswith("gradient"))
    if alone:
        found.uncovered.append(f"{found.what} does not have: {', '.join(alone)}")
    for key in sorted(theirs, key=_order):
        kind, _, name = key.partition(" ")
        floor = ROUNDING * max(float(one.abs().max()) for other, one in theirs.items() if other.startswith(kind))
        here = ours.get(key, torch.full((1,), torch.nan))
        piece = Piece((0,) * here.ndim, tuple(here.shape), here)
        compare_tensor(found.comparison, kind, name, theirs[key].double(), [(0, piece)], floor, 0)
    wrong = found.comparison.differences
    found.comparison.differences = [replace(one, rank=None, against=found.what) for one in wrong]
    return found


def _order(key: str) -> tuple[bool, Any]:
    """Return a key that sorts outputs as the forward pass does, then gradients as the backward pass does."""
    kind, _, name = key.partition(" ")
    late, number, rest = depth(name)
    return (True, (-late, -number, rest)) if kind == "gradient" else (False, (not late, number, rest))


def _batch(params: GlobalParameters) -> Tensors:
    """Return tokens, the labels that follow them, and the mask of those that there are."""
    generator, shape = torch.Generator().manual_seed(1), (_ROWS, params.model.max_position_embeddings)
    ids, mask = torch.randint(params.vocab_size, shape, generator=generator), torch.ones(shape, dtype=torch.float64)
    mask[:, -1] = 0.0
    return {"ids": ids, "labels": ids.roll(-1, 1), "mask": mask}


def _weights(weights: Weights, params: GlobalParameters) -> Tensors:
    return {name: weights.read(name, shape, params).double() for name, shape in params.shapes.items()}


def _without_auxiliaries(model: ModelConfig) -> ModelConfig:
    """Return a model without losses that a reference leaves out."""
    none = (0.0,) * len(model.moe_aux_loss_coeff)
    return replace(model, moe_aux_loss_coeff=none, moe_z_loss_coeff=None, mtp_num_layers=None)


def _ours(model: ModelConfig, vocab_size: int, weights: Mapping[str, Tensor], batch: Tensors) -> Tensors:
    """Return what this program computes, as `megatron_core.compute` does."""
    model = replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    chunk = model_class(model)(model, vocab_size, dtype=torch.float64).train()
    for name, tensor, _ in saved_tensors(chunk):
        tensor.data.copy_(weights[name])
    kept: Tensors = {}
    begin_step([chunk], 1.0)
    _keep_outputs(chunk, kept)
    of_samples = {"tokens": "ids", "labels": "labels", "loss_mask": "mask"}
    sample = {ours: batch[name] for ours, name in of_samples.items()}
    inputs = chunk.prepare(sample | {"position_ids": torch.arange(batch["ids"].shape[1]).expand_as(batch["ids"])})
    total = sum((loss.weight * loss.summed / loss.count for loss in chunk.losses(inputs, None)), torch.zeros(()))
    with torch.no_grad():
        kept["output logits"] = chunk.eval()(batch["ids"])
        kept["output losses"] = chunk(batch["ids"], labels_BS=batch["labels"]) * batch["mask"]
    total.backward()
    for name, parameter in chunk.named_parameters():
        kept[f"gradient {name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return kept


def _keep_outputs(chunk: LanguageModel, kept: Tensors) -> None:
    blocks = set(chunk.blocks())

    def keep(name: str, module: nn.Module, _: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        kept.setdefault(f"output {name}", hidden.detach())

    for name, module in chunk.named_modules():
        if module in blocks and name.startswith("decoder.layers"):
            module.register_forward_hook(partial(keep, name))


# --- transformers ---


def _of_transformers(table: Any, params: GlobalParameters, batch: Tensors, folder: Path) -> tuple[str, Tensors]:
    """Return its name and version, and what transformers computes of the exported folder, by our names.

    Its gradients become weights of a folder that it saves itself, which has the names and shapes of exported tensors.
    """
    import transformers

    ids, labels, mask = batch["ids"], batch["labels"], batch["mask"]
    major = int(transformers.__version__.partition(".")[0])
    options: dict[str, Any] = {"dtype" if major >= 5 else "torch_dtype": torch.float64, "attn_implementation": "eager"}
    options |= {"experts_implementation": "eager"} if major >= 5 else {}
    with quiet(transformers), megatron_core.InFp64():
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
        output = theirs.eval()(input_ids=ids, labels=ids, output_hidden_states=True, use_cache=False)
        output.loss.backward()
        losses = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(
            labels
        )
        kept = {"output losses": losses.detach() * mask, "output logits": output.logits.detach()}
        for number, hidden in enumerate(output.hidden_states[1:-1]):  # the last one is behind the final norm
            kept[f"output decoder.layers.{number}"] = hidden.detach().transpose(0, 1)
        for parameter in theirs.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        theirs.save_pretrained(folder.with_name("gradients"))
    gradients: Tensors = {}
    for file in folder.with_name("gradients").glob("*.safetensors"):
        gradients |= load_file(file)
    for tensor in table:
        for part in tensor.parts if tensor.name in gradients and not tensor.again else ():
            empty = torch.full(params.shapes[part.parameter], torch.nan, dtype=torch.float64)
            whole = kept.setdefault(f"gradient {part.parameter}", empty)
            whole.narrow(0, part.at, part.length).copy_(tensor.rows(gradients[tensor.name], part))
    return f"transformers {transformers.__version__} ({type(theirs).__name__})", kept


# --- Megatron ---


def require(reference: str, model: ModelConfig) -> None:
    """Raise a ConfigError if a reference is not installed, or not for such models."""
    if model.family.objective != "causal":
        raise ConfigError(f"--reference {reference}: it is for GPT; leave it out with {model.model_family}")
    if reference == "megatron":
        if model.multi_latent_attention:
            raise ConfigError(
                "--reference megatron: without Transformer Engine it has no multi-latent attention; leave it out"
            )
        core_folder()
    elif find_spec("transformers") is None:
        raise ConfigError(f"--reference transformers: it is not installed ({install_command('hf')})")


def core_folder() -> Path | None:
    """Return the folder that holds megatron-core (`make reference`); None where the interpreter has it.

    Raises:
        ConfigError: It is nowhere.
    """
    named = Path(os.environ.get(CORE_FOLDER) or Path(sys.prefix) / "reference")
    if (named / "megatron" / "core").is_dir():
        return named
    if CORE_FOLDER not in os.environ and find_spec("megatron") is not None and find_spec("megatron.core") is not None:
        return None
    raise ConfigError(
        f"--reference megatron: {named} has no megatron-core; install it with `make reference`, or name the folder of "
        f"`pip install --no-deps --target FOLDER megatron-core psutil` in {CORE_FOLDER}"
    )


def _of_megatron(params: GlobalParameters, weights: Tensors, batch: Tensors, folder: Path) -> tuple[str, Tensors]:
    """Return its name and version, and what megatron-core computes in a process of its own."""
    core, place = core_folder(), folder.with_name("megatron")
    place.mkdir()
    args = weights_args(params.model, PrecisionConfig(), TokenizerConfig())
    request = {
        "args": args,
        "vocabulary": params.vocab_size,
        "length": params.model.max_position_embeddings,
    }
    (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
    save_file({**weights, **{f"batch.{name}": tensor for name, tensor in batch.items()}}, place / "in.safetensors")
    words = [sys.executable, megatron_core.__file__, *(str(place / f"{name}") for name in _FILES)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if core is None else {"PYTHONPATH": str(core)})
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise ConfigError(f"--reference megatron: it does not compute this model: {done.stderr.strip()[-2000:]}")
    with safe_open(place / _FILES[-1], framework="pt") as file:
        version = (file.metadata() or {}).get("version", "")
    return f"megatron-core {version}", load_file(place / _FILES[-1])


_FILES = ("request.json", "in.safetensors", "out.safetensors")
