"""Runners with a model: in one process, and over the ranks of a layout; and how one with an encoder opens an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.data.masked.t5 import decoder_start_token
from megalith.distributed import comm, p2p
from megalith.distributed.context import ParallelContext
from megalith.errors import DataError, LayoutError, PeerError
from megalith.models.frozen import frozen
from megalith.models.language_model import GenerativeModel, LanguageModel
from megalith.models.plain import PlainModel
from megalith.models.transformer import Block
from megalith.nn.loss import whole_logits
from megalith.serve.cache import CacheView, PagedKVCache, Texts
from megalith.serve.runner import Batch, Piece
from megalith.serve.scheduler import filled_blocks
from megalith.tokenizers import Tokenizer

BLOCK_SIZE = 16


def local_groups(model: GenerativeModel) -> int:
    """The key-value heads of each layer that are here."""
    first = next(iter(model.decoder.layers.values()))
    assert isinstance(first, Block)
    return first.self_attention.num_groups


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """How many blocks hold so many tokens of one sequence."""
    return -(-tokens // block_size)


class ModelRunner:
    """A model, or the stage of it that is here, with its cache.

    Args:
        model: One that continues texts, or one that reads them with an encoder and answers.
        num_blocks: Of the cache; the same on all ranks.
        context_length: Where the model has no table of positions, how long texts may be; as in training if None.
    """

    def __init__(
        self,
        model: GenerativeModel,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        *,
        context_length: int | None = None,
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
        self._cross_attentions = model.cross_attentions()
        self._layers = None if self._cross_attentions else frozen(model.decoder)

    def run(self, batch: Batch) -> Tensor:
        return self.logits(self.read(batch), batch)

    def read(self, batch: Batch, hidden_S1D: Tensor | None = None) -> Tensor:
        """Hidden states of the new tokens behind what is here. -> [S, 1, D]."""
        with torch.inference_mode():
            tokens = [token for piece in batch.pieces for token in decoded(piece, self.block_size)]
            tokens_1S, view = torch.tensor([tokens], device=self.model.device), self.cache.read(batch)
            more: dict[str, Any] = {"layers": self._layers} if self._layers is not None else {}
            if self._cross_attentions:
                more = {"encoded": self._texts(batch, view)}
            return self.model.hidden_states(tokens_1S, hidden_SBD=hidden_S1D, cache=view, **more)

    def _texts(self, batch: Batch, view: CacheView) -> Texts:
        """The texts of all pieces; those that are new are read, each by itself."""
        texts, model = Texts(view, self._cross_attentions), self.model
        for number, piece in enumerate(batch.pieces):
            if piece.start < piece.source:
                assert piece.start == 0, "an encoder reads a text at once"
                text_1E = torch.tensor([piece.tokens[: piece.source]], device=model.device)
                texts.keep(number, model.encode(text_1E).states_EBD)
        return texts

    def logits(self, hidden_S1D: Tensor, batch: Batch) -> Tensor:
        """The logits of the wanted tokens, [wanted, V]; only where the model predicts."""
        with torch.inference_mode():
            model, hidden = self.model, hidden_S1D.squeeze(1)
            rows = wanted_rows(batch.pieces, self.block_size)
            if len(rows) < hidden.shape[0]:
                hidden = hidden[rows]
            return whole_logits(hidden, model.output_weight, model.region, model.vocab_size, model.output_bias)

    def ping(self) -> None:
        pass

    def close(self) -> None:
        pass


class _TokenCache:
    """The tokens of all sequences in blocks, in place of their keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.tokens = torch.zeros(num_blocks, block_size, dtype=torch.int64)

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes

    def read(self, batch: Batch) -> list[Tensor]:
        """Keep the new tokens; all tokens of each sequence, [S] each."""
        for source, target in batch.copies:
            self.tokens[target] = self.tokens[source]
        found = []
        for piece in batch.pieces:
            end = piece.start + len(piece.tokens)
            sequence = self.tokens[list(piece.blocks)].flatten()
            sequence[piece.start : end] = torch.tensor(piece.tokens)
            self.tokens[list(piece.blocks)] = sequence.view(-1, self.tokens.shape[1])
            found.append(sequence[:end])
        return found


class PlainRunner:
    """A `Runner` of a plain module, which reads each sequence as a whole for each new token."""

    def __init__(self, model: PlainModel, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.model = model.eval()
        self.vocab_size, self.context_length = model.vocab_size, model.config.max_position_embeddings
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cache = _TokenCache(num_blocks, block_size)

    def run(self, batch: Batch) -> Tensor:
        with torch.inference_mode():
            rows = list[Tensor]()
            for piece, sequence_S in zip(batch.pieces, self.cache.read(batch), strict=True):
                if piece.wanted:
                    rows.append(self.model(sequence_S[None].to(self.model.device))[0, -piece.wanted :])
            return torch.cat(rows) if rows else torch.empty(0, self.vocab_size, device=self.model.device)

    def ping(self) -> None:
        pass

    def close(self) -> None:
        pass


def runner_of(
    model: GenerativeModel | PlainModel, num_blocks: int, *, context_length: int | None = None
) -> ModelRunner | PlainRunner:
    """The runner of a model that is whole in this process; arguments as of `ModelRunner`."""
    if isinstance(model, PlainModel):
        return PlainRunner(model, num_blocks)
    return ModelRunner(model, num_blocks, context_length=context_length)


def decoded(piece: Piece, block_size: int) -> Sequence[int]:
    """The tokens of a piece that are no text of an encoder."""
    return piece.tokens[max(0, filled_blocks(piece.source, block_size) - piece.start) :]


def wanted_rows(pieces: Sequence[Piece], block_size: int) -> list[int]:
    """Of all new tokens in a row, those whose logits are wanted."""
    rows: list[int] = []
    end = 0
    for piece in pieces:
        end += len(decoded(piece, block_size))
        rows += range(end - piece.wanted, end)
    return rows


# --- several ranks ---

_FIRST_MESSAGE = 2048  # integers; the rest of a larger one follows
_CLOSE, _PING, _RUN = range(3)


def packed(batch: Batch) -> list[int]:
    """A batch as integers."""
    message = [len(batch.pieces), len(batch.copies)]
    for copy in batch.copies:
        message += copy
    for piece in batch.pieces:
        message += (len(piece.tokens), piece.start, len(piece.blocks), piece.wanted, piece.source)
        message += (*piece.tokens, *piece.blocks)
    return message


def unpacked(message: Sequence[int]) -> Batch:
    """The inverse of `packed`."""
    num_pieces, num_copies = message[:2]
    at = 2 + 2 * num_copies
    copies = [(message[i], message[i + 1]) for i in range(2, at, 2)]
    pieces = []
    for _ in range(num_pieces):
        num_tokens, start, num_blocks, wanted, source = message[at : at + 5]
        tokens = message[at + 5 : at + 5 + num_tokens]
        at += 5 + num_tokens + num_blocks
        pieces.append(Piece(tokens, start, message[at - num_blocks : at], wanted, source))
    return Batch(pieces, copies)


class RankRunner(ModelRunner):
    """A model over tensor-parallel ranks and pipeline stages. Rank 0 calls `run`, the others `follow`.

    Rank 0 tells all others what to read; each stage sends its hidden states to the next one, and the last sends the
    logits to rank 0.

    Raises:
        LayoutError: there are replicas of the model.
    """

    def __init__(
        self,
        model: GenerativeModel | PlainModel,
        context: ParallelContext,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        *,
        context_length: int | None = None,
    ) -> None:
        if context.world.size != context.tp.size * context.pp.size:
            raise LayoutError(
                f"{context.world.size} ranks are more than --tensor-model-parallel-size {context.tp.size} x "
                f"--pipeline-model-parallel-size {context.pp.size}: start that many processes; each replica of a model "
                "is served by a server of its own"
            )
        assert not isinstance(model, PlainModel), "a plain module is whole on one rank"
        super().__init__(model, num_blocks, block_size, context_length=context_length)
        self._context, self._closed = context, False

    def run(self, batch: Batch) -> Tensor:
        self._tell(_RUN, packed(batch))
        logits = self._guarded(batch)
        assert logits is not None, "rank 0 is in the first stage"
        return logits

    def ping(self) -> None:
        self._tell(_PING, [])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tell(_CLOSE, [])

    def follow(self) -> None:
        """Read what rank 0 says until it lets this rank go."""
        while True:
            command, message = self._hear()
            if command == _CLOSE:
                return
            if command == _RUN:
                self._guarded(unpacked(message))

    def _guarded(self, batch: Batch) -> Tensor | None:
        try:
            return self._run(batch)
        except RuntimeError as error:
            raise _gone(error) from error

    def _run(self, batch: Batch) -> Tensor | None:
        """This rank's part; the logits on rank 0."""
        model, context = self.model, self._context
        links, hidden = context.links, None
        if not model.stage.embeds:
            assert links is not None
            shape = (sum(len(piece.tokens) for piece in batch.pieces), 1, model.config.hidden_size)
            hidden = p2p.receive(links.from_previous, shape, model.dtype, context.device).wait()
        hidden = self.read(batch, hidden)
        if not model.stage.predicts:
            assert links is not None
            p2p.send(hidden, links.to_next).wait()
            return self._receive_logits(batch)
        logits = self.logits(hidden, batch)
        if context.ends is not None and context.tp.is_first and logits.shape[0]:
            comm.broadcast(logits.contiguous(), context.ends, source=1)
        return logits

    def _receive_logits(self, batch: Batch) -> Tensor | None:
        context, wanted = self._context, sum(piece.wanted for piece in batch.pieces)
        if context.ends is None or not context.tp.is_first:
            return None
        logits = torch.empty(wanted, self.vocab_size, dtype=self.model.dtype, device=context.device)
        return comm.broadcast(logits, context.ends, source=1) if wanted else logits

    def _tell(self, command: int, message: list[int]) -> None:
        first = [command, len(message), *message[:_FIRST_MESSAGE]]
        first += [0] * (2 + _FIRST_MESSAGE - len(first))
        self._broadcast(torch.tensor(first, device=self._context.device))
        if len(message) > _FIRST_MESSAGE:
            self._broadcast(torch.tensor(message[_FIRST_MESSAGE:], device=self._context.device))

    def _hear(self) -> tuple[int, list[int]]:
        first = torch.empty(2 + _FIRST_MESSAGE, dtype=torch.int64, device=self._context.device)
        command, length, *message = self._broadcast(first).tolist()
        if length > _FIRST_MESSAGE:
            message += self._broadcast(first.new_empty(length - _FIRST_MESSAGE)).tolist()
        return command, message[:length]

    def _broadcast(self, x: Tensor) -> Tensor:
        try:
            return comm.broadcast(x, self._context.world)
        except RuntimeError as error:
            raise _gone(error) from error


def _gone(error: RuntimeError) -> PeerError:
    # gloo puts the line of its source before what happened, and advice behind it.
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
    return DecoderPrompt(decoder_start_token(tokenizer), tokenizer.special.get("eos", tokenizer.eod))


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text for an encoder; <extra_id_N> stands for itself whatever the tokenizer makes of it.

    Raises `DataError` if the tokenizer has fewer of these tokens, or cannot encode the text.
    """
    sentinels = {f"<extra_id_{number}>": token for number, token in enumerate(tokenizer.extra_ids)}
    named = re.findall(r"<extra_id_\d+>", text)
    if unknown := [name for name in named if name not in sentinels]:
        shown = unknown[0] if len(unknown[0]) < 40 else f"{unknown[0][:30]}...>"
        raise DataError(f"has {shown}, and the tokenizer {len(sentinels)} tokens <extra_id_N>")
    if not named or sentinels[named[0]] in tokenizer.encode(named[0]):  # it knows them, and puts ends around the whole
        return tokenizer.encode(text)
    ids = list[int]()
    for part in re.split(r"(<extra_id_\d+>)", text):
        if part in sentinels:
            ids.append(sentinels[part])
        elif part.strip():
            ids += tokenizer.encode(part)
    return ids
