"""A peer of `megalith preprocess`: the script that one would write with orjson and gigatoken.

    python benchmarks/peers/preprocess.py INPUT.jsonl OUTPUT VOCAB.json MERGES.txt

Reads `text` of each line, encodes it with GPT-2's vocabulary, appends the end-of-text token and writes OUTPUT.bin and
OUTPUT.idx in Megatron's format. It keeps no journal, checks nothing and cannot be resumed.
"""

import struct
import sys

import gigatoken
import numpy as np
import orjson
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

source, output, vocab_file, merge_file = sys.argv[1:]
library = Tokenizer(BPE.from_file(vocab_file, merge_file))
library.pre_tokenizer = ByteLevel(add_prefix_space=False)
encoder = gigatoken.Tokenizer.from_json(library.to_str())
end_of_text = np.array([library.token_to_id("<|endoftext|>")], np.uint16)
lengths = [np.zeros(0, np.int32)]
with open(source, "rb") as lines, open(output + ".bin", "wb") as tokens:
    while batch := lines.readlines(32 << 20):
        layout = encoder.encode_batch([orjson.loads(line)["text"] for line in batch], parallel=True).layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[: offsets[-1]].astype(np.uint16)
        tokens.write(np.insert(ids, offsets[1:], end_of_text[0]).tobytes())
        lengths.append((np.diff(offsets) + 1).astype(np.int32))
sizes = np.concatenate(lengths)
pointers = np.zeros(len(sizes), np.int64)
np.cumsum(sizes[:-1] * 2, out=pointers[1:])
with open(output + ".idx", "wb") as index:
    index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1))
    index.write(sizes.tobytes() + pointers.tobytes())
    index.write(np.arange(len(sizes) + 1, dtype=np.int64).tobytes())
