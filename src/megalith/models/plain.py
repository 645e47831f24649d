"""Models that users register: a plain module as a `LanguageModel`, and functions that build one of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config import DataConfig, ModelConfig
from megalith.errors import ConfigError
from megalith.layout import Recompute
from megalith.models.language_model import Inputs, LanguageModel, Loss
from megalith.nn.moe.balance import Peers
from megalith.nn.precision import at_least_fp32
from megalith.nn.registered_loss import Vocabulary, checked
from megalith.registry import Registered

_REMEDY = "register a function that builds a megalith.api.LanguageModel, or leave {flag} out"


class PlainModel(LanguageModel):
    """A registered module, `forward(tokens [B, S]) -> logits [B, S, V]`, which is whole on one rank.

    The module is constructed on the CPU, then moved to the device and dtype of the run with its floating-point buffers.
    Its initial weights are those of its constructor.

    Raises:
        ConfigError: The run requires a feature that plain modules lack, or the object is not a module.
    """

    draws_own_weights = True

    def _build(self, peers: Peers, recompute: Recompute | None) -> None:
        assert isinstance(self.config.model, Registered)
        module = self.config.model(self.config, self.vocab_size)
        if next(module.parameters(), None) is None:
            raise ConfigError(f"--model {self.config.model}: {type(module).__name__} has no parameters")
        if constant := [name for name, parameter in module.named_parameters() if not parameter.requires_grad]:
            raise ConfigError(
                f"--model {self.config.model}: the parameters {', '.join(constant)} have requires_grad=False; make "
                "them buffers"
            )
        self.model: nn.Module = module.to(self.device, self.dtype)
        self._require_supported(recompute)

    def _require_supported(self, recompute: Recompute | None) -> None:
        config, stage = self.config, self.stage
        whole = stage.is_first and stage.is_last and len(stage.layers) == config.num_layers
        divided = [
            ("--tensor-model-parallel-size", self.region.size > 1, True),
            ("--pipeline-model-parallel-size", not whole, True),
            ("--context-parallel-size", self.mixer.parts > 1, False),
            ("--recompute-granularity", recompute is not None, False),
            ("--num-experts", bool(config.mixture), False),
            ("--mtp-num-layers", config.predictions > 0, False),
            (f"--model-family {config.model_family}", config.model_family != "gpt", False),
            (f"--loss {config.loss}", _sees_hidden_states(config.loss), False),
            ("--use-cpu-initialization", config.use_cpu_initialization, False),
        ]
        for flag, asked, by_placement in divided:
            if asked:
                declared = {
                    f"{prefix}.{name}"
                    for prefix, module in self.named_modules()
                    if module is not self and hasattr(module, "placements")
                    for name in module.placements()
                }
                lacking = [name for name, _ in self.named_parameters() if name not in declared]
                why = f"no placement is declared for its parameters {', '.join(lacking)}"
                raise ConfigError(
                    f"{flag}: --model {config.model} is a plain module"
                    + (f", and {why}" if by_placement and lacking else "")
                    + f"; {_REMEDY.format(flag=flag)}"
                )

    def blocks(self) -> Iterator[nn.Module]:
        """Yield the entries of the outermost ModuleLists and Sequentials, unless others share a parameter with them."""
        uses = Counter(id(parameter) for _, parameter in self.model.named_parameters(remove_duplicate=False))
        for block in dict.fromkeys(_entries(self.model)):
            own = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
            if own and all(uses[one] == count for one, count in own.items()):
                yield block

    def forward_stage(self, inputs: Inputs, hidden: Tensor | None) -> Tensor:
        raise AssertionError("a plain module has one stage")

    def losses(self, inputs: Inputs, hidden: Tensor | None) -> tuple[Loss, ...]:
        tensors = inputs.tensors
        mask = tensors["loss_mask"]
        losses_BS: Tensor = self(tensors["tokens"], tensors["labels"], mask)
        return (Loss(torch.sum(losses_BS.reshape(-1) * mask.reshape(-1)), mask.sum()),)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor | None = None, mask_BS: Tensor | None = None) -> Tensor:
        """Return logits [B, S, V], or with labels the loss per token [B, S] in at least fp32; arguments as of `GPT`.

        Raises:
            ConfigError: The module returns something else.
        """
        logits = self.model(tokens_BS)
        wanted = (*tokens_BS.shape, self.vocab_size)
        if not isinstance(logits, Tensor) or logits.shape != wanted:
            found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(
                f"--model {self.config.model}: forward(tokens {list(tokens_BS.shape)}) returns {found}; return logits "
                f"[B, S, V], {list(wanted)}"
            )
        if labels_BS is None:
            return logits
        if isinstance(self.config.loss, Registered):
            mask_BS = torch.ones_like(labels_BS, dtype=torch.float32) if mask_BS is None else mask_BS
            return checked(self.config.loss, logits, labels_BS, mask_BS, Vocabulary(self.vocab_size))
        logits_TV = logits.flatten(0, 1).to(at_least_fp32(logits.dtype))
        smoothing = self.config.label_smoothing if self.training else 0.0
        losses_T = nn.functional.cross_entropy(logits_TV, labels_BS.flatten(), reduction="none")
        if smoothing:  # Megatron's, which gives nothing more to the target
            share = smoothing * self.vocab_size / (self.vocab_size - 1)
            uniform_T = logits_TV.logsumexp(-1) - logits_TV.mean(-1)
            losses_T = (1.0 - share) * losses_T + share * uniform_T
        return losses_T.view_as(labels_BS)


def _sees_hidden_states(loss: str | None) -> bool:
    return isinstance(loss, Registered) and loss.entry.options["on"] == "hidden"


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        else:
            yield from _entries(child)


def build_registered(config: ModelConfig, vocab_size: int, **parts: Any) -> LanguageModel:
    """Build the model that --model names; arguments as of `LanguageModel`.

    Raises:
        ConfigError: As of `PlainModel`, or a function returns no LanguageModel.
    """
    assert isinstance(config.model, Registered)
    thing = config.model.entry.thing
    if isinstance(thing, type) and issubclass(thing, nn.Module) and not issubclass(thing, LanguageModel):
        return PlainModel(config, vocab_size, **parts)
    model = config.model(config, vocab_size, **parts)
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            f"--model {config.model}: {getattr(thing, '__qualname__', thing)} returns a {type(model).__name__}; return "
            "a megalith.api.LanguageModel, or register a class of torch.nn.Module"
        )
    return model


def require_tokens_alone(model: LanguageModel, data: DataConfig) -> None:
    """Refuse data of which a plain module would not see all.

    Raises:
        ConfigError: Attention is to stay inside documents, or positions to begin anew in each.
    """
    for flag, asked in (
        ("--sft" if data.sft else "--reset-attention-mask", data.masks_documents),
        ("--reset-position-ids", data.reset_position_ids),
    ):
        if asked and isinstance(model, PlainModel):
            raise ConfigError(
                f"{flag}: --model {model.config.model} is a plain module, which sees tokens alone; "
                + _REMEDY.format(flag=flag)
            )
