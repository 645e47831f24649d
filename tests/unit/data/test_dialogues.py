"""Dialogues for fine-tuning: tokens and loss masks, equal to transformers' where a template marks its answers."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megalith.cli.main import main
from megalith.cli.preprocess import make_parser
from megalith.config import TokenizerConfig
from megalith.data.dialogues import DialogueEncoder
from megalith.data.encoding import ChunkEncoder, EncodedChunk
from megalith.data.indexed import IndexedDataset
from megalith.data.preprocess import PreprocessOptions, preprocess
from megalith.data.preprocess_options import ProgressListener, plan_sources
from megalith.data.shares import Share
from megalith.data.sources import Dialogue, Payload, SourceOptions
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import build_tokenizer
from megalith.tokenizers.chat_template import BUILT_IN, ChatTemplate, find_template
from megalith.tokenizers.fast_bpe import BytePairArrays
from megalith.tokenizers.huggingface import HuggingFaceTokenizer

pyarrow = pytest.importorskip("pyarrow", reason="the data extra is not installed")
pytest.importorskip("pyarrow.parquet")

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
    ([{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}], "message 1.* content"),
    ([{"role": "user", "text": "a"}, {"role": "assistant", "content": "b"}], "message 1.* content"),
    ([{"role": "system", "content": None}, {"role": "assistant", "content": "b"}], "message 1.* content"),
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
    (length,) = IndexedDataset(str(tmp_path / "out_messages_document")).lengths.tolist()
    fits = options_for(folder, tmp_path / "one.jsonl", {"messages": SAID}, seq_length=length - 1)
    report = preprocess(fits)  # the last token is only predicted
    assert (report.num_documents, report.num_new_tokens) == (1, length)
    with pytest.raises(DataError, match=f"--seq-length {length - 2}"):
        preprocess(replace(fits, seq_length=length - 2))
    assert len(IndexedDataset(str(tmp_path / "out_messages_document_loss_mask"))) == 1
    skipped = (tmp_path / "out_messages_document_skipped.txt").read_text().splitlines()
    assert [int(line.split("line ")[1].split(":")[0]) for line in skipped] == [*range(1, len(BAD) + 1), len(BAD) + 2]
    capsys.readouterr()
    with pytest.raises(ConfigError, match="--loss-mask half"):
        preprocess(replace(options, loss_mask="half"))
    with pytest.raises(ConfigError, match="--seq-length 99 needs --loss-mask"):
        preprocess(replace(options, loss_mask=None))


CALLED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "b", "reasoning_content": "c"},
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_our_templates_write_the_formats_of_their_models(tmp_path: Path, folder: Path) -> None:
    said = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user", "assistant")]
    texts = {
        "chatml": "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
        "[a<|im_end|>]\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n[a<|im_end|>]\n",
        "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nu<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[a<|eot_id|>]<|start_header_id|>"
        "user<|end_header_id|>\n\nu<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[a<|eot_id|>]",
        "mistral": "<s>[INST] s\n\nu[/INST][ a</s>][INST] u[/INST][ a</s>]",
        "plain": "su[a<|end|>]u[a<|end|>]",
        "identity": "su[a]u[a]",
        "nemotron-h-aligned": "<SPECIAL_10>System\ns\n<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n[a\n]"
        "<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n[a\n]",
        "nemotron-nano-v2": "<SPECIAL_10>System\ns\n<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n[a\n<SPECIAL_12>\n]"
        "<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n[a\n<SPECIAL_12>\n]",
        "qwen3": "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n[<think>\n\n"
        "</think>\n\na<|im_end|>]\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\na<|im_end|>]\n",
    }
    assert set(texts) == set(BUILT_IN)
    help_text = " ".join(make_parser().format_help().split())
    for name, text in texts.items():
        options = options_for(folder, tmp_path / "in.jsonl", {"messages": said}, chat_template=name, skip_bad=True)
        assert learnt(options) == [text]
        assert Path(f"{options.output_prefix}_messages_document.jinja").is_file()
        template = find_template(name, build_tokenizer(options.tokenizer))
        whole, prompt = template.render(said, add_generation_prompt=False), template.render(said[:4])
        assert whole.startswith(prompt) and name in help_text
        if not template.takes_tools:
            with pytest.raises(DataError, match="line 1.*tool"):
                preprocess(options_for(folder, tmp_path / "in.jsonl", {"messages": CALLED}, chat_template=name))
    called = options_for(folder, tmp_path / "in.jsonl", {"messages": CALLED, "tools": TOOLS}, chat_template="qwen3")
    (text,) = learnt(called)
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert '\n{"type": "function", "function": {"name": "f"}}\n</tools>' in text
    assert f"[<think>\n\n</think>\n\n{call}<|im_end|>]\n<|im_start|>user\n<tool_response>\n2\n" in text
    assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n[<think>\nc\n</think>\n\nb<|im_end|>]\n")


def test_an_end_of_document_that_the_template_writes_is_not_repeated(tmp_path: Path, folder: Path) -> None:
    rows = ({"messages": SAID[3:]}, {"messages": [*SAID[3:], SAID[3]]})
    options = options_for(folder, tmp_path / "in.jsonl", *rows, chat_template="plain", append_eod=True)
    answered = "Of what?[Of\n nothing.\n<|end|>]"
    assert learnt(options) == [answered, f"{answered}Of what?<|end|>"]


def test_templates_that_end_no_turn_are_named(tmp_path: Path, folder: Path) -> None:
    notes: list[str] = []
    listener = ProgressListener()
    listener.note = notes.append  # type: ignore[method-assign]
    options = options_for(folder, tmp_path / "in.jsonl", {"messages": SAID[1:3]}, chat_template="llama3")
    for given in (options, replace(options, append_eod=True), replace(options, chat_template="chatml")):
        preprocess(given, listener)
    assert [note for note in notes if "--append-eod" in note and "llama3" in note] == notes[:1] == notes


PLAIN_FORMS: dict[str, dict[str, Any]] = {
    "openai": {"messages": [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "tools": None},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "prompts": {"prompt": "q", "completion": "a"},
}


@pytest.mark.parametrize("form", PLAIN_FORMS)
def test_every_form_is_read_from_every_format(tmp_path: Path, folder: Path, form: str) -> None:
    row = PLAIN_FORMS[form]
    cells = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items() if value is not None
    }
    table = pyarrow.Table.from_pylist([row, row])
    (tmp_path / "in.json").write_text(json.dumps([row, row], indent=1))
    with (tmp_path / "in.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(cells))
        writer.writeheader()
        writer.writerows([cells, cells])
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    saved, hub = tmp_path / "saved" / "train", tmp_path / "hub" / "data"
    for made in (saved, hub):
        made.mkdir(parents=True)
    with pyarrow.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    pyarrow.parquet.write_table(table, hub / "train-00000-of-00001.parquet")
    options = options_for(folder, tmp_path / "in.jsonl", row, row, chat_template="chatml")
    for name in ("in.jsonl", "in.json", "in.csv", "in.parquet", "saved", "hub"):
        read = replace(options, inputs=(str(tmp_path / name),))
        assert learnt(read) == ["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[a<|im_end|>]\n"] * 2, name


def test_columns_without_values_are_absent(tmp_path: Path, folder: Path) -> None:
    rows = [{"messages": CALLED, "tools": TOOLS}, {"messages": SAID, "tools": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    options = options_for(folder, tmp_path / "in.jsonl", *rows, chat_template="qwen3")
    assert learnt(replace(options, inputs=(str(tmp_path / "in.parquet"),))) == learnt(options)


def test_shares_and_datasets_are_merged_with_their_masks(tmp_path: Path, folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": str(n)}, SAID[2]]} for n in range(40)]
    options = options_for(folder, tmp_path / "in.jsonl", *rows)
    source = replace(options.source, limits=replace(options.source.limits, chunk_bytes=60))
    options = replace(options, source=source)
    wanted = learnt(options)
    ends = (
        "messages_document.bin",
        "messages_document.idx",
        "messages_document_loss_mask.bin",
        "messages_document.jinja",
    )
    contents = [Path(f"{options.output_prefix}_{end}").read_bytes() for end in ends]
    for workers in (1, 2):
        out = str(tmp_path / f"out{workers}")
        for number in range(2):
            preprocess(replace(options, output_prefix=out, share=Share(number, 2), workers=workers))
        assert main(["data", "merge", "--shares", "--remove", "--output-prefix", out]) == 0
        assert [Path(f"{out}_{end}").read_bytes() for end in ends] == contents
    assert not list(tmp_path.glob("*share*"))
    two = [f"{tmp_path}/{name}_messages_document" for name in ("in", "out1")]
    assert main(["data", "merge", *two, "--output-prefix", str(tmp_path / "both")]) == 0
    assert IndexedDataset(f"{tmp_path}/both_loss_mask").num_tokens == IndexedDataset(f"{tmp_path}/both").num_tokens
    assert len(wanted) == 40
    Path(f"{two[0]}.jinja").write_text("another")
    assert main(["data", "merge", *two, "--output-prefix", str(tmp_path / "both")]) == DataError.exit_code
    Path(f"{two[0]}_loss_mask.idx").unlink()
    assert main(["data", "merge", *two, "--output-prefix", str(tmp_path / "both")]) == DataError.exit_code


def test_the_fast_encoder_gives_the_ids_and_masks_of_the_library(tmp_path: Path, folder: Path) -> None:
    said = [
        *SAID,
        {"role": "user", "content": "e\u0301 \u212b \u0958 <|im_end|>"},
        {"role": "assistant", "content": "\U0001f451"},
    ]
    nfc = tmp_path / "nfc"
    nfc.mkdir()
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for normalizer in (None, tokenizers.normalizers.NFC()):
        if normalizer is not None:
            model.normalizer = normalizer
        model.save(str(nfc / "tokenizer.json"))
        (nfc / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
        tokenizer = HuggingFaceTokenizer(nfc)
        assert tokenizer.token_sizes is not None
        dialogues = [Dialogue("", one) for one in (SAID, said, SAID[1:3])]  # one that NFC changes among others
        for template in (MARKED, PLAIN):
            encoders = [
                DialogueEncoder(ChatTemplate(template), tokenizer, "assistant", None, None, n) for n in (0, 1 << 40)
            ]
            encoders.append(DialogueEncoder(ChatTemplate(template), tokenizer, "assistant", None, None))
            encoders[-1]._arrays = None  # by the offsets of the library
            assert isinstance(encoders[1]._arrays, BytePairArrays) and encoders[1]._arrays._gigatoken is not None
            found = [encoder.encode(dialogues) for encoder in encoders]
            first, *others = [[[part.tolist() for part in pair] for pair in one] for one in found]  # type: ignore[union-attr]
            assert others == [first, first]
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    model.save(str(nfc / "tokenizer.json"))
    assert HuggingFaceTokenizer(nfc).token_sizes is None


def test_inspect_shows_what_is_learnt(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": SAID[1:3]}, {"messages": SAID}, {"messages": SAID[1:3]}]
    (text, *_) = learnt(options_for(folder, tmp_path / "in.jsonl", *rows))
    prefix = str(tmp_path / "in_messages_document")
    command = ["data", "inspect", prefix, "--chat", "--documents", "1", "--tokenizer-type", "HuggingFaceTokenizer"]
    command += ["--tokenizer-model", str(folder)]
    first, second = IndexedDataset(prefix).lengths.tolist()[:2]
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert text.replace("[", "[[").replace("]", "]]") in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(command) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[90m<|im_start|>user" in coloured and "\x1b[0m\n The king" in coloured and "[[" not in coloured
    assert main([*command, "--json", "--seq-length", str(first)]) == 0
    found = json.loads(capsys.readouterr().out)
    masks = IndexedDataset(prefix + "_loss_mask")
    assert found["learnt_tokens"] == sum(int(mask.sum()) for mask in masks[:])
    assert found["longest"] == [[1, second], [0, first], [2, first]]
    assert (found["cut_documents"], found["cut_tokens"]) == (1, second - first - 1)
    assert (found["rows"], found["fill"]) == (3, pytest.approx((3 * first - 2) / (3 * first)))
    characters = sum(
        len(build_tokenizer(options_for(folder, tmp_path / "x.jsonl").tokenizer).decode(ids.tolist()))
        for ids in IndexedDataset(prefix)[:]
    )
    assert found["characters_per_token"] == pytest.approx(characters / found["tokens"])
    for wrong in (["--seq-length", "0"], ["--tokenizer-type", "NullTokenizer"]):
        assert main([*command, *wrong]) in (ConfigError.exit_code, DataError.exit_code)
    assert main(["data", "inspect", prefix, "--chat"]) == ConfigError.exit_code
    Path(f"{prefix}_loss_mask.idx").unlink()
    assert main(command) == DataError.exit_code


def test_a_dataset_without_a_mask_has_none_of_an_earlier_one(tmp_path: Path, folder: Path) -> None:
    options = options_for(folder, tmp_path / "in.jsonl", {"messages": SAID})
    preprocess(options)
    beside = [Path(f"{tmp_path}/in_messages_document{end}") for end in ("_loss_mask.bin", "_loss_mask.idx", ".jinja")]
    assert all(path.is_file() for path in beside)
    (tmp_path / "in.jsonl").write_text("oops")
    with pytest.raises(DataError):
        preprocess(replace(options, loss_mask=None))
    assert all(path.is_file() for path in beside)
    preprocess(replace(options_for(folder, tmp_path / "in.jsonl", {"messages": SAID}), loss_mask=None))
    assert not any(path.exists() for path in beside)


def test_an_unfinished_run_goes_on_with_its_mask(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": [{"role": "user", "content": str(n)}, SAID[2]]} for n in range(20)]
    options = options_for(folder, tmp_path / "in.jsonl", *rows)
    limits = replace(options.source.limits, chunk_bytes=60)
    options = replace(options, source=replace(options.source, limits=limits), journal_interval=0.0)
    (source,) = plan_sources(options).sources
    wanted, chunks = learnt(options), len(list(source.chunks()))
    ends = (".bin", ".idx", "_loss_mask.bin", "_loss_mask.idx")
    contents = [Path(f"{options.output_prefix}_messages_document{end}").read_bytes() for end in ends]
    encode, calls = ChunkEncoder.encode, list[int]()

    def interrupted(self: ChunkEncoder, payload: Payload) -> EncodedChunk:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return encode(self, payload)

    monkeypatch.setattr(ChunkEncoder, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preprocess(options)
    assert Path(f"{options.output_prefix}_messages_document.unfinished").is_file()
    before = len(calls)
    assert learnt(replace(options, restart=False)) == wanted
    assert len(calls) - before < chunks
    assert [Path(f"{options.output_prefix}_messages_document{end}").read_bytes() for end in ends] == contents


def test_dialogues_that_are_json_in_text_are_rendered_without_a_mask_too(folder: Path, tmp_path: Path) -> None:
    words = {"template": PLAIN, "loss_mask": None}
    found = []
    for name, row in (("plain", {"messages": SAID}), ("text", {"messages": json.dumps(SAID)})):
        options = options_for(folder, tmp_path / f"{name}.jsonl", row, **words)
        preprocess(options)
        found.append(IndexedDataset(f"{options.output_prefix}_messages_document")[0].tolist())
    assert found[0] == found[1]


def test_content_in_parts_is_one_text_and_an_image_is_a_bad_line(folder: Path, tmp_path: Path) -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I"}]},
    ]
    whole = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I"}]
    for template in ("chatml", "llama3"):
        said = learnt(options_for(folder, tmp_path / "a.jsonl", {"messages": parts}, chat_template=template))
        assert said == learnt(options_for(folder, tmp_path / "b.jsonl", {"messages": whole}, chat_template=template))
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]}
    with pytest.raises(DataError, match="image_url"):
        learnt(options_for(folder, tmp_path / "c.jsonl", {"messages": [image, whole[1]]}))
