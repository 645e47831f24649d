"""What a run recorded, as one page for the browser. Reads metrics.jsonl and config.json; imports no torch."""

from megalith.report.history import History, read_history
from megalith.report.page import page

__all__ = ["History", "page", "read_history"]
