"""HTML report of a run from its metrics.jsonl and config.json; does not import torch."""

from megalith.report.history import History, read_history
from megalith.report.page import render_page

__all__ = ["History", "read_history", "render_page"]
