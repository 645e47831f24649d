"""Traces of routing: which experts the tokens of each step chose, in files that are analysed afterwards.

Each rank writes `router_trace_rankN.jsonl`, one record for a layer and a micro-batch, with the experts of the tokens
that this rank routed. What a record speaks of beside that lies in files of bf16 numbers, at the offset and in the shape
that it says. Weights of routers are those before the first step that is traced.

Source: Megatron-LM pull request 5220 (June 2026), whose `tools/moe_routing` reads such files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor, nn

from megalith.config.groups import LogConfig
from megalith.models.language_model import LanguageModel
from megalith.nn.moe.router import Router
from megalith.nn.moe.routing import Choice
from megalith.train.moe import routers
from megalith.train.results import Hook, StepResult


class RoutingTrace(Hook):
    """Writes the choices of the routers of this rank in training, without evaluations and recomputed forward passes.

    Logits are those of the router's input: before noise, and with random choices those that the router computes. A run
    that resumes after `start` steps continues its files; a new run overwrites them.
    """

    def __init__(self, log: LogConfig, rank: int, chunks: Sequence[LanguageModel], start: int = 0) -> None:
        folder, steps = Path(log.moe_routing_trace_path or ""), log.moe_routing_trace_max_training_iters
        hidden_states, logits = log.moe_routing_trace_capture_hidden_states, log.moe_routing_trace_capture_logits
        folder.mkdir(parents=True, exist_ok=True)
        self._rank, self._step, self._end = rank, start, None if steps is None else start + steps
        self._pass = -1
        self._records: list[tuple[dict[str, Any], Tensor, Tensor | None, Tensor | None]] = []
        how: Literal["a", "w"] = "a" if start else "w"
        self._lines = (folder / f"router_trace_rank{rank}.jsonl").open(how, encoding="utf-8")
        self._states = (folder / f"hidden_states_rank{rank}.bin").open(f"{how}b") if hidden_states else None
        self._logits = (folder / f"logits_rank{rank}.bin").open(f"{how}b") if logits else None
        layers = chunks[0].config.num_layers
        here = routers(chunks)
        self._places: dict[int, dict[str, Any]] = {
            id(router): {"block": "decoder", "layer": router.layer}
            if router.layer < layers
            else {"block": "mtp", "layer": 0, "mtp_idx": router.layer - layers}
            for router in here
        }
        self._handles = [router.register_forward_hook(self._chosen) for router in here]
        if log.moe_routing_trace_dump_weights:
            own = {router.layer: _weights(router) for router in here if router.layer < layers}
            torch.save(own, folder / f"router_state_rank{rank}.pt")

    @torch.no_grad()
    def _chosen(self, router: nn.Module, inputs: tuple[Tensor, ...], choice: Choice) -> None:
        assert isinstance(router, Router)
        if not router.training or router.auxiliary.again:
            return
        if router.begun != self._pass:  # the step is computed anew: what it was before does not count
            self._pass = router.begun
            self._records.clear()
        place = self._places[id(router)]
        experts_TK = choice.experts_TK.sort(dim=-1).values.to("cpu", torch.int32)
        tokens, chosen = experts_TK.shape
        record = {"step": self._step, "stage": "pre_dispatch", **place, "rank": self._rank}
        record |= {"num_tokens": tokens, "topk": chosen}
        x_TD = inputs[0].reshape(tokens, -1)
        states = None if self._states is None else x_TD.to("cpu", torch.bfloat16, copy=True)
        logits = None if self._logits is None else router.logits(x_TD).to("cpu", torch.bfloat16)
        self._records.append((record, experts_TK, states, logits))

    def after_step(self, result: StepResult) -> None:
        self._write()
        self._step += 1
        if self._step == self._end:
            self._stop()

    def close(self) -> None:
        self._stop()
        self._write()
        for file in (self._lines, self._states, self._logits):
            if file is not None:
                file.close()

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _write(self) -> None:
        for line, experts_TK, states, logits in self._records:
            for file, x, name in ((self._states, states, "hs"), (self._logits, logits, "logit")):
                if file is not None and x is not None:
                    line |= _append(file, x, name)
            self._lines.write(json.dumps({**line, "top_indices": experts_TK.tolist()}) + "\n")
        self._records.clear()
        for file in (self._lines, self._states, self._logits):
            if file is not None and not file.closed:
                file.flush()


def _append(file: IO[Any], x: Tensor, name: str) -> dict[str, Any]:
    """Write numbers of bf16; where they are in the file."""
    start = file.tell()
    size = file.write(x.contiguous().view(torch.int16).numpy().tobytes())
    return {f"{name}_offset": start, f"{name}_bytes": size, f"{name}_shape": list(x.shape)}


def _weights(router: Router) -> dict[str, Any]:
    def copy(x: Any) -> Tensor | None:
        if x is None:
            return None
        # Where weights are fully sharded all ranks are here, and each gets the whole.
        whole: Tensor = x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()
        return whole.to("cpu", torch.float32, copy=True)

    rule = router.settings.rule
    return {
        "weight": copy(router.weight),
        "expert_bias": copy(router.expert_bias),
        "score_function": rule.score,
        "topk": rule.top_k,
    }
