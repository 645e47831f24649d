"""Flags that are refused, by reason."""

from __future__ import annotations

from megalith.config.megatron_flags.family import Family

REFUSED: tuple[Family, ...] = (
    Family(
        "it is of the fork for DeepSpeed, which is not used here; ZeRO-1 is --use-distributed-optimizer, ZeRO-3 "
        "--use-torch-fsdp2, experts are divided by --expert-model-parallel-size, lengths are in iterations or samples",
        """
        --deepspeed --deepspeed-config= --zero-stage= --no-pipeline-parallel --deepspeed-activation-checkpointing
        --cpu-optimizer --ds-sequence-parallel-size= --create-moe-param-group
        --moe-expert-parallel-size= --moe-loss-coeff= --moe-train-capacity-factor= --moe-eval-capacity-factor=
        --moe-min-capacity= --disable-moe-token-dropping --mlp-type= --topk= --use-tutel --train-tokens=
        --lr-decay-tokens= --lr-warmup-tokens= --log-optimizer-states-to-tensorboard
        --curriculum-learning --use-fused-rmsnorm --tokenizer-name-or-path= --deepspeed-mpi --deepscale
        --deepscale-config= --gas=1 --pipe-parallel-size=0 --zero-reduce-scatter --zero-contigious-gradients
        --zero-reduce-bucket-size=0 --zero-allgather-bucket-size=0 --remote-device=none --use-pin-memory
        --scattered-embeddings --split-transformers --memory-centric-tiled-linear --tile-factor=1
        --partition-activations --contigious-checkpointing --checkpoint-in-cpu --synchronize-each-layer
        --profile-backward --cpu-torch-adam --universal-checkpoint --ds-inference --random-ltd
        --data-efficiency-curriculum-learning --train-data-exact-num-epochs= --return-data-index
        --num-key-value-heads= --kd --mos --load-teacher= --num-layers-teacher= --hidden-size-teacher=
        --num-attention-heads-teacher= --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton
        --use-flash-attn-builder --embedding-dropout=
        """,
    ),
    Family(
        "it is of BigScience's fork; near to it are --iterations-to-skip for --skip-train-iteration-range, "
        "--skip-train for --eval-only, --swiglu and --quick-geglu for --glu-activation, --train-data-path, "
        "--valid-data-path and --test-data-path for the paths with their own parts",
        """
        --embed-layernorm --glu-activation= --log-level= --log-level-replica= --log-path= --use-bnb-optimizer
        --codecarbon-dir= --eval-only= --skip-train-iteration-range+= --train-weighted-split-paths*=
        --valid-weighted-split-paths*= --test-weighted-split-paths*= --loss-on-targets-only
        --reweight-loss-based-on-position-frequency
        """,
    ),
    Family(
        "it is of the loaders of 2019, which read text; now tools/preprocess_data.py makes files of ids, which "
        "--data-path reads, and --vocab-file, --merge-file or --tokenizer-model name the tokenizer's",
        """
        --data-loader= --train-data+= --max-num-samples= --data-epochs= --input-data-sizes-file=sizes.txt --delim=,
        --text-key=sentence --eval-text-key= --loose-json --presplit-sentences --max-preds-per-seq=
        --tokenizer-model-type=bert-large-uncased --tokenizer-path=tokenizer.model --cache-dir= --pretrained-bert
        """,
    ),
    Family(
        "training evaluates by --eval-iters; files and tasks are measured by tasks/main.py or `megalith evaluate`",
        """
        --valid-data*= --test-data*= --eval-seq-length= --eval-max-preds-per-seq= --overlapping-eval=32 --cloze-eval
        --strict-lambada --eval-hf --load-openai
        """,
    ),
    Family(
        "training writes no texts; `megalith generate` and `megalith serve` do",
        """
        --temperature=1.0 --greedy --top-p=0.0 --top-k=0 --out-seq-length=1024 --sample-input-file=
        --sample-output-file= --num-samples=0 --genfile= --recompute
        """,
    ),
    Family(
        "it is of Pai-Megatron-Patch; its tokenizers are --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
        "FOLDER, rows beside the tokens --padded-vocab-size N, its data --data-path PREFIX, shared experts "
        "--moe-shared-expert-intermediate-size N, and an optimizer on the host --optimizer-cpu-offload",
        """
        --patch-tokenizer-type= --extra-vocab-size= --max-padding-length= --train-mode= --dataset=
        --enable-shared-expert --num-shared-experts= --optimizer-offload-policy= --shared-moe-ffn-hidden-size=
        """,
    ),
    Family(
        "it is of Pai-Megatron-Patch; heads of multi-latent attention are --qk-head-dim (the part without "
        "positions) and --qk-pos-emb-head-dim, further tokens are predicted by --mtp-num-layers",
        """
        --qk-nope-head-dim= --qk-rope-head-dim= --use-multi-token-prediction --num-mtp-predictor=
        """,
    ),
    Family(
        "the library follows from --tokenizer-type (SentencePieceTokenizer, HuggingFaceTokenizer, TikTokenizer)",
        """
        --tokenizer-library=
        """,
    ),
    Family(
        "tokens travel to experts by torch's collectives in the dtype of the hidden states, and experts are cut as all "
        "layers are",
        """
        --moe-dispatch-fwd-dtype=bf16 --moe-combine-bwd-dtype=bf16
        --moe-extended-tp --expert-tensor-parallel-num-weight-shards=
        """,
    ),
    Family(
        "gated layers keep [gate; up] one behind the other, as checkpoints of other programs have them; no kernel here "
        "wants them in turn",
        """
        --moe-shared-expert-glu-interleave-size= --moe-mlp-glu-interleave-size=
        """,
    ),
    Family(
        "loads are not made uneven for benchmarks; --moe-router-force-load-balancing makes them even",
        """
        --moe-router-force-biased=
        """,
    ),
    Family(
        "tokens beyond the room of a process are not dropped; --moe-expert-capacity-factor gives each expert room",
        """
        --moe-expert-rank-capacity-factor= --moe-token-dropping
        """,
    ),
    Family(
        "it is now --moe-router-num-groups with the number of expert-parallel processes and --moe-router-group-topk "
        "with this number",
        """
        --moe-router-topk-limited-devices=
        """,
    ),
    Family(
        "activations of experts are not moved to the host; --recompute-granularity selective --recompute-modules moe "
        "computes them again instead",
        """
        --moe-paged-stash --moe-paged-stash-page-size=64 --moe-paged-stash-buffer-size-factor-cuda=1.1
        --moe-paged-stash-buffer-size-factor-cpu=0.0
        """,
    ),
    Family(
        "it divided experts over all data-parallel processes; give their number to --expert-model-parallel-size",
        """
        --expert-parallel
        """,
    ),
    Family(
        "a checkpoint with experts is made of a dense one by `megalith checkpoint convert --upcycle N`, then loaded",
        """
        --moe-use-upcycling --moe-upcycling-granularity=1
        """,
    ),
    Family(
        "retrieval (RETRO, ICT), for which BERT embeds texts, is not part of this program",
        """
        --sample-rate=1.0 --retriever-seq-length=256 --output-bert-embeddings
        --bert-embedder-type=megatron
        """,
    ),
    Family(
        "encoder and decoder of T5 are on the same ranks, as in Megatron's own pretrain_t5.py",
        """
        --encoder-pipeline-model-parallel-size=0 --pipeline-model-parallel-split-rank=
        --encoder-tensor-model-parallel-size=0
        """,
    ),
    Family(
        "this variant of multi-token prediction is not built: each layer has weights of its own, they are on the last "
        "pipeline stage, and their gradients reach the whole model",
        """
        --mtp-standalone --mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm --mtp-hybrid-override-pattern=
        """,
    ),
    Family(
        "caches hold the heads of multi-latent attention, not its latent vectors",
        """
        --cache-mla-latents
        """,
    ),
    Family(
        "state-space, linear-attention and other experimental layers are not built",
        """
        --hybrid-context-parallel --is-hybrid-model --mamba-state-dim=128 --mamba-head-dim=64
        --mamba-num-groups=8 --mamba-num-heads= --hybrid-layer-pattern= --hybrid-override-pattern=
        --hybrid-attention-ratio=0.0 --hybrid-mlp-ratio=0.0 --experimental-attention-variant=
        --dsa-indexer-n-heads= --dsa-indexer-head-dim= --dsa-indexer-topk= --dsa-indexer-topk-freq=1
        --dsa-indexer-skip-topk-offset=0 --dsa-indexer-loss-coeff= --dsa-indexer-use-sparse-loss
        --dsa-kernel-backend=none --dsa-indexer-rope-interleaved --dsa-indexer-k-norm-epsilon=
        --dsa-indexer-k-norm-fp32 --linear-conv-kernel-dim=4 --linear-key-head-dim=128
        --linear-value-head-dim=128 --linear-num-key-heads=16 --linear-num-value-heads=32
        --csa-window-size= --csa-compress-ratio-for-c= --csa-compress-ratio-for-h= --csa-compress-rotary-base=
        --o-groups= --o-lora-rank=
        --enable-mhc-connections --mhc-num-residual-streams=4 --mhc-sinkhorn-iterations=20
        --mhc-init-gating-factor=0.01 --mhc-recompute-layer-num= --gdp-num-householder=3 --gdp-cutedsl-kernel
        --gdp-num-chunk-states-to-recompute=2 --mamba-training-ssm-states-dtype= --linear-attention-freq=
        --heterogeneous-layers-config-path= --heterogeneous-layers-config-encoded-json=
        --mamba-inference-conv-states-dtype=bf16 --mamba-inference-ssm-states-dtype=bf16
        --no-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu --disable-mamba-mem-eff-path
        """,
    ),
    Family(
        "FP8 and FP4 need kernels of recent GPUs and are not built; leave these flags out, --bf16 is the nearest",
        """
        --fp8-format= --fp8-recipe=delayed --fp8-margin=0 --fp8-interval=1 --fp8-amax-history-len=1
        --fp8-amax-compute-algo=most_recent --no-fp8-wgrad --first-last-layers-bf16 --fp4-format=
        --fp4-recipe=nvfp4 --fp4-param-gather --fp8-param-gather --fp8-quantizer-factory= --fp8-output-proj
        --num-layers-at-start-in-bf16=1 --num-layers-at-end-in-bf16=1 --use-kitchen-attention
        --kitchen-attention-backend=sdpa --fp4-quantizer-factory= --reuse-grad-buf-for-mxfp8-param-ag
        --te-precision-config-file= --fp8-e4m3 --fp8-hybrid --keep-fp8-transpose-cache
        --keep-fp8-transpose-cache-when-using-custom-fsdp --kitchen-config-file= --kitchen-recipe-number=
        """,
    ),
    Family(
        "--sequence-parallel divides all activations over the tensor-parallel processes, those that are saved too",
        """
        --distribute-saved-activations --distribute-checkpointed-activations
        """,
    ),
    Family(
        "activations are not moved to the host; --recompute-granularity keeps less of them",
        """
        --cpu-offloading --cpu-offloading-num-layers=0 --fine-grained-activation-offloading
        --cpu-offloading-retain-pinned-cpu-buffers --offload-modules+= --min-offloaded-tensor-size=1048576
        --delta-offload-bytes-across-pp-ranks=0 --activation-offload-fraction=1.0
        --fine-grained-offloading-max-inflight-offloads=
        """,
    ),
    Family(
        "hybrid sharding and its checkpoints are not built: all data-parallel processes divide what "
        "--data-parallel-sharding-strategy says",
        """
        --outer-dp-sharding-strategy=no_shard --enable-full-sharding-in-hsdp --no-strict-fsdp-dtensor-load
        """,
    ),
    Family(
        "the main parameters of half-precision weights are in fp32; --use-precision-aware-optimizer "
        "--main-params-dtype fp16 stores less of them",
        """
        --megatron-fsdp-main-params-dtype=fp32
        """,
    ),
    Family(
        "images are not trained on",
        """
        --num-classes=1000 --img-h=224 --img-w=224 --img-dim=224 --num-channels=3 --patch-dim=16 --classes-fraction=1.0
        --data-per-class-fraction=1.0 --no-data-sharding --head-lr-mult=1.0 --vision-pretraining
        --vision-pretraining-type=classify --vision-backbone-type=vit --swin-backbone-type=tiny --mask-type=random
        --mask-factor=1.0 --iter-per-epoch=1250 --dino-local-img-size=96 --dino-local-crops-number=10
        --dino-head-hidden-size=2048 --dino-bottleneck-size=256 --dino-freeze-last-layer=1 --dino-norm-last-layer
        --dino-warmup-teacher-temp=0.04 --dino-teacher-temp=0.07 --dino-warmup-teacher-temp-epochs=30
        --language-model-type= --vision-model-type= --freeze-LM --freeze-ViT --disable-vision-class-token
        --image-tag-type= --dataset-config= --prompt-path= --tokenizer-prompt-format= --use-tiling --max-num-tiles=1
        --use-thumbnail --pixel-shuffle --num-frames=1 --dataloader-save= --dataloader-seq-length=
        --allow-missing-vision-projection-checkpoint
        """,
    ),
    Family(
        "retrieval models (ICT, biencoders, RETRO) are not built",
        """
        --ict-head-size= --biencoder-projection-dim=0 --biencoder-shared-query-context-model --ict-load= --bert-load=
        --titles-data-path= --query-in-block-prob=0.1 --use-one-sent-docs --evidence-data-path=
        --retriever-report-topk-accuracies+= --retriever-score-scaling --block-data-path= --embedding-path=
        --indexer-batch-size=128 --indexer-log-interval=1000 --retro-project-dir= --retro-add-retriever
        --retro-cyclic-train-iters= --retro-encoder-layers=2 --retro-encoder-hidden-dropout=0.1
        --retro-encoder-attention-dropout=0.1 --retro-num-neighbors=2 --retro-num-retrieved-chunks=2
        --retro-attention-gate=1 --retro-no-verify-neighbor-count --retro-workdir= --retro-return-doc-ids
        --report-topk-accuracies+= --faiss-use-gpu --projection-dim=0 --shared-query-context-model --pool-type=cls-token
        """,
    ),
    Family(
        "reinforcement learning is not built",
        """
        --perform-rl-step --grpo-prompts-per-step=32 --grpo-group-size=2 --grpo-iterations=2
        --grpo-clamp-eps-lower=0.01 --grpo-clamp-eps-upper=0.01 --grpo-kl-beta=0.001 --langrl-env-config=
        --grpo-entropy-term-weight=0.0 --grpo-filter-groups-with-same-reward --grpo-default-temperature=1.0
        --grpo-default-top-p=0 --langrl-inference-server-type=inplace_megatron --langrl-external-server
        --no-langrl-external-server
        --langrl-inference-server-conversation-template= --rl-prompts-per-eval=32 --rl-partial-rollouts
        --rl-offload-optimizer-during-inference --rl-offload-kv-cache-during-training --rl-reset-cuda-graphs
        --rl-remove-kv-cache-during-training --rl-inference-logprobs-is-correction --rl-use-sequence-packing
        --rl-importance-sampling-truncation-coef= --rl-calculate-intra-group-similarity
        --rl-sequence-packing-bin-size=8192 --rl-sequence-packing-algo=fifo --no-rl-partial-rollouts
        --rl-generation-lag= --rl-max-inflight-requests= --rl-submission-granularity=B
        --rl-consumption-granularity=B --rl-durable-rollout-bank --rl-rollout-bank-dir= --rl-rollout-bank-max-bytes=0
        --rl-default-temperature=1.0 --rl-default-top-p=0 --rl-default-top-k=-1
        --rl-sequence-packing-max-sequences-per-bin=50 --rl-training-cuda-graphs
        --rl-inference-tensor-model-parallel-size= --rl-inference-pipeline-model-parallel-size=
        --rl-inference-expert-model-parallel-size= --rl-inference-expert-tensor-model-parallel-size=
        --rl-inference-model-unified-memory-level=0 --rl-offload-inference-model-weights --refit-method=gloo
        --refit-execution-batch-bytes= --rl-verify-model-weights-swap --rl-skip-bos-token --rl-profile
        --rl-profile-dir= --rl-inference-parsers*= --rl-kv-cache-management-mode= --rl-persist-cuda-graphs
        """,
    ),
    Family(
        "finished models are not quantised, distilled or exported here as by ModelOpt; --position-embedding-type yarn "
        "with its own flags is what --enable-gpt-oss chooses",
        """
        --export-model-type=GPTModel --export-legacy-megatron --export-te-mcore-model --export-force-local-attention
        --export-kv-cache-quant=none --export-real-quant-cfg=None --export-quant-cfg= --export-kd-teacher-load=
        --export-kd-teacher-model-config= --teacher-model-config= --export-kd-teacher-ckpt-format= --export-kd-cfg=
        --export-default-te-spec --export-qk-l2-norm --export-moe-apply-probs-on-input --export-offline-model
        --export-num-medusa-heads=0 --export-num-eagle-layers=0 --modelopt-enabled --enable-gpt-oss
        --finetune-hf-dataset= --finetune-data-split=train --load-model-opt-format
        """,
    ),
    Family(
        "energy is not measured",
        """
        --log-energy
        """,
    ),
    Family(
        "traces for other programs than torch's own viewer and nsys are not written",
        """
        --pytorch-profiler-collect-chakra --otel-enabled --otel-service-name= --otel-span-groups=
        """,
    ),
    Family(
        "fused attention keeps no scores to look at",
        """
        --log-max-attention-logit
        """,
    ),
    Family(
        "the server here has no such option (docs/serving.md), and training uses none",
        """
        --enable-chunked-prefill --num-speculative-tokens=0 --inference-coordinator-port= --batch-invariant-mode
        --batch-invariant-backend=te_native --symmetric-ar-type= --inference-fuse-tp-communication
        --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend=vllm
        --inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type=nvls
        --inference-dynamic-batching-paused-buffer-size-gb= --inference-dynamic-batching-mamba-memory-ratio=
        --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events --inference-cuda-graph-all-prefills
        --inference-cuda-graph-max-tokens=512 --inference-dynamic-batching-unified-memory-level=0
        --inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching
        --inference-dynamic-batching-prefix-caching-eviction-policy=ref_zero
        --inference-dynamic-batching-prefix-caching-coordinator-policy=load_balanced
        --inference-dynamic-batching-prefix-caching-routing-alpha=0.5
        --inference-dynamic-batching-prefix-caching-mamba-gb=
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count=16
        --inference-dynamic-batching-cuda-graph-sizing-distribution=exponential
        --inference-dynamic-batching-sampling-backend=torch --use-same-sampling-seed-across-dp-ranks
        --inference-dynamic-batching-async-sched-mode=legacy
        --inference-dynamic-batching-logprobs-mode=raw_logprobs --inference-text-gen-server-logging
        --no-inference-text-gen-server-logging --inference-wandb-logging --no-inference-wandb-logging
        --inference-use-synchronous-zmq-collectives --no-inference-use-synchronous-zmq-collectives
        --inference-disable-ep-consensus --no-inference-disable-ep-consensus --inference-shards=
        --inference-dynamic-batching-max-requests-override= --inference-dynamic-batching-max-tokens-override=
        --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill=1
        """,
    ),
    Family(
        "no weights are left without initial values here",
        """
        --no-initialization
        """,
    ),
    Family(
        "feed-forward layers are not computed in chunks; --recompute-granularity saves their memory",
        """
        --mlp-chunks-for-training=1
        """,
    ),
    Family(
        "this kind of layout is not built",
        """
        --hierarchical-context-parallel-sizes+= --microbatch-group-size-per-virtual-pipeline-stage=
        --pipeline-model-parallel-layout= --num-distributed-optimizer-instances=1
        --standalone-embedding-stage --tensor-parallel-num-weight-shards= --max-seqlen-per-dp-cp-rank=
        --max-seqlen-per-cp-rank= --heterogeneous-context-parallel
        --overlap-dispatch-backward-with-experts-wgrad --ddp-reduce-scatter-with-fp32-accumulation
        --gtp-remat-reduce-scatter-with-fp32-accumulation
        --ddp-param-name-patterns-for-fp32-local-accumulation+= --gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub
        --fake-process-group --gtp-remat-opt-in-modules+=
        """,
    ),
    Family(
        "it comes with the work on checkpoint formats",
        """
        --override-ckpt-iteration= --save-params-interval= --save-activations-interval=
        --save-tokens-per-expert-interval= --save-wgrads-interval= --save-dgrads-interval=
        --load-main-params-from-ckpt --ckpt-convert-update-legacy-dist-opt-format
        --no-ckpt-load-validate-sharding-integrity --dist-ckpt-save-pre-mcore-014
        --no-save-tokenizer-assets --ckpt-drop-redundant-extra-state
        """,
    ),
    Family(
        "--make-vocab-size-divisible-by 1 pads as little as the layout allows, and --padded-vocab-size says how much",
        """
        --no-pad-vocab-size
        """,
    ),
    Family(
        "the tokenizers are those of Megatron's classes up to core 0.16, which this later variant changes",
        """
        --tokenizer-sentencepiece-legacy --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --tokenizer-hf-no-use-fast
        """,
    ),
    Family(
        "the flags of the tokenizer say what such a file would",
        """
        --tokenizer-metadata=
        """,
    ),
    Family(
        "no dialogues are prepared for training; `megalith serve` takes it",
        """
        --chat-template=
        """,
    ),
    Family(
        "data is read from files; mount the object storage, or copy from it",
        """
        --object-storage-cache-path= --s3-cache-path= --enable-msc
        """,
    ),
    Family(
        "fill-in-the-middle samples are not built",
        """
        --fim-data --fim-rate=0.5 --fim-spm-rate=0.5 --fim-split-sample= --fim-fragment-rate= --fim-no-prefix=
        --fim-prefix-token=fim_prefix --fim-middle-token=fim_middle --fim-suffix-token=fim_suffix
        --fim-pad-token=fim_pad --fim-eod-token=
        """,
    ),
    Family(
        "padding that is also the end-of-document token would take the loss from the ends of documents",
        """
        --allow-ambiguous-pad-tokens
        """,
    ),
    Family(
        "it makes the datasets of Megatron's own tests",
        """
        --test-mode
        """,
    ),
    Family(
        "instruction tuning is not built",
        """
        --sft --sft-tokenizer-prompt-format=nemotron-h-aligned
        """,
    ),
    Family(
        "weights that stay as they are serve the saving of logits for distillation, which is not built; --skip-train "
        "evaluates a checkpoint as it is, and --lr 0 goes through the steps without changing it",
        """
        --freeze-all-layers
        """,
    ),
    Family(
        "logits are in the dtype of the model, and everything that is computed from them is in fp32",
        """
        --output-logit-dtype= --disable-bf16-reduced-precision-matmul
        """,
    ),
    Family(
        "the embedding is in the dtype of the model; --fp32-residual-connection keeps what is added to it in fp32",
        """
        --embedding-weights-in-fp32 --fp32-embedding --fp32-tokentypes
        """,
    ),
    Family(
        "saving and loading logits for distillation is not built",
        """
        --logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k=1 --logits-save-dir=
        --logits-save-dtype=fp16 --logits-load-dir= --logits-load-decode-threads=4
        --logits-load-prefetch-factor=3 --logits-load-msc-prefetch-depth=2 --logits-load-kd-loss-alpha=1.0
        --logits-load-ignore-errors --logits-save-inputs --logits-load-reverse-kl
        """,
    ),
    Family(
        "no server to look into the running program is opened; `megalith report` draws a run, and a hang prints the "
        "stacks of all ranks",
        """
        --run-workload-inspector-server
        """,
    ),
    Family(
        "processes are not restarted from within; `megalith train --nproc N --max-restarts M` starts a failed run "
        "again from its last checkpoint, and names ranks that died or hang",
        """
        --inprocess-restart --enable-ft-package --inprocess-max-iterations= --inprocess-monitor-thread-interval=1.0
        --inprocess-monitor-process-interval=1.0 --inprocess-progress-watchdog-interval=1.0
        --inprocess-heartbeat-interval=30 --inprocess-soft-timeout=60 --inprocess-hard-timeout=90
        --inprocess-heartbeat-timeout=60 --inprocess-barrier-timeout=120 --inprocess-completion-timeout=120
        --inprocess-last-call-wait=1 --inprocess-termination-grace-time=1 --inprocess-granularity=node
        --inprocess-active-world-size=1 --inprocess-empty-cuda-cache --calc-ft-timeouts --ft-num-warmup-iters=5
        """,
    ),
    Family(
        "faults are injected by MEGALITH_FAULT (docs/launch.md), for tests",
        """
        --fault-injector-ranks= --fault-injector-num-ranks=
        --fault-injector-fault-types= --fault-injector-fault-probabilities= --fault-injector-fault-delay=
        --fault-injector-delay-start-iteration= --fault-injector-mtti-seconds= --fault-injector-offset-seconds=
        --fault-injector-seed=
        """,
    ),
    Family(
        "checkpoints on the disks of several nodes are not supported: only the same nodes could load them; use "
        "--async-save, or --non-persistent-ckpt-type global",
        """
        --replication --replication-jump= --replication-factor=2
        """,
    ),
    Family(
        "one site's own resubmission tool is not supported (a stopped run exits with 75; the same command resumes it)",
        """
        --adlr-autoresume --adlr-autoresume-interval=1000
        """,
    ),
    Family(
        "YAML files of arguments are not read; give a recipe by --config FILE.toml",
        """
        --yaml-cfg=
        """,
    ),
    Family(
        "devices are not tested in the course of a run; `megalith doctor` tests them before",
        """
        --gpu-sniff-test-interval=
        """,
    ),
    Family(
        "steps that gave other results when they were run again are in metrics.jsonl",
        """
        --result-rejected-tracker-filename=
        """,
    ),
    Family(
        "positions of images are not built",
        """
        --mrope-section+=
        """,
    ),
    Family(
        "clipping of query and key weights after a step of Muon is not built; --qk-layernorm bounds the scores instead",
        """
        --qk-clip --qk-clip-alpha=0.5 --qk-clip-threshold=100
        """,
    ),
)
