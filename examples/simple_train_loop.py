"""The core as a library: a small GPT in any layout of processes, trained on mock data, saved and loaded. No globals.

The losses are the same alone, with the layers divided between two processes, and with a pipeline of two stages:
    python examples/simple_train_loop.py
    torchrun --nproc_per_node 2 examples/simple_train_loop.py --tp 2
    torchrun --nproc_per_node 2 examples/simple_train_loop.py --pp 2
"""

from __future__ import annotations

import argparse
import os

import torch

from megalith.assemble.data import build_datasets, build_loaders
from megalith.assemble.model import build_chunks, build_run_optimizer, draw_weights
from megalith.assemble.ranks import join_ranks
from megalith.assemble.schedule import build_schedule
from megalith.checkpoint import DirectoryStore
from megalith.config import RunConfig, from_values
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.tokenizers import build_tokenizer
from megalith.train.checkpoint_content import content_of
from megalith.train.checkpoint_fit import find_checkpoint
from megalith.train.checkpoint_restore import restore
from megalith.train.state import TrainState
from megalith.train.step import train_step

MODEL = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "max_position_embeddings": 64}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}  # which is drawn in another order in each layout
DATA = {"mock_data": True, "seq_length": 64, "tokenizer_type": "NullTokenizer", "vocab_size": 99}
TRAINING = {"train_iters": 5, "global_batch_size": 8, "micro_batch_size": 2, "lr": 0.001, "eval_iters": 0}
VOCABULARY = 100  # the tokens and the end of a document


def build(run: RunConfig, context: ParallelContext) -> TrainState:
    """The part of the model that this process computes, and its optimizer."""
    streams = RandomStreams(run.train.seed, context)
    chunks = build_chunks(run, VOCABULARY, context, streams.own)
    draw_weights(run, chunks, streams, context)
    return TrainState(chunks, build_run_optimizer(run, chunks, context), streams, build_schedule(run), context=context)


def train(run: RunConfig, state: TrainState) -> None:
    context = state.context
    batches = build_loaders(run, build_datasets(run, build_tokenizer(run.tokenizer)), context.dp.index).train
    for _ in range(run.train_iters):
        result = train_step(state, batches, run.num_micro_batches)
        if context.rank == 0:
            print(f"step {result.iteration}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}")
    batches.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="processes that divide each layer")
    parser.add_argument("--pp", type=int, default=1, help="processes in a pipeline")
    parser.add_argument("--save", default="checkpoints/simple", help="folder of the checkpoint")
    flags = parser.parse_args()
    layout = {"tensor_model_parallel_size": flags.tp, "pipeline_model_parallel_size": flags.pp}
    run = from_values({**MODEL, **NO_DROPOUT, **DATA, **TRAINING, **layout}, environ=os.environ)
    with join_ranks(run) as context:
        state, copy = build(run, context), build(run, context)
        train(run, state)
        store = DirectoryStore(flags.save, context)
        store.save(state.iteration, content_of(state, run), {"example": "simple_train_loop"})
        restore(store, find_checkpoint(store, state.iteration), copy, run)
        equal = all(torch.equal(a, b) for a, b in zip(state.model.parameters(), copy.model.parameters(), strict=True))
        if all(comm.all_gather_objects(equal, context.world)) and context.rank == 0:
            print(f"saved and loaded: every weight is equal; the checkpoint is in {flags.save}")


if __name__ == "__main__":
    main()
