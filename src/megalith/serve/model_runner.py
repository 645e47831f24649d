"""Runners of a model, in one process or over tensor- and pipeline-parallel ranks, and prompts of encoder-decoders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.config.groups.lora import PROJECTIONS
from megalith.data.masked.t5 import decoder_start_token
from megalith.distributed import comm, p2p
from megalith.distributed.context import ParallelContext
from megalith.errors import DataError, LayoutError, PeerError
from megalith.kernels.cpu.products import FEW_ROWS_BY_FBGEMM, Packing, Product
from megalith.kernels.transfer import to_device
from megalith.models.frozen import frozen
from megalith.models.language_model import GenerativeModel, LanguageModel
from megalith.models.plain import PlainModel
from megalith.models.transformer import Block
from megalith.nn.linear import Linear
from megalith.nn.lora import Adapter, AdapterBank, Rows
from megalith.nn.loss import whole_logits
from megalith.nn.precision import product_dtype
from megalith.serve.cache import CacheView, EncoderCacheView, PagedKVCache
from megalith.serve.runner import Batch, Chunk, Runner
from megalith.serve.scheduler import padded_to_blocks
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import require_eod

BLOCK_SIZE = 16
_SMALL_MODEL = 256 << 20  # bytes of weights that may be kept in two layouts


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def local_groups(model: GenerativeModel) -> int:
    """Return the number of key-value heads of each layer on this rank."""
    first = next(iter(model.decoder.layers.values()))
    assert isinstance(first, Block)
    return first.self_attention.num_groups


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Return the number of blocks that `tokens` tokens of one sequence fill."""
    return -(-tokens // block_size)


class ModelRunner(Runner):
    """A model, or the pipeline stage of it on this rank, with its KV cache.

    Args:
        model: A decoder, or an encoder-decoder.
        num_blocks: Blocks of the KV cache; the same on all ranks.
        context_length: Maximum number of positions, for models without a position table; as in training if None.
        packs_weights: Whether to move weights into the layout of faster products; the model has them no more then. A
            half-precision output weight that is the word embedding too is copied. bf16 weights of a small model get a
            second layout, for few rows, on processors where it is faster.
        adapts: Whether LoRA adapters may be added.
    """

    def __init__(
        self,
        model: GenerativeModel,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        *,
        context_length: int | None = None,
        packs_weights: bool = False,
        adapts: bool = False,
    ) -> None:
        self.model: GenerativeModel = model.eval()
        self.vocab_size = model.vocab_size
        self.context_length = context_length or model.config.max_position_embeddings
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cache = PagedKVCache(
            len(model.decoder.layers),
            num_blocks,
            block_size,
            local_groups(model),
            model.config.kernel_head_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._rows: Rows = ()
        self._banks = _add_banks(model, lambda: self._rows) if adapts else {}
        self._cross_attentions = model.cross_attentions()
        for_few_rows = FEW_ROWS_BY_FBGEMM and _weight_bytes(model) <= _SMALL_MODEL
        packing = Packing(for_few_rows) if packs_weights and model.region.size == 1 else None
        self._layers = None if self._cross_attentions else frozen(model.decoder, packing)
        self._output = None if packing is None else self._pack_output(packing)
        self.weight_bytes = _weight_bytes(model) + (0 if packing is None else packing.num_bytes)

    def _pack_output(self, packing: Packing) -> Product | None:
        """Return the product with the output weight in a faster layout; None if there is none."""
        model, weight = self.model, self.model.output_weight.detach()
        tied = not model.config.untie_embeddings_and_output_weights
        if tied and weight.dtype == product_dtype(weight) == torch.float32:  # a copy would cost more than it gives
            return None
        bias = None if model.output_bias is None else model.output_bias.detach()
        packed = packing.product(weight, bias, product_dtype(weight))
        if packed is not None and not tied:
            model.output_weight.data = weight.new_empty(0)
        return packed

    def add_adapters(self, number: int, adapters: Mapping[str, Adapter]) -> None:
        """Add adapters, by the name of their layer, for the chunks that have this number."""
        for name, adapter in adapters.items():
            self._banks[name].factors[number] = adapter.factors()

    def remove_adapters(self, number: int) -> None:
        for bank in self._banks.values():
            bank.factors.pop(number, None)

    def run(self, batch: Batch) -> Tensor:
        return self.logits(self.hidden_states(batch), batch)

    def hidden_states(self, batch: Batch, hidden_S1D: Tensor | None = None) -> Tensor:
        """Return the hidden states [S, 1, D] of the new tokens after the layers of this stage.

        `hidden_S1D` are those of the previous stage.
        """
        with torch.inference_mode():
            tokens = [token for chunk in batch.chunks for token in decoder_tokens(chunk, self.block_size)]
            tokens_1S, view = to_device(torch.tensor([tokens]), self.model.device), self.cache.begin(batch)
            self._rows = rows_of_adapters(batch.chunks, self.model.device) if self._banks else ()
            options: dict[str, Any] = {"layers": self._layers} if self._layers is not None else {}
            if self._cross_attentions:
                options = {"encoded": self._encode_new(batch, view)}
            return self.model.hidden_states(tokens_1S, hidden_SBD=hidden_S1D, cache=view, **options)

    def _encode_new(self, batch: Batch, view: CacheView) -> EncoderCacheView:
        """Return the cross-attention cache of all chunks, after encoding the new encoder inputs one by one."""
        encoded, model = EncoderCacheView(view, self._cross_attentions), self.model
        for number, chunk in enumerate(batch.chunks):
            if chunk.start < chunk.encoder_length:
                assert chunk.start == 0, "an encoder input is never chunked"
                input_1E = torch.tensor([chunk.tokens[: chunk.encoder_length]], device=model.device)
                encoded.write(number, model.encode(input_1E).states_EBD)
        return encoded

    def logits(self, hidden_S1D: Tensor, batch: Batch) -> Tensor:
        """Return the logits [R, V] of the last `num_logits` tokens of each chunk; on the last stage only."""
        with torch.inference_mode():
            model, hidden = self.model, hidden_S1D.squeeze(1)
            rows = logits_rows(batch.chunks, self.block_size)
            if len(rows) < hidden.shape[0]:
                hidden = hidden[rows]
            if self._output is not None:
                return self._output(hidden)
            return whole_logits(hidden, model.output_weight, model.region, model.vocab_size, model.output_bias)


class _TokenCache:
    """Paged cache of token ids instead of keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.tokens = torch.zeros(num_blocks, block_size, dtype=torch.int64)

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes

    def begin(self, batch: Batch) -> list[Tensor]:
        """Store the new tokens; return all tokens [S] of each sequence."""
        for source, target in batch.copies:
            self.tokens[target] = self.tokens[source]
        found = []
        for chunk in batch.chunks:
            end = chunk.start + len(chunk.tokens)
            sequence = self.tokens[list(chunk.blocks)].flatten()
            sequence[chunk.start : end] = torch.tensor(chunk.tokens)
            self.tokens[list(chunk.blocks)] = sequence.view(-1, self.tokens.shape[1])
            found.append(sequence[:end])
        return found


class PlainRunner(Runner):
    """The runner of a plain module, which recomputes the whole sequence for each new token."""

    def __init__(self, model: PlainModel, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.model = model.eval()
        self.vocab_size, self.context_length = model.vocab_size, model.config.max_position_embeddings
        self.weight_bytes = _weight_bytes(model)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cache = _TokenCache(num_blocks, block_size)

    def run(self, batch: Batch) -> Tensor:
        with torch.inference_mode():
            rows = list[Tensor]()
            for chunk, sequence_S in zip(batch.chunks, self.cache.begin(batch), strict=True):
                if chunk.num_logits:
                    rows.append(self.model(sequence_S[None].to(self.model.device))[0, -chunk.num_logits :])
            return torch.cat(rows) if rows else torch.empty(0, self.vocab_size, device=self.model.device)


def runner_of(
    model: GenerativeModel | PlainModel,
    num_blocks: int,
    *,
    context_length: int | None = None,
    packs_weights: bool = False,
    adapts: bool = False,
) -> ModelRunner | PlainRunner:
    """Return the runner of an unsharded model; arguments as of `ModelRunner`."""
    if isinstance(model, PlainModel):
        return PlainRunner(model, num_blocks)
    return ModelRunner(model, num_blocks, context_length=context_length, packs_weights=packs_weights, adapts=adapts)


def _add_banks(model: GenerativeModel, rows: Callable[[], Rows]) -> dict[str, AdapterBank]:
    """Give each linear layer that may have adapters a bank of them; return the banks by the name of the layer."""
    found, modules = dict[str, AdapterBank](), tuple(f".{module}" for module, _ in PROJECTIONS.values())
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and name.endswith(modules):
            found[name] = layer.adapter = AdapterBank(rows)
    return found


def rows_of_adapters(chunks: Sequence[Chunk], device: torch.device) -> Rows:
    """Return the rows of the new tokens that each adapter of a batch is for, tokens of one after another as slice."""
    rows, end = dict[int, list[int]](), 0
    for chunk in chunks:
        start, end = end, end + len(chunk.tokens)
        if chunk.adapter:
            rows.setdefault(chunk.adapter, []).extend(range(start, end))
    return [
        (number, slice(own[0], own[-1] + 1) if own[-1] - own[0] < len(own) else to_device(torch.tensor(own), device))
        for number, own in rows.items()
    ]


def decoder_tokens(chunk: Chunk, block_size: int) -> Sequence[int]:
    """Return the tokens of a chunk after its padded encoder input."""
    return chunk.tokens[max(0, padded_to_blocks(chunk.encoder_length, block_size) - chunk.start) :]


def logits_rows(chunks: Sequence[Chunk], block_size: int) -> list[int]:
    """Return the indices, among the new decoder tokens of all chunks, of those whose logits are requested."""
    rows: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(decoder_tokens(chunk, block_size))
        rows += range(end - chunk.num_logits, end)
    return rows


# --- several ranks ---

_FIRST_MESSAGE = 2048  # integers; the rest of a larger one follows
_CLOSE, _PING, _RUN = range(3)


def pack(batch: Batch) -> list[int]:
    """Serialise a batch to integers, for a broadcast."""
    message = [len(batch.chunks), len(batch.copies)]
    for copy in batch.copies:
        message += copy
    for chunk in batch.chunks:
        message += (len(chunk.tokens), len(chunk.blocks), chunk.start, chunk.num_logits, chunk.encoder_length)
        message += (chunk.adapter, *chunk.tokens, *chunk.blocks)
    return message


def unpack(message: Sequence[int]) -> Batch:
    """Return the batch that `pack` serialised."""
    num_chunks, num_copies = message[:2]
    at = 2 + 2 * num_copies
    copies = [(message[i], message[i + 1]) for i in range(2, at, 2)]
    chunks = []
    for _ in range(num_chunks):
        num_tokens, num_blocks, start, *others = message[at : at + 6]
        tokens = message[at + 6 : at + 6 + num_tokens]
        at += 6 + num_tokens + num_blocks
        chunks.append(Chunk(tokens, start, message[at - num_blocks : at], *others))
    return Batch(chunks, copies)


class RankRunner(ModelRunner):
    """A model over tensor-parallel ranks and pipeline stages. Rank 0 calls `run`, the others `follow`.

    Rank 0 broadcasts each batch; each stage sends its hidden states to the next one, and the last sends the logits to
    rank 0.

    Raises:
        LayoutError: there are more ranks than those of one model (data-parallel replicas).
    """

    def __init__(
        self,
        model: GenerativeModel | PlainModel,
        context: ParallelContext,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        *,
        context_length: int | None = None,
        adapts: bool = False,
    ) -> None:
        if context.world.size != context.tp.size * context.pp.size:
            raise LayoutError(
                f"{context.world.size} ranks are more than --tensor-model-parallel-size {context.tp.size} x "
                f"--pipeline-model-parallel-size {context.pp.size}: start that many processes, and one server per "
                "replica of the model"
            )
        assert not isinstance(model, PlainModel), "a plain module is whole on one rank"
        super().__init__(model, num_blocks, block_size, context_length=context_length, adapts=adapts)
        self._context, self._closed = context, False

    def run(self, batch: Batch) -> Tensor:
        self._send_command(_RUN, pack(batch))
        logits = self._run_guarded(batch)
        assert logits is not None, "rank 0 is in the first stage"
        return logits

    def ping(self) -> None:
        self._send_command(_PING, [])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._send_command(_CLOSE, [])

    def follow(self) -> None:
        """Execute the commands of rank 0 until it closes the runner."""
        while True:
            command, message = self._receive_command()
            if command == _CLOSE:
                return
            if command == _RUN:
                self._run_guarded(unpack(message))

    def _run_guarded(self, batch: Batch) -> Tensor | None:
        try:
            return self._run(batch)
        except RuntimeError as error:
            raise _peer_error(error) from error

    def _run(self, batch: Batch) -> Tensor | None:
        """Compute this rank's stage of the batch; return the logits on rank 0, elsewhere None."""
        model, context = self.model, self._context
        channels, hidden = context.p2p_channels, None
        if not model.stage.is_first:
            assert channels is not None
            shape = (sum(len(chunk.tokens) for chunk in batch.chunks), 1, model.config.hidden_size)
            hidden = p2p.receive(channels.from_previous, shape, model.dtype, context.device).wait()
        hidden = self.hidden_states(batch, hidden)
        if not model.stage.is_last:
            assert channels is not None
            p2p.send(hidden, channels.to_next).wait()
            return self._receive_logits(batch)
        logits = self.logits(hidden, batch)
        if context.ends is not None and context.tp.is_first and logits.shape[0]:
            comm.broadcast(logits.contiguous(), context.ends, source=1)
        return logits

    def _receive_logits(self, batch: Batch) -> Tensor | None:
        context, num_logits = self._context, sum(chunk.num_logits for chunk in batch.chunks)
        if context.ends is None or not context.tp.is_first:
            return None
        logits = torch.empty(num_logits, self.vocab_size, dtype=self.model.dtype, device=context.device)
        return comm.broadcast(logits, context.ends, source=1) if num_logits else logits

    def _send_command(self, command: int, message: list[int]) -> None:
        first = [command, len(message), *message[:_FIRST_MESSAGE]]
        first += [0] * (2 + _FIRST_MESSAGE - len(first))
        self._broadcast(torch.tensor(first, device=self._context.device))
        if len(message) > _FIRST_MESSAGE:
            self._broadcast(torch.tensor(message[_FIRST_MESSAGE:], device=self._context.device))

    def _receive_command(self) -> tuple[int, list[int]]:
        first = torch.empty(2 + _FIRST_MESSAGE, dtype=torch.int64, device=self._context.device)
        command, length, *message = self._broadcast(first).tolist()
        if length > _FIRST_MESSAGE:
            message += self._broadcast(first.new_empty(length - _FIRST_MESSAGE)).tolist()
        return command, message[:length]

    def _broadcast(self, x: Tensor) -> Tensor:
        try:
            return comm.broadcast(x, self._context.world)
        except RuntimeError as error:
            raise _peer_error(error) from error


def _peer_error(error: RuntimeError) -> PeerError:
    # gloo prefixes the message with a source location and appends advice.
    what = re.sub(r"^\[\S+\] ", "", str(error)).partition(" This is typically")[0]
    return PeerError(f"a rank that shares the model does not answer: {what}")


@dataclass(frozen=True)
class DecoderPrompt:
    """Tokens that begin and end an answer of an encoder-decoder model."""

    start: int  # first token of the decoder
    end: int  # token that ends an answer


def decoder_prompt_of(model: LanguageModel, tokenizer: Tokenizer) -> DecoderPrompt | None:
    """Return the decoder prompt of an encoder-decoder model, or None. `ConfigError` without a start token."""
    if not model.config.family.encoder_decoder:
        return None
    end = tokenizer.special.get("eos")
    return DecoderPrompt(decoder_start_token(tokenizer), require_eod(tokenizer, "T5") if end is None else end)


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text for an encoder; <extra_id_N> becomes that token even if the tokenizer would split it.

    Raises `DataError` if the tokenizer has fewer of these tokens, or cannot encode the text.
    """
    sentinels = {f"<extra_id_{number}>": token for number, token in enumerate(tokenizer.extra_ids)}
    named = re.findall(r"<extra_id_\d+>", text)
    if unknown := [name for name in named if name not in sentinels]:
        shown = unknown[0] if len(unknown[0]) < 40 else f"{unknown[0][:30]}...>"
        raise DataError(f"has {shown}, and the tokenizer {len(sentinels)} tokens <extra_id_N>")
    if not named or sentinels[named[0]] in tokenizer.encode(
        named[0]
    ):  # the tokenizer knows them, and adds its own special tokens
        return tokenizer.encode(text)
    ids = list[int]()
    for part in re.split(r"(<extra_id_\d+>)", text):
        if part in sentinels:
            ids.append(sentinels[part])
        elif part.strip():
            ids += tokenizer.encode(part)
    return ids
