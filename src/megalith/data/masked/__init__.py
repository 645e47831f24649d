"""Datasets of sentences in which words are hidden: the samples of BERT and T5."""
