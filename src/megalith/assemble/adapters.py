"""LoRA adapters from their checkpoints or folders of PEFT, to be served beside the model that they belong to."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.assemble.trained import Trained, find_checkpoint, stored_tensors
from megalith.checkpoint import CheckpointContent, DirectoryStore, split_path
from megalith.checkpoint.base import base_record, record_of
from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX, model_chunks, stacking_of
from megalith.checkpoint.sources.source import keys_of
from megalith.config.from_args import LORA_SETTINGS, model_from_args
from megalith.distributed.context import ParallelContext
from megalith.errors import CheckpointError, ConfigError
from megalith.models.families import model_class
from megalith.models.layer_options import lora
from megalith.models.plain import PlainModel
from megalith.nn.linear import Linear
from megalith.nn.lora import Adapter, adapt
from megalith.tokenizers import Tokenizer

if TYPE_CHECKING:
    from megalith.tokenizers.chat_template import ChatTemplate

Adapters = Mapping[str, Adapter]
"""Name of a linear layer of this rank -> the adapter beside it."""


def adapter_reader(trained: Trained, checkpoint: Path, context: ParallelContext) -> Callable[[Path], Adapters]:
    """Return the function that reads adapters of a model, which stays as it is; all ranks call it alike.

    Args:
        trained: The model, which may have lost its weights to faster products.
        checkpoint: Where it was loaded from.

    Raises:
        ConfigError: The model takes no adapters.
        CheckpointError: By the function: the folder holds no adapters, or those of another model.
    """
    if trained.args.get("lora_rank"):
        raise ConfigError(
            f"--lora: {checkpoint} holds adapters too; serve their model, and give them by --lora as well"
        )
    if trained.model.config.family.objective != "causal" or isinstance(trained.model, PlainModel):
        raise ConfigError(f"--lora: adapters are beside the layers of GPT; {checkpoint} holds another model")

    @cache
    def digest() -> str:
        store = DirectoryStore(split_path(checkpoint)[0], context)
        return str(record_of(store, trained.iteration)["hash"])

    def read(path: Path) -> Adapters:
        folder, named = split_path(path)
        store = DirectoryStore(folder, context)
        found = named if named is not None else find_checkpoint(store, None, thorough=True)[0]
        common = store.common(found)
        model = model_from_args(vars(common.get("args", Namespace())))
        if model.lora_rank is None:
            raise CheckpointError(f"{path} holds a full model, no adapters")
        record = base_record(store.manifest(found), common)
        if record.get("hash") not in (None, digest()):
            raise CheckpointError(
                f"{path} holds adapters of another model: that in {record.get('path')}, with the hash "
                f"{record['hash']}; {checkpoint} has {digest()}. Serve the model of these adapters, or leave them out"
            )
        return _filled(store, found, trained, {name: getattr(model, name) for name in LORA_SETTINGS}, context)

    return read


def adapter_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template beside adapters, with which they were fine-tuned; None if there is none."""
    from megalith.tokenizers.chat_template import template_in  # which imports jinja2

    folder, named = split_path(path)
    store = DirectoryStore(folder)
    found = named if named is not None else find_checkpoint(store, None, thorough=True)[0]
    return template_in(store.folder(found), tokenizer)


def _filled(
    store: DirectoryStore, found: int, trained: Trained, settings: Mapping[str, object], context: ParallelContext
) -> Adapters:
    """Build the adapters beside a model without weights, and load them."""
    served = trained.model
    config = replace(served.config, **settings)  # type: ignore[arg-type]
    twin = model_class(config)(
        replace(config, lora_rank=None),
        served.vocab_size,
        region=served.region,
        stage=served.stage,
        dtype=served.dtype,
        device="meta",
    )
    chosen = lora(config)
    assert chosen is not None
    adapt(twin, *chosen, served.region, served.device)
    tensors = [item for item in stored_tensors(twin) if item[1].requires_grad]
    stacking = stacking_of(config)
    content = CheckpointContent(model_chunks(tensors, stacking, rank=context.tp.index, size=context.tp.size))
    lacking = [
        key
        for key in store.contents(found).unrequested(keys_of(content))
        if ".adapter." in key and not key.startswith(OPTIMIZER_PREFIX) and context.pp.size == 1
    ]
    if lacking:
        raise CheckpointError(f"{store.folder(found)}: the model has no layers for {', '.join(lacking[:3])}")
    store.load(found, content)
    return {
        name: layer.adapter.requires_grad_(False)
        for name, layer in twin.named_modules()
        if isinstance(layer, Linear) and isinstance(layer.adapter, Adapter)
    }


def bytes_of(adapters: Adapters) -> int:
    """Return the memory that adapters take while they are served."""
    return sum(tensor.nbytes for adapter in adapters.values() for tensor in adapter.factors()[:2])
