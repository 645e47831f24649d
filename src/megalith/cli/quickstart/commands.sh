#!/usr/bin/env bash
# What `megalith quickstart` runs, in this order; it kills the training halfway and runs it again.
set -e
cd {folder}

{megalith} preprocess --input {out}/corpus.jsonl --output-prefix {out}/data/corpus --append-eod \
    {tokenizer}

{megalith} train --num-layers {num_layers} --hidden-size {hidden_size} \
    --num-attention-heads {num_attention_heads} --ffn-hidden-size {ffn_hidden_size} \
    --seq-length {seq_length} --max-position-embeddings {seq_length} --position-embedding-type rope \
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 --device {device} {precision} \
    --micro-batch-size {batch_size} --global-batch-size {batch_size} --train-iters {iterations} \
    --lr {learning_rate} --min-lr {min_lr} --lr-decay-style cosine --lr-warmup-fraction 0.04 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval {eval_interval} --eval-iters {eval_iters} \
    --save {out}/checkpoints --load {out}/checkpoints --save-interval {save_interval} --log-interval 10 \
    --data-path {out}/data/corpus_text_document --split 94,4,2 \
    {tokenizer}

{megalith} generate {out}/checkpoints --prompt {prompt} --max-new-tokens 200 \
    --temperature 0.6 --top-k 40 --seed 1 --device {device}
