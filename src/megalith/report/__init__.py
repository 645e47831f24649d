"""Reports on runs from their metrics.jsonl and config.json; does not import torch."""

from megalith.report.history import History, find_run, read_history, run_name
from megalith.report.page import render_page

__all__ = ["History", "find_run", "read_history", "render_page", "run_name"]
