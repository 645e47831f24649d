"""How good a trained model is: log-probabilities of given text, perplexity, cloze tasks, and alarms."""
