"""Model class for lm-evaluation-harness: `lm_eval --model megalith --model_args checkpoint=DIR --tasks ...`.

Needs the extra `eval`. Versions of lm-eval with plugins find it by the entry point of this package; for older ones
`python -m megalith.evaluate.lm_eval` is their command with this class registered. Under torchrun every process runs the
harness on all requests and shares the work inside this class; the first process prints.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows
from tqdm import tqdm

from megalith.assemble.ranks import join_ranks
from megalith.assemble.reading import model_in, ranks_of, saved_args
from megalith.assemble.trained import Trained, load_trained
from megalith.config.tokenizer_flags import tokenizer_of_arguments
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.errors import ConfigError, MegalithError
from megalith.evaluate.alarms import never_trained
from megalith.evaluate.request import DEFAULT_BATCH
from megalith.evaluate.score import Sample, Score, Scorer
from megalith.registry import EMPTY, collect
from megalith.serve.engine import Engine, Limits
from megalith.serve.model_runner import RankRunner, blocks_for, runner_of
from megalith.serve.request import Finished, Request, Sampling, Token
from megalith.serve.runner import Runner
from megalith.tokenizers.chat_template import ChatTemplate, added_around, stop_ids_beside, template_beside
from megalith.tokenizers.protocol import require_eod

_log = logging.getLogger("megalith.evaluate")

_MAX_NEW_TOKENS = 256  # lm-eval's own default
_SEED = 1234


@register_model("megalith")
class MegalithLM(TemplateLM):
    """Adapter of a checkpoint to lm-eval's interface.

    Args:
        checkpoint: a save folder, one checkpoint in it, or a Hugging Face folder.
        iteration: which checkpoint of a save folder.
        tp, pp: tensor- and pipeline-parallel sizes; the remaining processes share the requests.
        dtype: float32, bfloat16 or float16; that of the checkpoint if None.
        device: cpu; anything else is CUDA if there is one.
        batch_size: samples of one forward pass.
        max_length: most tokens of context and continuation; the model's if None.
        max_gen_toks: tokens to generate if a task does not set them.
        max_batch_size: not used.
        tokenizer: flags of the tokenizer by name (tokenizer_type, vocab_file, merge_file, tokenizer_model and so on),
            for checkpoints without one. `import` names the modules, separated by spaces, that register what the
            checkpoint or these flags name.

    Raises:
        ConfigError, CheckpointError: the checkpoint cannot be loaded this way.
    """

    def __init__(
        self,
        checkpoint: str,
        iteration: int | None = None,
        tp: int = 1,
        pp: int = 1,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = _MAX_NEW_TOKENS,
        max_batch_size: int | None = None,
        **tokenizer: Any,
    ) -> None:
        super().__init__()
        imports = str(tokenizer.pop("import", "")).split()
        given = tokenizer_of_arguments(tokenizer, imports)
        registry = collect(imports) if imports else EMPTY
        if dtype not in (None, "auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype={dtype} is not known; use float32, bfloat16 or float16")
        path = Path(checkpoint)
        settings = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        where = "cpu" if device == "cpu" else "auto"  # lm-eval passes cuda by default
        model = model_in(saved_args(path, iteration), path, registry)
        self._ranks = ExitStack()
        self._context = self._ranks.enter_context(
            join_ranks(ranks_of(model, {**settings, "device": where}, os.environ))
        )
        weights = None if dtype in (None, "auto") else getattr(torch, str(dtype))
        trained = load_trained(
            path, self._context.device, iteration, given, context=self._context, dtype=weights, registry=registry
        )
        for note in trained.notes:
            _log.warning("%s", note)
        self._begin(trained, self._context, batch_size, max_length, max_gen_toks)
        if never_trained(trained.gpt, self._context):
            _log.error("ALARM: the weights of %s are random: they were never trained", path)
        if self._context.rank > 0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        if self._context.world.size > 1:
            _open.append(self)
            atexit.register(leave_ranks)

    @classmethod
    def of(
        cls, trained: Trained, context: ParallelContext, batch_size: int, template: ChatTemplate | None = None
    ) -> MegalithLM:
        """Return the adapter of a loaded model; its chat template is for tasks that are asked as dialogues."""
        found = cls.__new__(cls)
        TemplateLM.__init__(found)
        found._begin(trained, context, batch_size, None, _MAX_NEW_TOKENS, template)
        return found

    def _begin(
        self,
        trained: Trained,
        context: ParallelContext,
        batch_size: int | str | None,
        max_length: int | None,
        max_gen_toks: int,
        template: ChatTemplate | None = None,
    ) -> None:
        self._trained, self._context, self._ranks = trained, context, getattr(self, "_ranks", ExitStack())
        tokenizer = trained.tokenizer
        self._template = template or template_beside(tokenizer)
        self._stop_ids = stop_ids_beside(tokenizer, template)
        self._special = {tokenizer.decode([number]): number for number in tokenizer.special_ids}
        self._before, self._behind = added_around(tokenizer)
        begin = tokenizer.encode("")[: self._before]
        self._begin_text = tokenizer.decode(begin) if begin else None
        self.asked, self.shortened = 0, 0  # prompts, and those that lost their beginning
        size = int(str(batch_size)) if str(batch_size).isdigit() else DEFAULT_BATCH  # lm-eval also passes "auto"
        # A Hugging Face folder has no padded rows: rows beyond its tokenizer count there too.
        num_tokens = None if trained.from_huggingface else trained.tokenizer.vocab_size
        self._scorer = Scorer(trained.gpt, self._context, batch_size=size, num_tokens=num_tokens)
        self._max_length = min(max_length or self._scorer.context_length, self._scorer.context_length)
        self._max_gen_toks = max_gen_toks
        self._device = self._context.device

    def close(self) -> None:
        self._ranks.close()

    @property
    def eot_token_id(self) -> int:
        return require_eod(self._trained.tokenizer, "lm-eval")

    @property
    def max_length(self) -> int:
        """Return the most tokens of context and continuation in one forward pass."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Return the tokens to generate if a task does not set them."""
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        card = self._trained.tokenizer.fingerprint()
        return f"{card['class']}-{'-'.join(digest[:12] for digest in card['files'].values())}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if not string:
            return []
        ids = self._trained.tokenizer.encode(string)
        # As lm-eval's own model of transformers: a template writes the first token itself.
        own = self._begin_text is not None and add_special_tokens is None and string.startswith(self._begin_text)
        return ids[self._before : len(ids) - self._behind] if own or add_special_tokens is False else ids

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._required_template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a dialogue as text; without a generation prompt the last message is left open."""
        text = self._required_template.render(chat_history, add_generation_prompt=add_generation_prompt)
        last = chat_history[-1]["content"].strip()
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    @property
    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise ConfigError(
                "--apply-chat-template: the tokenizer has no chat template; give --chat-template FILE, or leave it out"
            )
        return self._template

    def tok_decode(self, tokens: list[int]) -> str:
        return self._trained.tokenizer.decode(tokens)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        samples = {}
        for number, (_, context, continuation) in enumerate(requests):
            if not continuation:
                continue
            if len(continuation) > self._max_length:
                _log.warning("a continuation of %d tokens is cut to %d", len(continuation), self._max_length)
            whole = [*(context or [self.prefix_token_id]), *continuation]
            ids = whole[-(self._max_length + 1) :]
            self.asked, self.shortened = self.asked + 1, self.shortened + (len(ids) < len(whole))
            samples[number] = Sample(ids, min(len(continuation), len(ids) - 1))
        # Similar lengths need little padding; the longest come first, so that memory runs out at once or never.
        order = sorted(samples, key=lambda number: -len(samples[number].ids))
        ordered = [samples[number] for number in order]
        scores = dict(zip(order, self._score(ordered, "log-likelihoods", disable_tqdm), strict=True))
        answers = []
        for number, (texts, _, _) in enumerate(requests):
            score = scores.get(number)
            answer = (0.0, True) if score is None else (score.total, bool(score.greedy.all()))
            answers.append(answer)
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        samples, of_text = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            for read, predicted in windows:
                samples.append(Sample([*read, predicted[-1]], len(predicted)))
                of_text.append(number)
        totals = [0.0] * len(requests)
        for number, score in zip(of_text, self._score(samples, "rolling windows", disable_tqdm), strict=True):
            totals[number] += score.total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _score(self, samples: list[Sample], what: str, quiet: bool) -> list[Score]:
        """Score samples under a progress bar, which moves before each batch."""
        with tqdm(total=len(samples), desc=what, disable=quiet or self._context.rank > 0) as bar:
            replicas = self._context.dp.size
            scores = self._scorer(samples, lambda batch: bar.update(batch * replicas * self._scorer.batch_size - bar.n))
            bar.update(len(samples) - bar.n)
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        answers = self._generate_on_all_ranks(requests)
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _generate_on_all_ranks(self, requests: list[Any]) -> list[str]:
        """Generate the answers to all requests; every rank returns all of them.

        Replicas that are whole on one rank take requests in turn. Ranks that share a model serve all requests together.
        """
        context, blocks = self._context, self._scorer.batch_size * blocks_for(self._max_length)
        if context.tp.size * context.pp.size == 1:
            numbers = range(context.dp.index, len(requests), context.dp.size)
            runner = runner_of(self._trained.gpt, blocks)
            own = dict(zip(numbers, self._serve(runner, [requests[number] for number in numbers]), strict=True))
            parts = comm.all_gather_objects(own, context.dp)
            return [parts[number % context.dp.size][number] for number in range(len(requests))]
        shared = RankRunner(self._trained.gpt, context, blocks)
        if context.rank > 0:
            shared.follow()
            answers = []
        else:
            answers = self._serve(shared, requests)
            shared.close()
        shown: list[str] = comm.all_gather_objects(answers, context.world)[0]
        return shown

    def _serve(self, runner: Runner, requests: list[Any]) -> list[str]:
        limits = Limits(max_num_seqs=self._scorer.batch_size, max_waiting=len(requests) + 1)
        engine = Engine(runner, self._trained.tokenizer, limits)
        handles = [engine.submit(self._request(*request.args)) for request in requests]
        ids, ends = {handle: list[int]() for handle in handles}, dict.fromkeys(handles, Finished("cancelled"))
        while engine.has_work:
            for handle, event in engine.step():
                if isinstance(event, Token):
                    ids[handle].append(event.id)
                elif isinstance(event, Finished):
                    ends[handle] = event
                    if event.reason == "error":
                        raise MegalithError(event.message)
        return [self._text(ids[handle], ends[handle].stop) for handle in handles]

    def _text(self, ids: list[int], stop: int | str | None) -> str:
        """Return the text of an answer as a whole: in pieces, bytes that are no characters would be cut otherwise."""
        hidden = self._trained.tokenizer.special_ids
        text = self.tok_decode(
            [number for number in ids[: -1 if isinstance(stop, int) else None] if number not in hidden]
        )
        return text.partition(stop)[0] if isinstance(stop, str) else text

    def _request(self, prompt: str, options: dict[str, Any]) -> Request:
        """Convert lm-eval's `options` to a request; greedy unless they say otherwise."""
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        count = int(options.get("max_gen_toks") or options.get("max_new_tokens") or self._max_gen_toks)
        count = min(count, self._max_length - 1)
        temperature = float(options.get("temperature") or 0.0)
        if not options.get("do_sample", temperature > 0.0):
            temperature = 0.0
        ids = self.tok_encode(prompt) or [self.prefix_token_id]
        self.asked, self.shortened = self.asked + 1, self.shortened + (len(ids) > self._max_length - count)
        return Request(
            prompt=tuple(ids[-(self._max_length - count) :]),
            max_new_tokens=count,
            sampling=Sampling(temperature, int(options.get("top_k") or 0), float(options.get("top_p") or 0.0)),
            seed=int(options.get("seed") or _SEED),
            stop_texts=tuple(stop for stop in stops if stop and stop not in self._special),
            stop_ids=self._stop_ids,
            extra_stop_ids=tuple(self._special[stop] for stop in stops if stop in self._special),
            skip_token_ids=self._trained.tokenizer.special_ids,
        )


_open: list[MegalithLM] = []


def leave_ranks() -> None:
    """Release the process groups after the last use of a model."""
    while _open:
        _open.pop().close()
