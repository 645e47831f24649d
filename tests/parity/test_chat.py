"""A dialogue with a Hugging Face folder: its chat template gives the ids of transformers, and the answer is theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.assemble.trained import load_trained
from megalith.serve.engine import Engine
from megalith.serve.model_runner import ModelRunner
from megalith.tokenizers.chat_template import BadDialogue, ChatFormat, stop_ids_beside, template_beside

transformers = pytest.importorskip("transformers", reason="the second witness needs the hf extra (transformers)")
httpx = pytest.importorskip("httpx", reason="the dev extra is not installed")
pytest.importorskip("fastapi", reason="the serve extra is not installed")

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

CHATML = """\
{%- if tools %}{% for tool in tools %}{{- tool | tojson }}{%- endfor %}{% endif %}
{%- set seen = namespace(users=0) %}
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}
    {% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {%- if message.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif %}
        {%- if message.content is string and message.content.startswith('stop') %}{% break %}{% endif %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>' ~ '\\n' }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}
<think>{{ {"users": seen.users} | tojson(indent=1) }}</think>
{% endif %}{%- endif -%}
"""

SAID = [
    {"role": "system", "content": "  Answer in the words of a king.\n"},
    {"role": "user", "content": "Who are you?\n\n  indented <b>&amp;</b> caf\u00e9 \U0001f451"},
    {"role": "assistant", "content": "The king."},
    {"role": "user", "content": "Of what?"},
]
DIALOGUES = [SAID, SAID[1:], SAID[1:2], [*SAID, {"role": "user", "content": "stop it"}]]
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}]
KINDS = {
    "llama": (LLAMA, ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]),
    "chatml": (CHATML, ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]),
}


def write_folder(folder: Path, kind: str, *, beside: bool) -> Any:
    """A model and a tokenizer as transformers saves them; returns the tokenizer.

    Args:
        beside: the template is a file of its own; otherwise it is in tokenizer_config.json, as before version 4.52.
    """
    import tokenizers

    template, special = KINDS[kind]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator([json.dumps(DIALOGUES, ensure_ascii=False)], trainer)
    if kind == "llama":  # its tokenizer begins every text; its template does so itself
        bpe.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], bpe.token_to_id(special[0]))]
        )
    names = {"eos_token": special[1], "pad_token": special[0]} | ({"bos_token": special[0]} if kind == "llama" else {})
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template, **names)
    tokenizer.save_pretrained(folder, save_jinja_files=beside)
    assert (folder / "chat_template.jinja").exists() == beside
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=[1, 0],
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("beside", [True, False], ids=["file", "configuration"])
@pytest.mark.parametrize("kind", KINDS)
def test_dialogues_become_the_ids_of_transformers(tmp_path: Path, kind: str, beside: bool) -> None:
    theirs = write_folder(tmp_path, kind, beside=beside)
    trained = load_trained(tmp_path, torch.device("cpu"))
    template = template_beside(trained.tokenizer)
    assert template is not None
    assert trained.tokenizer.special_ids == set(theirs.convert_tokens_to_ids(KINDS[kind][1]))
    ends = stop_ids_beside(trained.tokenizer, template)
    assert ends and theirs.convert_tokens_to_ids({"llama": "<|eot_id|>", "chatml": "<|im_end|>"}[kind]) in ends
    options: list[dict[str, Any]] = [{}, {"date_string": "26 Jul 2024"}, {"enable_thinking": False}, {"tools": TOOLS}]
    assert template.takes_tools
    for said in DIALOGUES:
        for extra in options:
            wanted = theirs.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **extra)
            assert template.render(said, **extra) == wanted
        wanted = theirs.apply_chat_template(said, tokenize=False, add_generation_prompt=False)
        assert template.render(said, add_generation_prompt=False) == wanted
    if kind == "llama":
        with pytest.raises(BadDialogue, match="robot"):
            template.render([*SAID, {"role": "robot", "content": ""}])


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs = write_folder(tmp_path, kind, beside=True)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    for said in DIALOGUES[:3]:
        ids = theirs.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            answer = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        new = answer[0, ids["input_ids"].shape[1] :].tolist()
        stopped = new[-1] in (0, 1)
        found = ask(tmp_path, {"messages": said, "temperature": 0, "max_completion_tokens": 12, "logprobs": True})
        (choice,) = found["choices"]
        assert found["usage"]["prompt_tokens"] == ids["input_ids"].shape[1]
        assert choice["message"]["content"] == theirs.decode(new, skip_special_tokens=True)
        assert choice["finish_reason"] == ("stop" if stopped else "length")
        assert len(choice["logprobs"]["content"]) == len(new)
        again = [*said, choice["message"], {"role": "user", "content": "And then?"}]  # as clients send it back
        assert ask(tmp_path, {"messages": again, "max_tokens": 1})["object"] == "chat.completion"


def ask(folder: Path, body: Mapping[str, Any]) -> dict[str, Any]:
    """What a server of the folder answers."""
    from megalith.serve.http.app import build_app
    from megalith.serve.http.metrics import RequestLog
    from megalith.serve.http.service import Service
    from megalith.serve.http.settings import ServerSettings
    from megalith.serve.worker import Worker

    async def run() -> dict[str, Any]:
        trained = load_trained(folder, torch.device("cpu"))
        tokenizer = trained.tokenizer
        worker = Worker(Engine(ModelRunner(trained.model, 64, 16), tokenizer)).start()
        service = Service(
            worker,
            tokenizer,
            512,
            ServerSettings(),
            RequestLog(lambda _: None),
            chat=ChatFormat.of(tokenizer, template_beside(tokenizer)),
        )
        transport = httpx.ASGITransport(build_app(service))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:5000") as client:
                answer = await client.post("/v1/chat/completions", json=dict(body))
                assert answer.status_code == 200, answer.text
                return dict(answer.json())
        finally:
            worker.close()

    return asyncio.run(run())
