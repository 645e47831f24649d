"""Flags that are accepted and need nothing here, by reason."""

from __future__ import annotations

from megalith.config.megatron_flags.family import Family

NEED_NOTHING: tuple[Family, ...] = (
    Family(
        "code that comes with a model or a tokenizer is never run; what needs it says so when it is loaded",
        """
        --trust-remote-code
        """,
    ),
    Family(
        "how experts are multiplied and their weights stand in memory is decided here, and the numbers do not change",
        """
        --moe-use-legacy-grouped-gemm --moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias
        --use-grouped-gemm-for-shared-expert --use-grouped-gemm-for-dense-mlp --moe-shared-expert-overlap
        --moe-router-padding-for-quantization --moe-router-padding-for-fp8 --moe-pad-experts-for-cuda-graph-inference
        """,
    ),
    Family(
        "tokens travel to experts by torch's all-to-all, whatever kernels Megatron has; the numbers do not change",
        """
        --moe-enable-deepep --moe-flex-dispatcher-backend=deepep --moe-flex-dispatcher-num-sms= --moe-deepep-num-sms=
        --moe-hybridep-num-sms= --moe-hybridep-num-blocks-permute= --moe-hybridep-num-blocks-unpermute=
        --moe-hybridep-num-sms-preprocessing=108 --moe-ncclep-zero-copy --moe-permute-fusion-into-hybridep
        --moe-hybridep-pad-uneven-dispatch-inputs
        """,
    ),
    Family(
        "programs of reinforcement learning record by it where tokens were sent and send them there again; in "
        "pretraining nothing is recorded or replayed, and what tokens choose is written by --moe-routing-trace-path",
        """
        --moe-enable-routing-replay
        """,
    ),
    Family(
        "metrics.jsonl has the load of the experts of each layer",
        """
        --moe-per-layer-logging
        """,
    ),
    Family(
        "the exchange of tokens with experts is not overlapped with other work, and the numbers do not change",
        """
        --overlap-moe-expert-parallel-comm --ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream
        """,
    ),
    Family(
        "--optimizer-cpu-offload updates by torch's fused kernel on the host, one parameter after the other, from and "
        "to pinned memory",
        """
        --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params
        """,
    ),
    Family(
        "whether operations are fused is decided by the kernels here, and the numbers do not change",
        """
        --use-transformer-engine-op-fuser --use-te-activation-func --no-masked-softmax-fusion
        --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
        --no-gradient-accumulation-fusion --disable-jit-fuser --no-gradient-reduce-div-fusion
        --cross-entropy-loss-fusion --fused-residual-rmsnorm --use-fused-weighted-squared-relu
        --mla-down-proj-fusion --no-moe-router-aux-loss-fusion --no-scaled-masked-softmax-fusion
        --scaled-masked-softmax-fusion --scaled-upper-triang-masked-softmax-fusion*= --bias-dropout-fusion
        """,
    ),
    Family(
        "the loss is computed from fp16 logits without a copy of them, a few rows at a time, and in fp32",
        """
        --fp16-lm-cross-entropy
        """,
    ),
    Family(
        "all processes write a local checkpoint together, each its share",
        """
        --non-persistent-local-ckpt-algo=fully_parallel
        """,
    ),
    Family(
        "torch chooses the version of the attention kernel that the device supports",
        """
        --flash-attention-version= --use-flash-attn
        """,
    ),
    Family(
        "there is one family of model and tokenizer classes here",
        """
        --use-mcore-models --use-legacy-models --legacy-tokenizer
        """,
    ),
    Family(
        "communication is overlapped and grouped by itself, and needs no tuning; the numbers do not change",
        """
        --no-clone-scatter-output-in-embedding --no-async-tensor-model-parallel-allreduce --tp-comm-overlap-cfg=
        --tp-comm-overlap --use-ring-exchange-p2p --defer-embedding-wgrad-compute --use-tp-pp-dp-mapping
        --disable-gloo-process-groups --no-overlap-p2p-communication --overlap-grad-reduce --ddp-num-buckets=
        --ddp-bucket-size= --ddp-average-in-collective --overlap-param-gather
        --overlap-param-gather-with-optimizer-step --use-nccl-ub --fsdp-double-buffer --megatron-fsdp-version=1
        --fsdp-manual-registration --megatron-fsdp-enable-fine-grained-param-gather
        --megatron-fsdp-max-pool-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
        --no-scatter-gather-tensors-in-pipeline
        --pipeline-model-parallel-comm-backend= --no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad
        --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --no-tp-comm-split-ag
        --no-tp-comm-split-rs --tp-comm-bootstrap-backend=nccl --delay-wgrad-compute --wgrad-deferral-limit=0
        --overlap-p2p-communication-warmup-flush --no-align-grad-reduce --lazy-mpu-init*=
        --nccl-communicator-config-path= --use-sharp --sharp-enabled-group= --high-priority-stream-groups*=
        --ddp-pad-buckets-for-high-nccl-busbw --no-align-param-gather
        --no-use-layer-wise-param-layout --disable-symmetric-registration --create-all-gather-group
        --suggested-communication-unit-size= --no-delay-grad-reduce --delay-param-gather
        --overlap-p2p-communication --no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp
        """,
    ),
    Family(
        "--log-straggler reports in the log from its second interval on, and no port is opened to switch it",
        """
        --straggler-ctrlr-port=65535 --disable-straggler-on-startup
        """,
    ),
    Family(
        "all copies of the model start alike and make the same update from the same summed gradients",
        """
        --check-weight-hash-across-dp-replicas-interval= --data-parallel-random-init
        """,
    ),
    Family(
        "random streams are objects of their own here, not states of a tracker",
        """
        --te-rng-tracker --inference-rng-tracker
        """,
    ),
    Family(
        "memory and garbage collection need no help here",
        """
        --init-model-with-meta-device --empty-unused-memory-level=0 --no-manual-gc-eval
        """,
    ),
    Family(
        "signals are always answered by finishing the step and saving",
        """
        --exit-signal-handler-for-dataloader --exit-signal-handler-for-training
        """,
    ),
    Family(
        "every process writes its part of a checkpoint and reads what it holds, by itself",
        """
        --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure
        --dist-ckpt-optim-fully-reshardable --ckpt-fully-parallel-save
        --ckpt-fully-parallel-load-exchange-algo=broadcast --ckpt-fully-parallel-load-per-rank-objects
        --ckpt-fully-parallel-save-process-group=dp --ckpt-fully-parallel-load-process-group=dp
        --distrib-optim-fully-reshardable-mem-efficient --dist-ckpt-workers=1
        --ckpt-fully-parallel-save-replicate-local --ckpt-fully-parallel-load-replicate-local
        """,
    ),
    Family(
        "checkpoints are in the torch_dist layout by themselves, and what is loaded shows its layout",
        """
        --auto-detect-ckpt-format --use-dist-ckpt
        """,
    ),
    Family(
        "--async-save writes by a thread of each process, which needs no tuning",
        """
        --use-persistent-ckpt-worker --async-strategy=nvrx --async-ckpt-cpu-priority=10 --async-ckpt-io-priority=3
        --async-ckpt-use-cpu-shm --ckpt-pg-tensors-cache-path= --ckpt-pg-tensors-cache-create
        """,
    ),
    Family(
        "every file of a checkpoint is hashed when it is written and verified when it is read",
        """
        --verify-integrity
        """,
    ),
    Family(
        "texts are encoded by the fastest library that gives the same ids",
        """
        --use-gigatoken
        """,
    ),
    Family(
        "the causal mask is part of the attention kernel and never stored",
        """
        --no-create-attention-mask-in-dataloader
        """,
    ),
    Family(
        "datasets are indexed by vectorised code and memory-mapped",
        """
        --mmap-warmup --data-impl=infer --dataloader-fast-cache-load
        --dataloader-defer-npy-index-mmap --per-dataset-sequences-path= --skip-mmap-warmup
        """,
    ),
    Family(
        "a resumed run goes on in its data where it stopped, and the order of the samples follows from --seed",
        """
        --resume-dataloader --shuffle
        """,
    ),
    Family(
        "norms are computed in fp32, and projections back to the hidden size begin smaller the deeper the model is",
        """
        --fp32-layernorm --deep-init
        """,
    ),
    Family(
        "nothing is reported to anyone outside",
        """
        --no-one-logger --enable-one-logger --enable-onelogger --one-logger-entity= --one-logger-project=megatron-lm
        --one-logger-run-name= --one-logger-async
        --app-tag-run-name= --app-tag-run-version=0.0.0
        """,
    ),
    Family(
        "the console stays one screen and the complete log is in the run folder",
        """
        --logging-level=
        """,
    ),
    Family(
        "no rank waits for another one because of a timer",
        """
        --no-barrier-with-level-1-timing
        """,
    ),
    Family(
        "learning rate and batch size are always recorded",
        """
        --log-batch-size-to-tensorboard --no-log-learnig-rate-to-tensorboard
        """,
    ),
    Family(
        "on a GPU the profile of --profile names the parts of a step by itself",
        """
        --nvtx-ranges
        """,
    ),
    Family(
        "the memory of a GPU is printed and recorded wherever memory is",
        """
        --log-device-memory-used
        """,
    ),
    Family(
        "the complete configuration is in the run folder, as config.json",
        """
        --config-logger-dir=
        """,
    ),
    Family(
        "a hang is answered with the rank, the step and the stacks of all ranks, by itself",
        """
        --flight-recorder-dump-path= --flight-recorder-trace-buffer-size=2000
        --no-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
        --no-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec
        """,
    ),
    Family(
        "CUDA graphs only spare the time of launching kernels, which --compile does here; the numbers are the same",
        """
        --enable-cuda-graph --cuda-graph-warmup-steps=3 --external-cuda-graph --cuda-graph-impl=none
        --cuda-graph-modules+= --inference-cuda-graph-scope= --delay-offload-until-cuda-graph
        --optimizer-cuda-graph --cuda-graph-scope+=
        """,
    ),
    Family(
        "the ranks agree after every step, and none runs ahead",
        """
        --train-sync-interval=
        """,
    ),
    Family(
        "it only lets other flags pass, and each of these has its own answer here",
        """
        --enable-experimental
        """,
    ),
    Family(
        "it concerns serving (docs/serving.md), and training serves no one",
        """
        --flash-decode --inference-batch-times-seqlen-threshold=-1 --max-tokens-to-oom=12000
        --use-legacy-static-engine --inference-max-requests=8 --inference-max-seq-length=2560
        --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb=40.0
        --inference-dynamic-batching-block-size=256 --inference-dynamic-batching-chunk-size=256
        --inference-dynamic-batching-max-requests=
        --inference-dynamic-batching-max-tokens= --inference-dynamic-batching-num-cuda-graphs=16
        --decode-only-cuda-graphs --inference-logging-step-interval=0
        --inference-dynamic-batching-buffer-guaranteed-fraction=0.2
        --inference-dynamic-batching-buffer-overflow-factor= --inference-max-batch-size= --disable-chunked-prefill
        --inference-wandb-logging-step-interval=0 --return-log-probs --skip-prompt-log-probs
        --use-flashinfer-fused-rope
        """,
    ),
    Family(
        "the loss is fused by itself",
        """
        --cross-entropy-fusion-impl=native
        """,
    ),
    Family(
        "this is how it is here",
        """
        --no-query-key-layer-scaling --disable-msc
        """,
    ),
)
