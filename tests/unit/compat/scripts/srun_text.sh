#!/bin/bash
#SBATCH -t 0:30:00 --exclusive --nodes=2 --ntasks-per-node=8
#SBATCH --job-name=gpt
# One process for each task of SLURM; the command is a text that a shell on each node reads.
DIR=`pwd`
DATETIME=`date +'date_%y-%m-%d_time_%H-%M-%S'`
mkdir -p $DIR/logs
options=" \
	--tensor-model-parallel-size 8 \
	--pipeline-model-parallel-size 2 \
        --num-layers 48 \
        --hidden-size 6144 \
        --num-attention-heads 64 \
        --seq-length 2048 \
        --max-position-embeddings 2048 \
	--micro-batch-size 4 \
	--global-batch-size 64 \
	--train-iters 50 \
        --lr 6.0e-6 \
	--min-lr 6.0e-7 \
        --lr-decay-style cosine \
        --split 98,2,0 \
        --clip-grad 1.0 \
	--fp16 \
	--DDP-impl local \
	--loss-scale 8192 \
        --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-path text_document "

CMD="python -u ${MEGATRON_CODE_DIR:-.}/pretrain_gpt.py ${options}"
srun -l \
     --container-image "nvcr.io#nvidia/pytorch:23.10-py3" \
     --output=logs/%x_%j.log sh -c "${CMD}"
