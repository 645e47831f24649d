"""Second witness: small random GPT-2 and Llama of Hugging Face give the same logits with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.gpt import GPT
from megalith.serve.engine import Engine, Limits, RequestHandle
from megalith.serve.model_runner import ModelRunner
from megalith.serve.request import Beams, Event, PromptLogprobs, Request, Sampling, Token
from megalith.serve.sampler import SamplingInput, choose_tokens

transformers = pytest.importorskip("transformers", reason="the second witness needs the hf extra (transformers)")

HIDDEN, HEADS, LAYERS, VOCAB, LENGTH = 24, 4, 2, 64, 17


def _interleave_qkv(parts: list[Tensor], heads: tuple[int, int, int]) -> Tensor:
    """Stack q, k and v rows group by group: the queries of a group, its key, its value."""
    groups = heads[1]
    per_group = [
        part.reshape(groups, count // groups * (HIDDEN // HEADS), *part.shape[1:])
        for part, count in zip(parts, heads, strict=True)
    ]
    return torch.cat(per_group, dim=1).flatten(0, 1)


def _load(model: GPT, weights: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def _gpt2_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = {
        "embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": state["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": state["transformer.ln_f.bias"],
    }
    for layer in range(LAYERS):
        theirs, ours = f"transformer.h.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            weights[f"{ours}input_layernorm.{kind}"] = state[f"{theirs}ln_1.{kind}"]
            weights[f"{ours}pre_mlp_layernorm.{kind}"] = state[f"{theirs}ln_2.{kind}"]
            names = {
                "self_attention.linear_proj": "attn.c_proj",
                "mlp.linear_fc1": "mlp.c_fc",
                "mlp.linear_fc2": "mlp.c_proj",
            }
            for mine, name in names.items():
                weights[f"{ours}{mine}.{kind}"] = state[f"{theirs}{name}.{kind}"].t()
            qkv = state[f"{theirs}attn.c_attn.{kind}"].t()
            weights[f"{ours}self_attention.linear_qkv.{kind}"] = _interleave_qkv(list(qkv.chunk(3)), (HEADS,) * 3)
    return weights


def _llama_weights(state: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    weights = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for layer in range(LAYERS):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
        qkv = [state[f"{attention}{part}_proj.weight"] for part in "qkv"]
        weights |= {
            f"{ours}input_layernorm.weight": state[f"{theirs}input_layernorm.weight"],
            f"{ours}pre_mlp_layernorm.weight": state[f"{theirs}post_attention_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": _interleave_qkv(qkv, (HEADS, groups, groups)),
            f"{ours}self_attention.linear_proj.weight": state[f"{attention}o_proj.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.cat([state[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]),
            f"{ours}mlp.linear_fc2.weight": state[f"{mlp}down_proj.weight"],
        }
    return weights


def _randomised(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def _compare(ours: GPT, theirs: Any) -> None:
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        torch.testing.assert_close(ours.eval()(tokens), wanted, rtol=1e-6, atol=1e-6)
    loss = ours(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
    torch.testing.assert_close(loss, theirs(tokens, labels=tokens).loss.double(), rtol=1e-6, atol=1e-6)


def gpt2_pair() -> tuple[GPT, Any]:
    """Ours and theirs."""
    theirs = _randomised(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS)
        )
    )
    config = ModelConfig(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, max_position_embeddings=32)
    ours = GPT(config, VOCAB, dtype=torch.float64)
    _load(ours, _gpt2_weights(theirs.state_dict()))
    return ours, theirs


def test_gpt2_logits_and_loss() -> None:
    _compare(*gpt2_pair())


def llama_pair(groups: int) -> tuple[GPT, Any]:
    """Ours and theirs."""
    theirs = _randomised(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=HIDDEN,
                intermediate_size=40,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=groups,
                max_position_embeddings=32,
                rms_norm_eps=1e-5,
                tie_word_embeddings=False,
            )
        )
    )
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        ffn_hidden_size=40,
        group_query_attention=True,
        num_query_groups=groups,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    )
    ours = GPT(config, VOCAB, dtype=torch.float64)
    _load(ours, _llama_weights(theirs.state_dict(), groups))
    return ours, theirs


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_llama_logits_and_loss(groups: int) -> None:
    _compare(*llama_pair(groups))


class _Numbers:
    """A tokenizer whose text is ids."""

    vocab_size, eod, pad = VOCAB, 0, None

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_the_engine_answers_as_transformers_does(groups: int | None) -> None:
    ours, theirs = gpt2_pair() if groups is None else llama_pair(groups)
    engine = Engine(ModelRunner(ours, 40, 4), cast("Any", _Numbers()), Limits(max_num_batched_tokens=7))
    prompts = [(5, 9, 2, 6), (5, 9, 2, 6, 5, 3, 5, 8, 9), (11,), (5, 9, 2, 6, 1, 1)]
    handles = {
        engine.submit(Request(prompt, 12, Sampling(0.0), stop_ids=(), logprobs=3, prompt_logprobs=True)): prompt
        for prompt in prompts
    }
    events: dict[RequestHandle, list[Event]] = {handle: [] for handle in handles}
    while engine.has_work:
        for handle, event in engine.step():
            events[handle].append(event)
    for handle, prompt in handles.items():
        inputs = torch.tensor([prompt])
        answer = theirs.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=12, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        with torch.no_grad():
            logprobs = theirs(answer).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, answer[0, 1:, None]).squeeze(1).tolist()
        scores, *tokens = events[handle][:-1]
        assert isinstance(scores, PromptLogprobs)
        assert [token.id for token in tokens if isinstance(token, Token)] == answer[0, len(prompt) :].tolist()
        ours_of = [*scores.logprobs[1:], *(token.logprob for token in tokens if isinstance(token, Token))]
        assert ours_of == pytest.approx(own, rel=1e-5, abs=1e-5)
        best = logprobs.topk(3).indices.tolist()
        assert [[i for i, _ in token.top] for token in tokens if isinstance(token, Token)] == best[len(prompt) - 1 :]


@pytest.mark.parametrize("groups", [None, 2])
def test_log_probabilities_of_sampled_answers(groups: int | None) -> None:
    ours, theirs = gpt2_pair() if groups is None else llama_pair(groups)
    engine = Engine(ModelRunner(ours, 60, 4), cast("Any", _Numbers()), Limits(max_num_batched_tokens=5))
    sampling = Sampling(temperature=1.7, top_p=0.9, repetition_penalty=1.3)
    request = Request((5, 9, 2, 6), 12, sampling, seed=3, n=3, stop_ids=(), logprobs=2)
    answers: list[list[Token]] = [[], [], []]
    for event in engine.run(request):
        if isinstance(event, Token):
            answers[event.sample].append(event)
    assert len({tuple(token.id for token in answer) for answer in answers}) == 3
    for answer in answers:
        ids = torch.tensor([[*request.prompt, *(token.id for token in answer)]])
        with torch.no_grad():
            logprobs = theirs(ids).logits[0, 3:-1].log_softmax(-1)
        for token, row in zip(answer, logprobs, strict=True):  # the model's own, whatever was done to choose
            assert token.logprob == pytest.approx(row[token.id].item(), rel=1e-5, abs=1e-5)
            best = row.topk(2)
            assert [number for number, _ in token.top] == best.indices.tolist()
            assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=5),
        Sampling(top_p=0.8),
        Sampling(temperature=2.0, top_k=40, top_p=0.6),
        Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.8),
        Sampling(repetition_penalty=0.5, top_k=3),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_distribution_of_transformers(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(0)
    prompt, draws = (3, 1, 4, 1, 5), 2000
    for scale in (0.5, 3.0):
        logits_V = torch.randn(VOCAB, generator=generator, dtype=torch.float64) * scale
        warpers = transformers.LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            warpers.append(transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.temperature != 1.0:
            warpers.append(transformers.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p:
            warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
        wanted = warpers(torch.tensor([prompt]), logits_V[None].clone())[0].softmax(-1)
        # One draw for each of evenly spaced chances: a token's share of them is its probability.
        rows = [SamplingInput(sampling, (i + 0.5) / draws, prompt, ()) for i in range(draws)]
        chosen = torch.tensor([choice.token for choice in choose_tokens(logits_V.expand(draws, -1), rows)])
        shares = torch.bincount(chosen, minlength=VOCAB) / draws
        assert not (shares[wanted == 0] > 0).any()
        torch.testing.assert_close(shares, wanted, rtol=0, atol=1.01 / draws, check_dtype=False)


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (2, 0.0), (3, 1.0), (4, 2.0)])
@pytest.mark.parametrize("groups", [None, 2])
def test_beams_are_those_of_transformers(groups: int | None, width: int, penalty: float) -> None:
    ours, theirs = gpt2_pair() if groups is None else llama_pair(groups)
    engine, eod = Engine(ModelRunner(ours, 80, 4), cast("Any", _Numbers())), 7
    ended = 0
    for prompt in ((5, 9, 2, 6), (11,), (5, 9, 2, 6, 1, 1, 3)):
        beams, _ = engine.run(Request(prompt, 9, stop_ids=(eod,), beam_width=width, length_penalty=penalty))
        assert isinstance(beams, Beams)
        inputs = torch.tensor([prompt])
        found = theirs.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=9, do_sample=False, num_beams=width,
            num_return_sequences=width, length_penalty=penalty, early_stopping=False, eos_token_id=eod, pad_token_id=0,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        texts = [row[len(prompt) :].tolist() for row in found.sequences]
        wanted = [ids[: ids.index(eod)] if eod in ids else ids for ids in texts]
        ended += sum(eod in ids for ids in texts)
        assert list(beams.hypotheses[0]) == wanted[0]
        if width > 1:
            assert list(map(list, beams.hypotheses)) == wanted
            assert list(beams.scores) == pytest.approx(found.sequences_scores.tolist(), rel=1e-5)
