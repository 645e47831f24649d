"""Evaluation of trained models: log-probabilities of text, perplexity, cloze tasks, masked tokens, and alarms."""
