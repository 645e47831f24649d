"""What a checkpoint holds of a model: its tensors under the names that they have in a model that is on no other rank.

Layers carry the numbers of the whole model on every pipeline stage. Experts are counted from 0 on every rank, as in
Megatron, and here from the number of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from megalith.models.language_model import LanguageModel
from megalith.nn.moe.experts import Experts
from megalith.nn.placement import Placement, Replicated


def whole_names(model: nn.Module) -> dict[str, str]:
    """Map the name of each parameter and saved buffer on this rank to that in the whole model, in module order."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}  # other names of parameters that are saved already
    names = {name: name for name in model.state_dict() if name not in tied}
    for prefix, module in model.named_modules():
        if isinstance(module, Experts) and module.first:
            start = f"{prefix}.local_experts."
            for name in [name for name in names if name.startswith(start)]:
                number, _, rest = name.removeprefix(start).partition(".")
                names[name] = f"{start}{module.first + int(number)}.{rest}"
    return names


def saved_tensors(model: LanguageModel) -> Iterator[tuple[str, Tensor, Placement]]:
    """Yield each parameter and saved buffer: its name in the whole model, tensor, placement; in module order.

    A buffer without dimensions, such as BatchNorm's count of batches, is a view [1]: chunks of checkpoints have some.
    """
    table, names = model.placements(), whole_names(model)
    tensors = model.state_dict(keep_vars=True)
    for name, saved in names.items():
        tensor = tensors[name]
        yield saved, tensor if tensor.ndim else tensor.view(1), table.get(name, Replicated())
