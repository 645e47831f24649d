"""Initial weights: by name, so that every layout starts alike, or exactly as Megatron draws them on a CPU.

Rules (Megatron's): weights and embeddings N(0, std); the projections that end a residual branch (linear_proj,
linear_fc2, fc2_latent_proj) N(0, std / sqrt(2 L)) with L layers in all (Radford et al. 2019); biases of routers
N(0, std), all others 0; norm weights, the one-dimensional ones, 1, kept as 0 where they are kept around one. Under muP
all standard deviations but those of embeddings are divided by the root of the width multiplier. Under
--init-method-xavier-uniform all matrices are uniform up to sqrt(6 / (rows + columns)) of the whole matrix (Glorot and
Bengio 2010), and embeddings too unless --embedding-init-method-std is given. A parameter of another name than weight
and bias, which only models of others have, keeps the values that its module gave it; a module of torch in such a model,
one with `reset_parameters` and without placements, draws its own weights, from the seed and its global name. A plain
module in the place of a model is constructed under a generator of the seed, and its initial weights are those of its
constructor (models.plain).
Of LoRA's adapters A is uniform up to 1 / sqrt(columns), as in PEFT, and B is 0.
Every weight is drawn in fp32, also one of fp64, at its full shape and then cast.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, nn

from megalith.device import has_memory, is_host
from megalith.errors import ConfigError
from megalith.models.language_model import WORD_EMBEDDINGS, LanguageModel, named_placements
from megalith.nn.moe.experts import name_among_all, region_of
from megalith.nn.placement import Placement, Replicated, global_shape, local_part
from megalith.nn.precision import at_least_fp32

_RESIDUAL_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight", "fc2_latent_proj.weight")
_ROUTER_BIAS = "mlp.router.bias"
_SINKS = "core_attention.softmax_offset"
OUTPUT_LAYER = "output_layer.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
TYPE_EMBEDDINGS = "embedding.tokentype_embeddings.weight"
_EMBEDDINGS = (WORD_EMBEDDINGS, POSITION_EMBEDDINGS, TYPE_EMBEDDINGS)
_RELATIVE = tuple(f"{stack}_relative_pos_emb.relative_attention_bias.weight" for stack in ("encoder", "decoder"))
_PROJECTIONS = (
    *("linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj"),
)
"""Of attention, in Megatron's order of construction."""
_OF_CROSS_ATTENTION = ("linear_proj", "linear_q", "linear_kv")
_LINEARS_OF_TORCH = ("lm_head.dense.weight", "binary_head.weight", "pooler.dense.weight")
_HEADS = (_LINEARS_OF_TORCH[0], OUTPUT_LAYER, f"lm_head.{OUTPUT_LAYER}", *_LINEARS_OF_TORCH[1:])
_LAYER = re.compile(r"(encoder|decoder)\.layers\.\d+\.")


def _std(model: LanguageModel, name: str) -> float:
    config = model.config
    if name in _EMBEDDINGS or name == model.copied_weight:
        own = config.embedding_init_method_std
        return config.init_method_std if own is None else own
    of_hidden = config.init_method_std / math.sqrt(config.width_multiplier)
    return of_hidden / math.sqrt(2.0 * config.num_layers) if _is_one_of(name, _RESIDUAL_WEIGHTS) else of_hidden


def _is_one_of(name: str, paths: Iterable[str]) -> bool:
    """Return whether the last modules and the parameter of a name are one of `paths`: whole words between dots."""
    return any(f".{name}".endswith(f".{path}") for path in paths)


def _is_uniform(model: LanguageModel, name: str, shape: Sequence[int]) -> bool:
    config, embeds = model.config, name in _EMBEDDINGS or name == model.copied_weight
    own = embeds and config.embedding_init_method_std is not None
    return config.init_method_xavier_uniform and len(shape) == 2 and not own


def _is_drawn(name: str, parameter: Tensor) -> bool:
    of_norm = parameter.dim() == 1
    return (name.endswith((".weight", ".gate_weight")) and not of_norm) or _is_one_of(name, (_SINKS, _ROUTER_BIAS))


def _fill_constants(model: LanguageModel) -> None:
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        if _draws_its_own(model, module):
            continue
        if own == "weight" and not _is_drawn(name, parameter):
            around_one = getattr(module, "around_one", False)
            nn.init.constant_(parameter, 0.0 if around_one else 1.0)
        elif own == "bias" and not _is_drawn(name, parameter):
            nn.init.zeros_(parameter)


def draw_(whole: Tensor, model: LanguageModel, name: str, generator: Generator) -> None:
    """Draw a global tensor, in place."""
    if _is_one_of(name, ("adapter.lora_B.weight",)):
        whole.zero_()
        return
    if _is_one_of(name, ("adapter.lora_A.weight",)):
        whole.uniform_(-1.0, 1.0, generator=generator).div_(math.sqrt(whole.shape[1]))
        return
    if _is_uniform(model, name, whole.shape):
        most = math.sqrt(6.0 / sum(whole.shape))
        whole.uniform_(-most, most, generator=generator)
    else:
        whole.normal_(0.0, _std(model, name), generator=generator)


def generator_for(seed: int, name: str) -> Generator:
    """Return a CPU generator that depends on the seed and the global name of the parameter only."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _keep_part(parameter: Tensor, placement: Placement, model: LanguageModel, name: str, generator: Generator) -> None:
    """Draw the global tensor of which a parameter is a part, and fill the parameter with its part."""
    region = region_of(name, model)
    is_whole = region.size == 1 or isinstance(placement, Replicated)
    if is_whole and parameter.dtype == torch.float32 and parameter.is_cpu and parameter.is_contiguous():
        draw_(parameter, model, name, generator)
        return
    whole = torch.empty(global_shape(parameter.shape, placement, region.size), dtype=torch.float32)  # also of fp64
    draw_(whole, model, name, generator)
    parameter.copy_(local_part(whole, placement, region.size, region.index))


@torch.no_grad()
def initialise(model: LanguageModel, seed: int, *, frozen: bool = True) -> None:
    """Draw each weight from (seed, its global name): the same weights in every layout of ranks.

    The copy of a tied embedding on the last pipeline stage is drawn under the name of the embedding. Without `frozen`
    only weights that are trained are drawn.
    """
    if frozen:
        _fill_constants(model)
    if frozen and not model.draws_own_weights:
        _reset_parameters(model, seed)

    def draw(name: str, parameter: Tensor, placement: Placement) -> None:
        origin = WORD_EMBEDDINGS if name == model.copied_weight else name_among_all(name, model)
        with torch.no_grad():  # of each thread
            _keep_part(parameter, placement, model, name, generator_for(seed, origin))

    drawn = [
        (name, parameter, placement)
        for name, parameter, placement in named_placements(model)
        if (frozen or parameter.requires_grad)
        and _is_drawn(name, parameter)
        and not _draws_its_own(model, model.get_submodule(name.rpartition(".")[0]))
    ]
    drawn.sort(key=lambda entry: -entry[1].numel())  # the largest first: threads end at about the same time
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # each has a generator of its own
        list(threads.map(draw, *zip(*drawn, strict=True)))


def _draws_its_own(model: LanguageModel, module: nn.Module) -> bool:
    """Return whether a user's module has initial weights of its own; those of Megalith declare placements."""
    draws = model.draws_own_weights or hasattr(module, "reset_parameters")
    return draws and (module is model or not hasattr(module, "placements"))


@contextmanager
def seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Seed torch's generators from (seed, a global name); they continue afterwards as without."""
    drawn = not is_host(device) and has_memory(device)  # by a generator of its own
    with torch.random.fork_rng([device] if drawn else [], device_type=device.type if drawn else "cpu"):
        torch.manual_seed(generator_for(seed, name).initial_seed())
        yield


def _reset_parameters(model: LanguageModel, seed: int) -> None:
    """Call `reset_parameters` of registered layers, each with generators seeded by (seed, its global name)."""
    for name, module in model.named_modules():
        if _draws_its_own(model, module) and any(True for _ in module.parameters(recurse=False)):
            with seeded(seed, name, model.device):
                module.reset_parameters()


def megatron_draw_order(model: LanguageModel) -> list[str]:
    """Return the names of the drawn weights of this stage in Megatron's order of construction.

    Source: docs/reference/training.md#initial-weights, checked bit for bit against real weights of all families.
    """
    here = dict(model.named_parameters())
    names = [name for name in (*_EMBEDDINGS, *_RELATIVE) if name in here]
    layers = list(dict.fromkeys(found[0] for name in here if (found := _LAYER.match(name))))
    layers += [f"mtp.layers.{layer}.transformer_layer." for layer in range(model.config.predictions)]
    for layer in layers:
        names += [name for name in here if name == f"{layer.removesuffix('transformer_layer.')}eh_proj.weight"]
        if model.config.softmax_type == "learnable":
            names += [name for name in here if name == f"{layer}self_attention.{_SINKS}"]
        projections = [f"{layer}self_attention.{part}.weight" for part in _PROJECTIONS]
        projections += [f"{layer}cross_attention.{part}.weight" for part in _OF_CROSS_ATTENTION]
        names += [name for name in projections if name in here]
        drawn = [name for name in here if name.startswith(f"{layer}mlp.") and _is_drawn(name, here[name])]
        names += sorted(drawn, key=lambda name: name.endswith(".gate_weight"))
    return [*names, *(name for name in _HEADS if name in here)]


def _draw_for_nothing(name: str, shape: Sequence[int], dtype: torch.dtype, generator: Generator) -> None:
    """Draw what the constructors of torch's own modules draw before Megatron draws the weight that it keeps."""
    if name in (POSITION_EMBEDDINGS, TYPE_EMBEDDINGS, *_RELATIVE):
        torch.empty(shape, dtype=at_least_fp32(dtype)).normal_(generator=generator)
    elif name in _LINEARS_OF_TORCH:
        for of_torch in (shape, shape[:1]):  # the weight and the bias
            torch.empty(of_torch, dtype=at_least_fp32(dtype)).uniform_(generator=generator)


@torch.no_grad()
def initialise_as_megatron_cpu(model: LanguageModel, generator: Generator) -> None:
    """Draw the weights from `generator` as Megatron does under --use-cpu-initialization.

    Each tensor-parallel rank draws the whole weights and keeps its part. A pipeline stage draws its own layers only,
    from a stream seeded with the seed + 100 x the stage, the chunks of virtual stages one after another. The copy of a
    tied embedding is drawn for nothing: Megatron, and so the caller, overwrites it with the embedding.

    Raises:
        ConfigError: the model has weights that no model of Megatron has.
    """
    _fill_constants(model)
    parameters = {name: (parameter, placement) for name, parameter, placement in named_placements(model)}
    order = megatron_draw_order(model)
    unknown = [name for name in parameters if _is_drawn(name, parameters[name][0]) and name not in order]
    if unknown:
        raise ConfigError(
            f"--use-cpu-initialization draws the weights that Megatron's models have, and {', '.join(unknown)} "
            "is none of them; leave the flag out"
        )
    for name in order:
        parameter, placement = parameters[name]
        shape = global_shape(parameter.shape, placement, region_of(name, model).size)
        _draw_for_nothing(name, shape, parameter.dtype, generator)
        _keep_part(parameter, placement, model, name, generator)
