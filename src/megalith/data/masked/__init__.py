"""Masked-language-model datasets of BERT and T5."""
