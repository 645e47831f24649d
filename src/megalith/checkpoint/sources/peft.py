"""Reader of adapter folders of PEFT in model space: adapter_config.json beside adapter_model.safetensors.

The model that they belong to is the one that adapter_config.json names, a folder of Hugging Face or a checkpoint. Each
projection there has its own A and B; here those of a fused projection are stacked (nn.lora).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megalith.checkpoint.base import BASE
from megalith.checkpoint.content import Chunk
from megalith.checkpoint.formats.torch_dist import CHECKPOINT_VERSION
from megalith.checkpoint.sources.huggingface import HuggingFaceSource, _Files
from megalith.checkpoint.sources.source import Source, open_source
from megalith.checkpoint.store.store import locate
from megalith.config import ModelConfig
from megalith.config.from_args import model_from_args
from megalith.config.groups.lora import PROJECTIONS
from megalith.config.rules.file import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megalith.config.saved_args import lora_args
from megalith.errors import CheckpointError
from megalith.models.huggingface import HuggingFaceModel, family_for
from megalith.models.huggingface_tensors import Part, TheirTensor

PREFIX = "base_model.model."
_PROJECTION = re.compile(r"(.+\.(\w+_proj))\.weight")
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    **dict.fromkeys(("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform"), (None, {}, [])),
    **dict.fromkeys(("trainable_token_indices", "target_parameters", "alora_invocation_tokens"), (None, {}, [])),
    "layer_replication": (None,),
}
"""Key of adapter_config.json -> values that are read; a key that is absent is as by default."""


class PeftSource(HuggingFaceSource):
    """A folder that `save_pretrained` of a `PeftModel` wrote."""

    config_file, weights_file = ADAPTER_CONFIG, ADAPTER_WEIGHTS

    @cached_property
    def base_path(self) -> Path:
        """Folder of the model that the adapters belong to."""
        name = str(self.config.get("base_model_name_or_path") or "")
        found = next((path for path in (Path(name), self.path / name) if name and path.is_dir()), None)
        if found is None:
            raise CheckpointError(
                f"{self.path / ADAPTER_CONFIG}: base_model_name_or_path {name!r} is no folder here; write that "
                "of the model there"
            )
        return found

    @cached_property
    def _base(self) -> Source:
        source = open_source(locate(self.base_path))
        if isinstance(source, PeftSource):
            raise CheckpointError(f"{self.base_path} holds adapters too; name the model that they belong to")
        return source

    @cached_property
    def about(self) -> HuggingFaceModel:
        wrong = [
            f"{key} {self.config[key]!r}" for key, read in _PLAIN.items() if self.config.get(key, read[0]) not in read
        ]
        rank, alpha = self.config.get("r"), self.config.get("lora_alpha")
        if wrong or not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
            said = ", ".join(wrong) or f"r {rank!r} and lora_alpha {alpha!r}"
            raise CheckpointError(f"{self.path / ADAPTER_CONFIG} asks for what this version does not have: {said}")
        args = vars(self._base.common()["args"])
        names = {found[1] for name in self._stored if (found := re.search(r"(\w+)\.lora_[AB]\.weight$", name))}
        if unknown := sorted(names - set(PROJECTIONS)):
            raise CheckpointError(
                f"{self.path}: adapters of {', '.join(unknown)} are not read; read are {', '.join(PROJECTIONS)}"
            )
        model = replace(
            model_from_args(args),
            lora_rank=rank,
            lora_alpha=float(alpha),
            lora_targets=",".join(name for name in PROJECTIONS if name in names),
            lora_dropout=float(self.config.get("lora_dropout") or 0.0),
            lora_use_rslora=bool(self.config.get("use_rslora")),
        )
        own = getattr(self._base, "about", None)
        family = own.family if isinstance(own, HuggingFaceModel) else family_for(model, None)
        return HuggingFaceModel(family, model, int(args["padded_vocab_size"]))

    @property
    def vocab_size(self) -> int:
        return self.about.vocab_size

    def _table(self) -> Iterable[TheirTensor]:
        return adapter_tensors(self.about.family.tensors(self.about.model, self.vocab_size), self.about.model)

    def common(self) -> dict[str, Any]:
        args = {**vars(self._base.common()["args"]), **lora_args(self.about.model)}
        record = {"path": str(self.base_path.resolve()), "hash": None}
        return {"args": Namespace(**args), "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0, BASE: record}

    def _fill(self, chunk: Chunk, files: _Files) -> int:
        chunk.tensor.zero_()  # rows of B that belong to a part without an adapter are in no file
        super()._fill(chunk, files)
        return chunk.tensor.numel()


def adapter_tensors(table: Iterable[TheirTensor], model: ModelConfig) -> Iterator[TheirTensor]:
    """Yield PEFT's tensors of the adapters of a model, whose own are `table`.

    Raises:
        CheckpointError: The projections of its family are fused or transposed: PEFT has adapters of another kind.
    """
    rank, found = model.lora_rank or 1, set[str]()
    chosen = model.lora_projections
    for tensor in table:
        match = _PROJECTION.fullmatch(tensor.name)
        if match is None or match[2] not in chosen or tensor.transposed:
            continue
        found.add(match[2])
        parameter = tensor.parts[0].parameter.removesuffix("weight") + "adapter."
        fused = [name for name in chosen if PROJECTIONS[name][0] == PROJECTIONS[match[2]][0]]
        columns = tensor.shape[1]
        place = fused.index(match[2]) * rank
        name = f"{PREFIX}{match[1]}."
        yield TheirTensor(f"{name}lora_A.weight", (rank, columns), (Part(f"{parameter}lora_A.weight", 0, place, rank),))
        parts = tuple(replace(part, parameter=f"{parameter}lora_B.weight") for part in tensor.parts)
        yield TheirTensor(f"{name}lora_B.weight", (tensor.shape[0], rank), parts)
    if lacking := [name for name in chosen if name not in found]:
        raise CheckpointError(
            f"PEFT has no adapters of {', '.join(lacking)} for models of this family, whose projections are fused or "
            "have other names; merge the adapters instead: megalith checkpoint merge-lora"
        )
