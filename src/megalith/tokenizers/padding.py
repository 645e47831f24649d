"""The padded vocabulary: embedding rows rounded up so that tensor-parallel ranks share them evenly."""

from __future__ import annotations


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int = 1) -> int:
    """Smallest multiple of `divisible_by * tensor_parallel_size` that holds the vocabulary.

    Source:  Megatron-LM `_vocab_size_with_padding`.
    """
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def padding_message(vocab_size: int, padded_size: int) -> str:
    """Megatron's line about the padding."""
    dummies = padded_size - vocab_size
    return f" > padded vocab (size: {vocab_size}) with {dummies} dummy tokens (new size: {padded_size})"


def tensor_parallel_note(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> str:
    """Return a line saying that another tensor-parallel size would pad the vocabulary differently; empty if not.

    Every row takes part in the softmax, so that a run with another padded vocabulary computes other losses.
    """
    alone = padded_vocab_size(vocab_size, divisible_by)
    here = padded_vocab_size(vocab_size, divisible_by, tensor_parallel_size)
    if here == alone:
        return ""
    return (
        f" > the padded vocabulary depends on --tensor-model-parallel-size: {here} with {tensor_parallel_size}, "
        f"{alone} with 1, and losses with it; --padded-vocab-size {here} gives every layout the same"
    )
