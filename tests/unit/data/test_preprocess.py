"""Text to tokens in one process: what is a document, the same bytes for any cut, and what bad input says."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import tokenizers

from megalith.cli.preprocess import parse
from megalith.config import TokenizerConfig
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.preprocess import PreprocessOptions, find_violations, preprocess
from megalith.data.preprocess_options import ProgressListener, ProgressSnapshot
from megalith.data.shares import Share
from megalith.data.sources import Limits, SourceOptions, find_sources, format_of
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import build_tokenizer, train_byte_level_bpe

NUMBERS = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab_file, merge_file = train_byte_level_bpe(["first second third document of words"] * 3, 280, folder)
    return TokenizerConfig(vocab_file=str(vocab_file), merge_file=str(merge_file))


def texts_of(prefix: str, tokenizer: TokenizerConfig) -> list[str]:
    """Each document of a dataset as text."""
    dataset, decoder = IndexedDataset(prefix), build_tokenizer(tokenizer)
    sequences = [decoder.decode(tokens.tolist()) for tokens in dataset[:]]
    bounds = dataset.document_index.tolist()
    return ["".join(sequences[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def options_for(
    file: Path,
    content: str | bytes,
    tokenizer: TokenizerConfig,
    chunk_bytes: int = 1 << 19,
    max_document_bytes: int = 1 << 26,
    json_keys: tuple[str, ...] = ("text",),
    document_separator: str | None = None,
    **more: Any,
) -> PreprocessOptions:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    source = SourceOptions(
        keys=json_keys,
        document_separator=document_separator,
        limits=Limits(chunk_bytes, max_document_bytes),
    )
    return PreprocessOptions((str(file),), str(file.with_suffix("")), tokenizer, source, **more)


def lines(*documents: Any) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


def test_json_lines_become_documents(tmp_path: Path, bpe: TokenizerConfig) -> None:
    content = lines({"text": "first"}, {"text": ""}, {"text": "caf\u00e9 \u4e2d", "id": 1}, {"text": ["a", "", "b"]})
    options = options_for(tmp_path / "in.jsonl", content, bpe, append_eod=True)
    report = preprocess(options)
    end = "<|endoftext|>"
    prefix = report.prefixes["text"]
    assert prefix == f"{tmp_path}/in_text_document"
    assert texts_of(prefix, bpe) == [f"first{end}", "", f"caf\u00e9 \u4e2d{end}", f"ab{end}"]
    assert (report.num_documents, report.num_bytes) == (4, len(content))
    assert report.num_tokens == {"text": IndexedDataset(prefix).num_tokens}
    assert IndexedDataset(prefix).document_index.tolist() == [0, 1, 1, 2, 4]


@pytest.mark.parametrize("append_eod", [False, True])
def test_many_documents_at_once_are_as_one_by_one(append_eod: bool, tmp_path: Path, bpe: TokenizerConfig) -> None:
    """A list instead of a text makes its chunk go document by document."""
    texts = ["", "one", "\u4e2d\u56fd", "", "x " * 9000, *(f"text {number}" * (number % 5) for number in range(4000))]
    for name, first in (("plain", "begin"), ("list", ["begin"])):
        content = lines(*({"a": value, "b": f"{number}"} for number, value in enumerate([first, *texts])))
        preprocess(options_for(tmp_path / f"{name}.jsonl", content, bpe, json_keys=("a", "b"), append_eod=append_eod))
    for key in ("a", "b"):
        for ending in ("bin", "idx"):
            files = [tmp_path / f"{name}_{key}_document.{ending}" for name in ("plain", "list")]
            assert files[0].read_bytes() == files[1].read_bytes()


def test_line_endings_blank_lines_and_byte_order_mark(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "1"}\r\n\r\n  \n{"text": "2 3"}'
    report = preprocess(options_for(tmp_path / "in.jsonl", content, NUMBERS))
    assert texts_of(report.prefixes["text"], NUMBERS) == ["1", "2 3"]


def test_every_key_is_a_dataset(tmp_path: Path) -> None:
    content = lines({"a": "1 2", "b": "3"}, {"a": "4", "b": "5 6"})
    report = preprocess(options_for(tmp_path / "in.jsonl", content, NUMBERS, json_keys=("b", "a")))
    assert texts_of(f"{tmp_path}/in_a_document", NUMBERS) == ["1 2", "4"]
    assert texts_of(f"{tmp_path}/in_b_document", NUMBERS) == ["3", "5 6"]
    assert report.num_tokens == {"b": 3, "a": 3}


@pytest.mark.parametrize(
    ("content", "separator", "documents"),
    [
        ("One.\n<|endoftext|>\nTwo.\n\nStill two.\n<|endoftext|>\n", None, ["One.", "Two.\n\nStill two."]),
        ("One.<|endoftext|>Two.", None, ["One.", "Two."]),
        ("<|endoftext|>\n \n<|endoftext|>One.", None, ["One."]),
        ("One\nmore.\n\n\n\nTwo.\n", None, ["One\nmore.", "Two."]),
        ("One.\r\n\r\nTwo.\r\n", None, ["One.", "Two."]),
        (" All of\nit.\n", None, [" All of\nit.\n"]),
        ("One.\nTwo.\n\nThree.", "\n", ["One.", "Two.", "Three."]),
        ("One---Two", "---", ["One", "Two"]),
        ("One<|endoftext|>", "---", ["One<|endoftext|>"]),
    ],
)
def test_documents_of_a_text(
    content: str, separator: str | None, documents: list[str], tmp_path: Path, bpe: TokenizerConfig
) -> None:
    for chunk_bytes in (1, 7, 1 << 19):
        options = options_for(tmp_path / "in.txt", content, bpe, document_separator=separator, chunk_bytes=chunk_bytes)
        assert texts_of(preprocess(options).prefixes["text"], bpe) == documents


def test_formats_are_found(tmp_path: Path) -> None:
    for name, content, expected in (
        ("a.jsonl", b"?", "jsonl"),
        ("a.JSON", b"?", "jsonl"),
        ("a.json", b' [ {"text": ""}]', "json"),
        ("a.ndjson", b"?", "jsonl"),
        ("a.txt", b"{", "txt"),
        ("a", b'\xef\xbb\xbf\n{"text": ""}', "jsonl"),
        ("a", b"PAR1", "parquet"),
        ("a", b"text", None),
    ):
        (tmp_path / name).write_bytes(content)
        assert format_of(tmp_path / name) == expected


def test_processes_that_have_nothing_to_do_are_not_started(tmp_path: Path) -> None:
    assert preprocess(options_for(tmp_path / "in.jsonl", lines({"text": "1"}), NUMBERS, workers=64)).workers == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "JSON: "),
        (b'{"text": "1"} {"text": "2"}', "JSON: Extra data"),
        (b"\xff", "byte 0 of the line is not valid UTF-8"),
        (b'["1"]', "expected a JSON object, found an array: give one object per line"),
        (b'[{"text": "1"},', "it looks like a JSON array"),
        (b"7", "expected a JSON object, found a int"),
        (b'{"content": "1", "id": 3}', 'no key "text"; its keys are "content", "id" (--json-keys names the text)'),
        (b"{}", "its keys are none"),
        (b'{"text": null}', 'the value of "text" is not text but null'),
        (b'{"text": ["1", 2]}', 'the value of "text" is not text but ["1", 2]'),
        (b'{"text": "one"}', "NullTokenizer takes whole numbers"),
        (b'{"text": "1 -2"}', "token -2 "),
        (b'{"text": "70000"}', "token 70000 "),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"9" * 5000 + b"}", 'the value of "text" is not text but Infinity'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunk_bytes", [16, 1 << 19])
def test_a_bad_line_is_named_and_nothing_is_left(line: bytes, reason: str, chunk_bytes: int, tmp_path: Path) -> None:
    good = b'{"text": "1 2 3"}\n'
    content = good * 40 + b"\n" + line + b"\n" + good
    options = options_for(tmp_path / "in.jsonl", content, NUMBERS, chunk_bytes=chunk_bytes)
    with pytest.raises(DataError) as caught:
        preprocess(options)
    assert f"{tmp_path}/in.jsonl, line 42: " in str(caught.value)
    assert reason in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_ids_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=99)  # ids 0 to 99
    report = preprocess(options_for(tmp_path / "in.jsonl", lines({"text": "0 99"}), tokenizer))
    assert texts_of(report.prefixes["text"], tokenizer) == ["0 99"]
    for content in (lines({"text": "1"}, {"text": "5 100"}), lines({"text": "1"}, {"text": ["2", "100"]})):
        with pytest.raises(DataError, match=r"in\.jsonl, line 2: .*\b100\b"):
            preprocess(options_for(tmp_path / "in.jsonl", content, tokenizer))


def test_a_lone_surrogate_is_named(tmp_path: Path, bpe: TokenizerConfig) -> None:
    with pytest.raises(DataError, match=r"line 1.*character 1.*U\+DC00"):
        preprocess(options_for(tmp_path / "in.jsonl", '{"text": "a\\udc00"}', bpe))


def test_bad_bytes_in_a_text_are_named(tmp_path: Path, bpe: TokenizerConfig) -> None:
    content = b"a<|endoftext|>b<|endoftext|>\xe9<|endoftext|>"
    for chunk_bytes in (5, 1 << 19):
        with pytest.raises(DataError, match=r"in\.txt.*document 3.*0xe9.*--encoding"):
            preprocess(options_for(tmp_path / "in.txt", content, bpe, chunk_bytes=chunk_bytes))


def test_a_document_longer_than_the_limit_is_named(tmp_path: Path) -> None:
    options = options_for(
        tmp_path / "in.jsonl",
        lines({"text": "1"}) + " " * 100 + lines({"text": "2"}),
        NUMBERS,
        chunk_bytes=10,
        max_document_bytes=60,
    )
    with pytest.raises(DataError, match="line 2.*113.*60"):
        preprocess(options)
    options = options_for(tmp_path / "in.txt", "word " * 30, NUMBERS, chunk_bytes=10, max_document_bytes=60)
    with pytest.raises(DataError, match=r"byte 0 .*--document-separator"):
        preprocess(options)


@pytest.mark.parametrize(("name", "content"), [("in.jsonl", "\n  \n"), ("in.txt", "\n \n")])
def test_no_document_at_all_is_an_error(name: str, content: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{name}"):
        preprocess(options_for(tmp_path / name, content, NUMBERS))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_failed_run_leaves_the_old_dataset(tmp_path: Path) -> None:
    report = preprocess(options_for(tmp_path / "in.jsonl", lines({"text": "1 2"}), NUMBERS))
    with pytest.raises(DataError):
        preprocess(options_for(tmp_path / "in.jsonl", "oops", NUMBERS))
    assert texts_of(report.prefixes["text"], NUMBERS) == ["1 2"]


def test_all_violations_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty.jsonl").touch()
    source = SourceOptions(
        keys=("a", "a", "b/c"), input_format="xml", document_separator="", text_column="t", csv_delimiter="::"
    )
    options = PreprocessOptions(
        inputs=(str(tmp_path / "none.jsonl"),),
        output_prefix=str(tmp_path / "file" / "out"),
        tokenizer=TokenizerConfig(vocab_file=str(tmp_path)),
        source=source,
        workers=0,
    )
    with pytest.raises(ConfigError) as caught:
        preprocess(options)
    assert [violation.split(":")[0] for violation in caught.value.violations] == [
        "--merge-file is missing",
        "--json-keys a a b/c",
        "--json-keys b/c",
        "--text-column t",
        "--document-separator is empty; leave it out to detect the separator",
        "--input-format xml",
        "--csv-delimiter '",
        "--workers 0 is below 1",
        f"--vocab-file {tmp_path}",
        f"--output-prefix {tmp_path}/file/out",
    ]
    inputs = ("none.jsonl", "empty.jsonl", "*.csv", "org/name", ".")
    names = [f"{tmp_path}/{name}" if name != "org/name" else name for name in inputs]
    plan = find_sources(names, SourceOptions())
    for violation, reason in zip(
        plan.violations,
        (
            "no such file",
            "no file matches",
            "hf:org/name",
            "the file is empty",
            "is empty",
        ),
        strict=True,
    ):
        assert reason in violation


def test_keys_of_plain_text_are_refused(tmp_path: Path) -> None:
    (violation,) = find_violations(options_for(tmp_path / "in.txt", "1", NUMBERS, json_keys=("body",)))
    assert "in.txt" in violation and "body" in violation


def test_progress_is_reported(tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    class Watcher(ProgressListener):
        def opening(self, path: str, about: str) -> None:
            seen.append(("opening", path, about))

        def started(self, seconds: float, workers: int) -> None:
            seen.append(("started", workers))

        def advanced(self, snapshot: ProgressSnapshot) -> None:
            seen.append((snapshot.documents, snapshot.bytes, snapshot.disk, snapshot.disk_total))

        def finished(self, snapshot: ProgressSnapshot) -> None:
            seen.append(("finished", snapshot.documents, snapshot.bytes))

    content = lines({"text": "1"}, {"text": "2"})
    options = options_for(tmp_path / "in.jsonl", content, NUMBERS, chunk_bytes=14)
    preprocess(options, Watcher())
    opening = ("opening", options.inputs[0], "jsonl, UTF-8")
    assert seen == [opening, ("started", 1), (1, 14, 14, 28), (2, 28, 28, 28), ("finished", 2, 28)]


CHARACTERS = TokenizerConfig(tokenizer_type="CharacterTokenizer")


class Notes(ProgressListener):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_vocabulary_of_characters_is_made_from_the_input(tmp_path: Path) -> None:
    text = "Zeile eins\n\nüber 中\n"
    options = options_for(tmp_path / "text.txt", text, CHARACTERS, chunk_bytes=4)
    options = replace(options, source=replace(options.source, one_document_per_file=True))
    listener = Notes()
    report = preprocess(options, listener)
    made = tmp_path / "text_vocab.json"
    assert str(made) in "\n".join(listener.notes)
    assert json.loads(made.read_text(encoding="utf-8")) == {c: n for n, c in enumerate(sorted(set(text)))}
    tokenizer = replace(CHARACTERS, vocab_file=str(made))
    assert texts_of(report.prefixes["text"], tokenizer) == [text]
    # A further text is encoded with it, and may have no other characters.
    more = replace(options_for(tmp_path / "more.txt", "eins über\n", tokenizer), source=options.source)
    assert texts_of(preprocess(more).prefixes["text"], tokenizer) == ["eins über\n"]
    other = replace(options_for(tmp_path / "other.txt", "eins\neinß\n", tokenizer), source=options.source)
    with pytest.raises(DataError, match=r"other\.txt, document 1: line 2 .*'ß' \(U\+00DF\).*text_vocab\.json"):
        preprocess(other)


def test_a_vocabulary_of_characters_takes_the_whole_file_back(tmp_path: Path) -> None:
    text = "eins\n\nzwei\n"
    report = preprocess(options_for(tmp_path / "text.txt", text, CHARACTERS))
    assert report.num_documents == 2
    tokenizer = replace(CHARACTERS, vocab_file=str(tmp_path / "text_vocab.json"))
    assert texts_of(report.prefixes["text"], tokenizer) == ["eins", "zwei"]
    built = build_tokenizer(tokenizer)
    assert built.decode(built.encode(text)) == text


def test_every_key_and_sequence_is_in_the_vocabulary_of_characters(tmp_path: Path) -> None:
    content = lines({"a": "xy", "b": ["m", "n\n"]}, {"a": "z"}, {"a": "", "b": "o"})
    options = options_for(
        tmp_path / "c.jsonl", content, CHARACTERS, json_keys=("a", "b"), append_eod=True, skip_bad=True
    )
    preprocess(options)
    ids = json.loads((tmp_path / "c_vocab.json").read_text(encoding="utf-8"))
    assert list(ids) == ["\n", "m", "n", "o", "x", "y", "<|endoftext|>"]  # z is in a document that is left out


def test_a_failed_run_leaves_the_old_vocabulary_of_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.data.indexed.writer._SECONDS_FOR_ORPHANS", 0.0)
    report = preprocess(options_for(tmp_path / "c.jsonl", lines({"text": "abc"}), CHARACTERS))
    vocabulary = tmp_path / "c_vocab.json"
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(DataError, match=r"c\.jsonl, line 2"):
        preprocess(options_for(tmp_path / "c.jsonl", lines({"text": "xyz"}) + "oops", CHARACTERS))
    assert texts_of(report.prefixes["text"], replace(CHARACTERS, vocab_file=str(vocabulary))) == ["abc"]
    with IndexedWriter(report.prefixes["text"], "uint16"):  # another process writes this prefix
        other = options_for(tmp_path / "c.jsonl", lines({"text": "xyz"}), CHARACTERS)
        with pytest.raises(DataError, match="another process"):
            preprocess(other)
    assert texts_of(report.prefixes["text"], replace(CHARACTERS, vocab_file=str(vocabulary))) == ["abc"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_share_cannot_make_the_vocabulary_of_characters(tmp_path: Path) -> None:
    options = options_for(tmp_path / "c.txt", "abc", CHARACTERS, share=Share(0, 2, "--share 1/2"))
    assert [problem.split()[0] for problem in find_violations(options)] == ["--vocab-file"]
    assert find_violations(replace(options, share=Share())) == []


def test_append_eod_needs_an_end_in_the_vocabulary(tmp_path: Path) -> None:
    options = options_for(tmp_path / "c.txt", "abc", CHARACTERS)
    preprocess(options)
    named = replace(options, tokenizer=replace(CHARACTERS, vocab_file=str(tmp_path / "c_vocab.json")), append_eod=True)
    with pytest.raises(DataError, match="--append-eod"):
        preprocess(named)


def tar_of(name: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tape:
        header = tarfile.TarInfo(name)
        header.size = len(content)
        tape.addfile(header, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize("packing", ["plain", "gz", "tar"])
@pytest.mark.parametrize("form", ["jsonl", "txt"])
def test_standard_input_gives_the_bytes_of_a_file(
    form: str, packing: str, tmp_path: Path, bpe: TokenizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = range(9000)
    text = lines(*({"text": f"document {number}"} for number in numbers))
    if form == "txt":
        text = "".join(f"document {number}<|endoftext|>" for number in numbers)
    options = options_for(tmp_path / f"in.{form}", text, bpe, append_eod=True)
    options = replace(options, source=replace(options.source, input_format=form, limits=Limits(1 << 15)))
    if packing == "tar":
        options = replace(options, source=replace(options.source, document_separator="<|endoftext|>"))
    preprocess(options)
    content = {"plain": bytes, "gz": gzip.compress, "tar": lambda found: tar_of(f"a.{form}", found)}[packing](
        text.encode()
    )
    monkeypatch.setattr("megalith.data.sources.streams._KEPT_BYTES", 1 << 16)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    piped = replace(options, inputs=("-",), output_prefix=str(tmp_path / "piped"), workers=2, journal_interval=0.0)
    assert not find_violations(piped)
    report = preprocess(piped)
    assert (report.num_documents, report.workers) == (9000, 2)
    for ending in ("bin", "idx"):
        expected = Path(f"{options.output_prefix}_text_document.{ending}").read_bytes()
        assert Path(f"{piped.output_prefix}_text_document.{ending}").read_bytes() == expected
    assert not list(tmp_path.glob("*unfinished*"))
    if packing != "tar":
        assert len(texts_of(f"{piped.output_prefix}_text_document", bpe)) == 9000


def test_standard_input_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.data.sources.streams._KEPT_BYTES", 1 << 19)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "1"}\nx\n' * 50000)))
    options = PreprocessOptions(("-",), str(tmp_path / "out"), NUMBERS)
    with pytest.raises(DataError, match="-, line 2: "):
        preprocess(options)
    assert not list(tmp_path.iterdir())
    with pytest.raises((DataError, ConfigError), match="standard input"):
        preprocess(options)
    for more in (
        {"inputs": ("-", "a.txt")},
        {"share": Share(0, 2, "--share 1/2")},
        {"partitions": 2, "keep_sequential": True},
        {"tokenizer": TokenizerConfig(tokenizer_type="CharacterTokenizer")},
    ):
        violations = find_violations(replace(options, **more), files=False)
        assert any("--input -" in violation for violation in violations)
    for content, said in ((b"", "empty"), (b"PK\x03\x04" + bytes(600), "zip"), (b"PAR1" + bytes(600), "parquet")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        (violation,) = find_sources(["-"], SourceOptions()).violations
        assert said in violation


TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}more{% endif %}"
)
SAID = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}]


def test_messages_become_text_by_a_template(tmp_path: Path, bpe: TokenizerConfig) -> None:
    shared = [{"from": "human", "value": "first"}, {"from": "gpt", "value": "second"}]
    rows = [{"messages": SAID}, {"messages": shared}, {"messages": "text"}, {"messages": [{"role": 1}]}]
    (tmp_path / "turns.jinja").write_text(TURNS)
    options = options_for(tmp_path / "in.jsonl", lines(*rows), bpe, json_keys=("messages",), skip_bad=True)
    given = replace(options, chat_template=str(tmp_path / "turns.jinja"))
    assert preprocess(given).num_skipped == 1
    said = "<|user|>first<|assistant|>second"
    assert texts_of(str(tmp_path / "in_messages_document"), bpe) == [said, said, "text"]
    with pytest.raises(DataError, match="line 1: .*--chat-template"):
        preprocess(replace(options, skip_bad=False))
    (tmp_path / "turns.jinja").write_text("{{ raise_exception('no such role') }}")
    with pytest.raises(DataError, match="line 1: .*no such role"):
        preprocess(replace(given, skip_bad=False))
    for damaged in ("{% if %}", "{{ ''.__class__.__mro__ }}"):
        (tmp_path / "turns.jinja").write_text(damaged)
        with pytest.raises(DataError, match="template"):
            preprocess(replace(given, skip_bad=False))
    for value in ("tokenizer", str(tmp_path / "absent.jinja")):
        with pytest.raises(DataError, match="--chat-template"):
            preprocess(replace(given, chat_template=value))


ALPACA = {"instruction": "a", "input": "b", "output": "c", "history": [["x", "y"]], "system": "s"}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"id": 1, "system": "s", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
     "<|system|>s<|user|>x<|assistant|>y"),
    (ALPACA, "<|system|>s<|user|>x<|assistant|>y<|user|>a\nb<|assistant|>c"),
    ({"instruction": "a", "input": "", "output": "c"}, "<|user|>a<|assistant|>c"),
    ({"prompt": "first", "completion": "second"}, "<|user|>first<|assistant|>second"),
    ({"prompt": SAID[:1], "completion": SAID[1:]}, "<|user|>first<|assistant|>second"),
    ({"messages": SAID, "tools": [{"name": "t"}]}, "[t]<|user|>first<|assistant|>second"),
    ({"messages": SAID, "tools": '[{"name": "t"}]'}, "[t]<|user|>first<|assistant|>second"),
    ({"messages": SAID, "tools": []}, "<|user|>first<|assistant|>second"),
]  # fmt: skip


def test_dialogues_of_every_form_and_format(tmp_path: Path, bpe: TokenizerConfig) -> None:
    template, prefix = tmp_path / "turns.jinja", str(tmp_path / "in_messages_document")
    template.write_text("{% for t in tools or [] %}[{{ t.name }}]{% endfor %}" + TURNS)
    bad = [{"instruction": 1, "output": "c"}, {"messages": SAID, "tools": "[}"}, {"prompt": "only"}]
    options = options_for(
        tmp_path / "in.jsonl", lines(*(row for row, _ in FORMS), *bad), bpe, json_keys=("messages",), skip_bad=True
    )
    options = replace(options, chat_template=str(template))
    assert preprocess(options).num_skipped == len(bad)
    assert texts_of(prefix, bpe) == [text for _, text in FORMS]
    (tmp_path / "in.csv").write_text("prompt,completion\nfirst,second\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ALPACA]), tmp_path / "in.parquet")
    for name, (_, text) in (("in.csv", FORMS[3]), ("in.parquet", FORMS[1])):
        preprocess(replace(options, inputs=(str(tmp_path / name),), restart=True))
        assert texts_of(prefix, bpe) == [text]
    template.write_text(TURNS)
    (tmp_path / "in.jsonl").write_text(lines(FORMS[5][0]))
    with pytest.raises(DataError, match="line 1: .*tools"):
        preprocess(replace(options, skip_bad=False, restart=True))


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
@pytest.mark.parametrize("keys", [("prompt", "chosen", "rejected"), ("prompt", "answer")])
def test_what_is_no_dialogue_is_answered_with_what_is_read(name: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    row = dict.fromkeys(keys, "1 2")
    options = options_for(tmp_path / "in.jsonl", lines(row), NUMBERS, json_keys=("messages",))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "in.parquet")
    with pytest.raises((ConfigError, DataError)) as caught:
        preprocess(replace(options, inputs=(str(tmp_path / name),), chat_template="chatml"))
    assert all(word in str(caught.value) for word in (*keys, "conversations", "instruction", "completion"))
    assert ("DPO" in str(caught.value)) == ("rejected" in keys)


def test_the_template_of_a_tokenizer_writes_its_special_tokens_itself(tmp_path: Path) -> None:
    words = {"<s>": 0, "</s>": 1, "first": 2, "second": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(["<s>", "</s>"])
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    (tmp_path / "model").mkdir()
    model.save(str(tmp_path / "model" / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    table = pyarrow.table({"messages": [SAID, SAID[1:]]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    model_flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "model")]
    command = ["--input", str(tmp_path / "in.parquet"), "--output-prefix", str(tmp_path / "out"), *model_flags]
    preprocess(parse([*command, "--chat-template", "tokenizer", "--append-eod"]).options)
    assert [ids.tolist() for ids in IndexedDataset(str(tmp_path / "out_messages_document"))[:]] == [
        [0, 2, 1],
        [0, 3, 1],
    ]
    with pytest.raises(ConfigError, match="--split-sentences"):
        parse([*command, "--chat-template", "tokenizer", "--split-sentences", "--sentence-splitter", "marks"])


def test_settings_that_a_tokenizer_does_not_look_at_are_noted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2")
    words = ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "out")]
    kind = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert parse([*words, *kind]).notes == []
    notes = parse([*words, *kind, "--vocab-file", "absent", "--vocab-extra-ids", "5"]).notes
    assert [note.split(" has ")[0] for note in notes] == ["--vocab-file absent", "--vocab-extra-ids 5"]
