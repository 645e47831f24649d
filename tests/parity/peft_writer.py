"""Write `fixtures/lora`: tiny models of transformers with adapters of PEFT, their logits, losses and gradients in fp32.

Run it where transformers and peft are installed, for they are no dependencies of the tests:

    pip install torch==2.13.0 transformers==5.23.0 peft==0.18.0
    python tests/parity/peft_writer.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "fixtures" / "lora"
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
LLAMA, QWEN2, QWEN3 = (
    transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=False),
    transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LLAMA, {"r": 3, "lora_alpha": 6, "target_modules": ALL}),
    "qwen2": (QWEN2, {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "up_proj"]}),
    "qwen3": (QWEN3, {"r": 2, "lora_alpha": 5, "target_modules": ["k_proj", "o_proj", "down_proj"]}),
}


def main() -> None:
    for name, (config, options) in CASES.items():
        torch.manual_seed(1)
        folder = FOLDER / name
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(folder / "base")
        model.name_or_path = "../base"
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options, init_lora_weights=False, task_type="CAUSAL_LM"))
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.15)
        tokens = torch.randint(0, SIZES["vocab_size"], (2, 17))
        output = adapted(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        adapted.save_pretrained(folder / "adapter")
        (folder / "adapter" / "README.md").unlink()
        found = {
            key.replace(".default.", "."): parameter.grad.contiguous()
            for key, parameter in adapted.named_parameters()
            if parameter.grad is not None
        }
        for path in folder.rglob("generation_config.json"):
            path.unlink()
        save_file(
            {"tokens": tokens, "logits": output.logits.detach().contiguous(), "loss": loss.detach(), **found},
            folder / "golden.safetensors",
            {"peft": peft.__version__, "transformers": transformers.__version__, "torch": str(torch.__version__)},
        )


if __name__ == "__main__":
    main()
