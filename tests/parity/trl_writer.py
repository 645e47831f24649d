"""Write `fixtures/sft`: tiny models of transformers, conversations with masks, and TRL's losses and gradients in fp32.

Run it where TRL is installed, for it is no dependency of the tests:

    pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0
    python tests/parity/trl_writer.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
import transformers
import trl
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

FOLDER = Path(__file__).parent / "fixtures" / "sft"
VOCABULARY, LENGTH = 48, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=False),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
}


def conversations() -> list[dict[str, list[int]]]:
    """Return random tokens of 10 conversations, in which turns without and with a loss alternate."""
    found = []
    for length in (24, 5, 11, 17, 3, 9, 20, 7, 13, 6):
        ids = torch.randint(1, VOCABULARY, (length,)).tolist()
        first, second = sorted(torch.randint(1, length, (2,)).tolist())
        learnt = [first <= place < second or place == length - 1 for place in range(length)]
        found.append({"input_ids": ids, "labels": [i if use else -100 for i, use in zip(ids, learnt, strict=True)]})
    return found


def of_trl(model: Any, rows: list[dict[str, list[int]]], *, packing: bool) -> dict[str, torch.Tensor]:
    """Return the loss of SFTTrainer on all conversations in one batch, and the gradients of all parameters."""
    names = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(names, "t0")), pad_token="t0", eos_token="t1"
    )
    with TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            folder,
            packing=packing,
            max_length=LENGTH,
            per_device_train_batch_size=len(rows),
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
        )
        trainer = trl.SFTTrainer(
            model, args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
        )
        model.zero_grad()
        (batch,) = trainer.get_train_dataloader()
        assert ("attention_mask" in batch) is not packing
        loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def main() -> None:
    for name, config in MODELS.items():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        folder, rows = FOLDER / name, conversations()
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        packed, padded = (of_trl(model, rows, packing=packing) for packing in (True, False))
        for key, value in packed.items():
            assert (value - padded[key]).abs().max() < 1e-6 * value.abs().max(), key
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        tokens = torch.tensor([number for row in rows for number in row["input_ids"]])
        mask = torch.tensor([number != -100 for row in rows for number in row["labels"]])
        versions = {package.__name__: package.__version__ for package in (trl, transformers, torch)}
        golden = {"tokens": tokens, "mask": mask, "lengths": lengths}
        for kind, found in (("packed", packed), ("padded", padded)):
            golden |= {f"{kind} {key}": value.contiguous() for key, value in found.items()}
        save_file(golden, folder / "golden.safetensors", versions)


if __name__ == "__main__":
    main()
