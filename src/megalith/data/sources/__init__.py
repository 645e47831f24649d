"""Text of any kind as documents: one protocol (`protocol`), a module for each kind, and how inputs are found.

One process walks through the sources in order and needs only to find where documents end; any process turns a chunk
into documents. So memory does not grow with the files, and the order does not depend on who works on what.
"""

from megalith.data.sources.documents import BadDocument
from megalith.data.sources.find import Plan, find_sources
from megalith.data.sources.formats import END_OF_TEXT_SEPARATOR, FORMATS, JSONL, format_of
from megalith.data.sources.protocol import Chunk, Limits, Part, Payload, Source, SourceOptions

__all__ = [
    "END_OF_TEXT_SEPARATOR",
    "FORMATS",
    "JSONL",
    "BadDocument",
    "Chunk",
    "Limits",
    "Part",
    "Payload",
    "Plan",
    "Source",
    "SourceOptions",
    "find_sources",
    "format_of",
]
