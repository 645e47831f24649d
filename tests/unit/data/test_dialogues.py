"""Dialogues for fine-tuning: tokens and loss masks, equal to transformers' where a template marks its answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megalith.cli.main import main
from megalith.config import TokenizerConfig
from megalith.data.indexed import IndexedDataset
from megalith.data.preprocess import PreprocessOptions, preprocess
from megalith.data.sources import SourceOptions
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import build_tokenizer

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
THINKS = PLAIN.replace("{{ m.content +", "{% if loop.last %}{{ '<think></think>' }}{% endif %}{{ m.content +", 1)
SAID = [
    {"role": "system", "content": " Be kind. "},
    {"role": "user", "content": "Who?\n\n  caf\u00e9 \u4e2d\u56fd \U0001f451 <b>x</b>"},
    {"role": "assistant", "content": " The king \U0001f451\u4e2d"},
    {"role": "user", "content": "Of what?"},
    {"role": "assistant", "content": "Of\n nothing.\n"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    bpe.train_from_iterator([str(SAID)], trainer)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "chat_template": MARKED}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def options_for(folder: Path, file: Path, *rows: Any, template: str = MARKED, **more: Any) -> PreprocessOptions:
    (file.parent / "template.jinja").write_text(template)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    given: dict[str, Any] = {"chat_template": str(file.parent / "template.jinja"), "loss_mask": "assistant", **more}
    source = SourceOptions(keys=("messages",))
    return PreprocessOptions((str(file),), str(file.with_suffix("")), tokenizer, source, restart=True, **given)


def learnt(options: PreprocessOptions) -> list[str]:
    """Preprocess, and return of each dialogue its text with what is learnt in brackets."""
    preprocess(options)
    prefix, tokenizer = f"{options.output_prefix}_messages_document", build_tokenizer(options.tokenizer)
    tokens, masks = IndexedDataset(prefix), IndexedDataset(prefix + "_loss_mask")
    assert masks.dtype == "uint8"
    assert masks.lengths.tolist() == tokens.lengths.tolist()
    assert masks.document_index.tolist() == tokens.document_index.tolist() == list(range(len(tokens) + 1))
    shown = []
    for ids, mask in zip(tokens[:], masks[:], strict=True):
        edges = [0, *(at for at in range(1, len(ids)) if mask[at] != mask[at - 1]), len(ids)]
        pieces = [(tokenizer.decode(ids[a:b].tolist()), mask[a]) for a, b in zip(edges, edges[1:], strict=False)]
        shown.append("".join(f"[{text}]" if on else text for text, on in pieces))
    return shown


def test_a_marked_template_gives_the_mask_of_transformers(tmp_path: Path, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the second witness needs the hf extra (transformers)")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    dialogues = [SAID, SAID[1:], SAID[:3], [*SAID, SAID[1]], SAID[1:3] * 2]
    preprocess(options_for(folder, tmp_path / "in.jsonl", *({"messages": said} for said in dialogues)))
    ours = [IndexedDataset(f"{tmp_path}/in_messages_document{end}")[:] for end in ("", "_loss_mask")]
    for said, ids, mask in zip(dialogues, *ours, strict=True):
        wanted = theirs.apply_chat_template(
            said, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        assert ids.tolist() == wanted["input_ids"]
        assert mask.tolist() == wanted["assistant_masks"]
        assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "prefixes"])
def test_what_an_assistant_says_is_learnt_with_the_end_of_its_turn(tmp_path: Path, folder: Path, template: str) -> None:
    asked, first = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in SAID[1:3]]
    file, answer = tmp_path / "in.jsonl", "<|im_start|>assistant\n[ The king \U0001f451\u4e2d<|im_end|>]\n"
    second = "<|im_start|>user\nOf what?<|im_end|>\n<|im_start|>assistant\n[Of\n nothing.\n<|im_end|>]\n"
    row = {"messages": SAID[1:]}
    options = options_for(folder, file, row, {"messages": [*SAID[1:3], SAID[1]]}, template=template)
    assert learnt(options) == [asked + answer + second, asked + answer + asked]
    assert learnt(replace(options, append_eod=True)) == [
        asked + answer + second + "[<|end|>]",
        asked + answer + asked + "<|end|>",
    ]
    assert learnt(replace(options, loss_mask="last"))[0] == asked + first + second
    assert learnt(replace(options, loss_mask="all"))[1] == f"[{asked}{first}{asked}]"
    weighted = [SAID[1], {**SAID[2], "weight": 0}, *SAID[3:]]
    prompted = {"prompt": SAID[1:4], "completion": SAID[4:], "system": "s"}
    for given in ({"messages": weighted}, prompted):
        assert learnt(options_for(folder, file, given, template=template)) == [asked + first + second]


def test_a_template_whose_prefixes_change_is_refused_where_it_matters(tmp_path: Path, folder: Path) -> None:
    file, single = tmp_path / "in.jsonl", {"messages": SAID[1:3]}
    options = options_for(folder, file, single, {"messages": SAID[1:]}, template=THINKS)
    with pytest.raises(DataError, match=r"in\.jsonl, line 2: .*message 2 .*--loss-mask last"):
        preprocess(options)
    assert [text.count("[<think></think>") for text in learnt(replace(options, loss_mask="last"))] == [1, 1]
    assert preprocess(replace(options, skip_bad=True)).num_skipped == 1


BAD = [
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}], "message 2.* empty"),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], "message 2.* empty"),
    ([{"role": "user", "content": "a"}], "no message of an assistant"),
    ([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}], "'robot'"),
    ([{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}], "TypeError"),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 2}], "weight 2"),
    ([{"role": "user", "content": "a" * 99}, {"role": "assistant", "content": "b"}], "tokens.*--seq-length 99"),
    ("text", "text"),
    ([], "text"),
]


def test_bad_dialogues_are_named_by_line_and_skipped_on_request(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.jsonl"
    for messages, reason in BAD:
        options = options_for(folder, file, {"messages": SAID}, {"messages": messages}, seq_length=99)
        with pytest.raises(DataError, match=rf"in\.jsonl, line 2: .*{reason}"):
            preprocess(options)
    options_for(folder, file, *({"messages": messages} for messages, _ in BAD), {"messages": SAID})
    file.write_text(file.read_text() + '{"messages": [}\n')
    command = ["preprocess", "--input", str(file), "--output-prefix", str(tmp_path / "out"), "--loss-mask"]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder), "--seq-length", "99"]
    assert main(command) == DataError.exit_code
    assert main([*command, "--bad-lines", "skip"]) == 0
    assert len(IndexedDataset(str(tmp_path / "out_messages_document_loss_mask"))) == 1
    skipped = (tmp_path / "out_skipped.txt").read_text().splitlines()
    assert [int(line.split("line ")[1].split(":")[0]) for line in skipped] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11]
    capsys.readouterr()
    with pytest.raises(ConfigError, match="--loss-mask half"):
        preprocess(replace(options, loss_mask="half"))
    with pytest.raises(ConfigError, match="--seq-length 99 needs --loss-mask"):
        preprocess(replace(options, loss_mask=None))
