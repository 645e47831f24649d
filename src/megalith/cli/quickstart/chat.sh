
{megalith} preprocess --input {out}/dialogues.jsonl --output-prefix {out}/data/dialogues --chat-template tokenizer \
    --loss-mask assistant {tokenizer}

{megalith} preprocess --input {out}/held-out.jsonl --output-prefix {out}/data/held-out --chat-template tokenizer \
    --loss-mask assistant {tokenizer}

{megalith} train --sft --pretrained-checkpoint {out}/checkpoints --use-checkpoint-args --device {device} {precision} \
    --seq-length {seq_length} --micro-batch-size {batch_size} --global-batch-size {batch_size} \
    --train-iters {chat_iterations} --lr {chat_lr} --lr-decay-style linear --lr-warmup-fraction 0.05 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval {chat_iterations} --eval-iters 4 \
    --save {out}/chat --load {out}/chat --save-interval {chat_iterations} --log-interval 10 \
    --train-data-path {out}/data/dialogues_messages_document --valid-data-path {out}/data/held-out_messages_document \
    {tokenizer}

{megalith} generate {out}/chat --chat --greedy --max-new-tokens 64 --prompt {question} --device {device}
