"""A peer of `megalith preprocess`: the script that one would write with orjson and gigatoken.

    python benchmarks/peers/preprocess.py INPUT.jsonl OUTPUT VOCAB.json MERGES.txt WORKERS

Reads `text` of each line, encodes it with GPT-2's vocabulary, appends the end-of-text token and writes OUTPUT.bin and
OUTPUT.idx in Megatron's format. It keeps no journal, checks nothing, waits for no disk and cannot be resumed.
"""

import multiprocessing
import os
import struct
import sys

import gigatoken
import numpy as np
import orjson
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

STEP = 1 << 20  # bytes of the input at once: its texts and ids stay in the cache
source, output, vocab_file, merge_file, workers = sys.argv[1:]
library = Tokenizer(BPE.from_file(vocab_file, merge_file))
library.pre_tokenizer = ByteLevel(add_prefix_space=False)
encode = gigatoken.Tokenizer.from_json(library.to_str()).encode  # text by text: a batch needs awkward, 0.3 s to import
end_of_text = np.array([library.token_to_id("<|endoftext|>")], np.uint16)


def encode_lines(begin):
    """Return the ids and lengths of the lines that begin in `STEP` bytes of the input."""
    with open(source, "rb") as file:
        file.seek(max(0, begin - 1))
        if begin:
            file.readline()
        left = begin + STEP - file.tell()
        # readlines(n) ends after more than n bytes, and never for n = 0
        lines = file.readlines(left - 1) if left > 1 else [file.readline()] if left == 1 else []
    pieces, lengths = [end_of_text[:0]], []
    for line in lines:
        ids = encode(orjson.loads(line)["text"])
        pieces += ids, end_of_text
        lengths.append(len(ids) + 1)
    return np.concatenate(pieces, dtype=np.uint16, casting="unsafe"), lengths


begins, lengths = range(0, os.path.getsize(source), STEP), []
in_order = map if workers == "1" else multiprocessing.get_context("fork").Pool(int(workers)).imap
with open(output + ".bin", "wb") as tokens:
    for ids, some in in_order(encode_lines, begins):
        tokens.write(ids)
        lengths += some
sizes = np.array(lengths, np.int32)
pointers = np.zeros(len(sizes), np.int64)
np.cumsum(sizes[:-1] * 2, out=pointers[1:])
with open(output + ".idx", "wb") as index:
    index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1))
    index.write(sizes.tobytes() + pointers.tobytes())
    index.write(np.arange(len(sizes) + 1, dtype=np.int64).tobytes())
