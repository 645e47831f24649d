"""Hugging Face's Trainer with the model, the samples and the settings of a recipe: a peer of `megalith train`.

    python benchmarks/peers/trainer.py recipes/machine-text-12m.toml MODEL_DIR samples.npy --output DIR

MODEL_DIR has the weights to begin with. Row i of samples.npy, [samples, sequence + 1], is sample i of the run. Flags of
`megalith train` may follow: they override the recipe. All else is as the Trainer has it by default (fused AdamW).
Losses of all steps go to DIR/losses.jsonl; the same command continues from the last checkpoint in DIR.

Needs transformers 5 (train_sampling_strategy) and accelerate.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from megalith.config import RunConfig, load


class Samples(Dataset[dict[str, torch.Tensor]]):
    """The samples of a file: inputs, and the labels that Megalith has."""

    def __init__(self, path: Path) -> None:
        self._tokens = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self._tokens[number].astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "shift_labels": tokens[1:]}


class Losses(TrainerCallback):
    """Prints and records the loss of each step."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.6f}", flush=True)
            record = {"iteration": state.global_step, "loss": logs["loss"], "learning_rate": logs["learning_rate"]}
            self._file.write(json.dumps(record) + "\n")


def settings(run: RunConfig, output: Path) -> TrainingArguments:
    """Return the Trainer's names for the settings of a run."""
    optimizer, schedule = run.optimizer, run.schedule
    assert schedule.lr is not None and schedule.lr_decay_style == "cosine"
    return TrainingArguments(
        output_dir=str(output),
        max_steps=run.train_iters,
        per_device_train_batch_size=run.train.micro_batch_size,
        gradient_accumulation_steps=run.num_micro_batches,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        learning_rate=schedule.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": schedule.min_lr},
        warmup_steps=schedule.lr_warmup_iters,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_eps,
        max_grad_norm=optimizer.clip_grad,
        bf16=run.precision.bf16,
        use_cpu=True,
        save_steps=run.checkpoint.save_interval or run.train_iters,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options, flags = parser.parse_known_args()
    run = load(["--config", options.recipe, *flags], {}, files=False)
    options.output.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.config.use_cache = False
    trainer = Trainer(
        model=model,
        args=settings(run, options.output),
        train_dataset=Samples(options.samples),
        callbacks=[Losses(options.output / "losses.jsonl")],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.output))
    trainer.save_model(options.output / "model")


if __name__ == "__main__":
    main()
