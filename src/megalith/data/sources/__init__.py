"""Sources of documents: one interface (`protocol`), a module for each file format, and the search for inputs.

The parent process walks through the sources in order and only finds where documents end; any process turns a chunk into
documents. So memory does not grow with the files, and the order does not depend on the number of processes.
"""

from megalith.data.sources.documents import BadDocument, Dialogue
from megalith.data.sources.find import SourcePlan, find_sources
from megalith.data.sources.formats import END_OF_TEXT_SEPARATOR, FORMATS, JSONL, format_of
from megalith.data.sources.protocol import (
    STDIN,
    UNKNOWN_SIZE,
    Chunk,
    ChunkDocuments,
    Limits,
    Payload,
    Source,
    SourceOptions,
)

__all__ = [
    "END_OF_TEXT_SEPARATOR",
    "FORMATS",
    "JSONL",
    "STDIN",
    "UNKNOWN_SIZE",
    "BadDocument",
    "Chunk",
    "Limits",
    "ChunkDocuments",
    "Dialogue",
    "Payload",
    "SourcePlan",
    "Source",
    "SourceOptions",
    "find_sources",
    "format_of",
]
