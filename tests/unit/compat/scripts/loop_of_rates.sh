#!/bin/sh
# A plain shell: no arrays, a loop over rates, variables for one command, a here-document that is no script.
TP=2; PP=1
WORLD=$(( TP * PP ))
FILES="--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"
cat > notes.txt <<-END
	python pretrain_gpt.py is what this starts
	END
for LR in 6.0e-4; do
  OMP_NUM_THREADS=4 CUDA_VISIBLE_DEVICES=0,1 python3 -m torch.distributed.run --nproc-per-node=$WORLD --standalone \
    ./pretrain_gpt.py --lr $LR --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 \
    --max-position-embeddings 1024 --micro-batch-size=2 --global-batch-size=16 --train-iters 100 \
    --tensor-model-parallel-size $TP $FILES --data-path 0.7 part1_text_document 0.3 part2_text_document \
    --save "ckpt/lr-$LR" --tensorboard-dir 'tb' 2>&1 | tee -a log-$LR.txt &
done
wait
