"""SFTTrainer of TRL, with the adapters of PEFT if asked for: a peer of `megalith train --sft`.

    python benchmarks/peers/sft.py MODEL_DIR dialogues.jsonl --template FILE --length 1024 --accumulate 4 --lora-rank 16

Both libraries have their defaults but for what the two must have in common: rows packed by best-fit decreasing, one a
micro-batch, fp32, nothing recomputed, a loss of assistant tokens alone, a constant learning rate. Threads, allocator
and the wait of idle threads are those of `megalith train`. A line per step.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megalith.cli.threads import configure_rank

configure_rank(os.environ)

import datasets  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402

from megalith.kernels.cpu.process import keep_freed_memory  # noqa: E402


class Steps(transformers.TrainerCallback):
    """Prints the loss of each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("dialogues")
    parser.add_argument("--template", type=Path, required=True)
    for name, default in (("length", None), ("accumulate", 1), ("steps", 100_000), ("lora-rank", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, required=default is None)
    options = parser.parse_args()
    keep_freed_memory(1)
    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    tokenizer.chat_template = options.template.read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    adapters = None
    if options.lora_rank:
        adapters = peft.LoraConfig(r=options.lora_rank, lora_alpha=32, target_modules="all-linear")
    with TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            folder,
            packing=True,
            max_length=options.length,
            assistant_only_loss=True,
            max_steps=options.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=options.accumulate,
            gradient_checkpointing=False,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = trl.SFTTrainer(
            model,
            args,
            train_dataset=datasets.load_dataset("json", data_files=options.dialogues, split="train"),
            processing_class=tokenizer,
            peft_config=adapters,
            callbacks=[Steps()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
