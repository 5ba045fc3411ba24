"""A small GPT learns to write Python, one character at a time.

The text is the running Python's own standard library (`compute/text.py`), or a file given by
`data`. A character is a byte: any text works, and the standard library is ASCII to 99.995 %. A
sample is one sequence; each peer has a contiguous piece of the text and draws sequences from it
that begin anywhere.

What the figures mean, in nats per character on held-out files: 5.55 knows nothing, 3.12 knows how
frequent each byte is, 2.4 has learned about pairs, below 2 words and indentation appear.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from p2ptrain.compute.gpt import GPT
from p2ptrain.compute.seeds import build_seeded, generator
from p2ptrain.compute.shards import piece_of
from p2ptrain.compute.tasks.base import Batch, Evaluation, Task, batches_of, judging, on_device_of
from p2ptrain.compute.text import Text, file_text, standard_library
from p2ptrain.errors import ConfigError

VOCABULARY = 256
"""Bytes."""

AT_ONCE = 8_192
"""Characters that are evaluated at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of `chargpt`. A block has about ``12 x width**2`` parameters."""

    layers: int = 4
    """Blocks. Too many for few samples: slow steps that learn little more."""

    heads: int = 4
    """Attention heads of a block; must divide `width`."""

    width: int = 128
    """Numbers that stand for one place. 4 layers of 128 have 0.85 million parameters, 6 of 384
    10.8 million, 14 of 768 100 million."""

    context: int = 128
    """Characters of a sequence. Too short: nothing to remember; a step costs more than in
    proportion to it."""

    shortest: int = 0
    """0: each sequence has `context` characters. Otherwise the length is drawn for each step and
    peer between this and `context`, uniformly in its logarithm (short ones are common, long ones
    rare, as in most data), so that steps are unequal by nature."""

    data: str = ""
    """A text file to learn instead of the standard library; its last twentieth is held out."""

    max_bytes: int = 32_000_000
    """Text beyond this is not read."""

    windows: int = 128
    """Held-out sequences of `context` characters, spread evenly. Too few: a noisy loss (0.03 nats
    at 128); too many: evaluations take the processor from the peers."""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "max_bytes", "windows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be 1 or more")
        if self.width % self.heads:
            raise ConfigError(f"width = {self.width} must be a multiple of heads = {self.heads}")
        if not 0 <= self.shortest <= self.context:
            raise ConfigError(
                f"shortest = {self.shortest} must be between 0 and context = {self.context}"
            )


def chargpt(config: Config) -> Task:
    """The task that `config` describes.

    Raises:
        ConfigError: if there is no text, or too little of it.
    """
    read = partial(file_text, config.data) if config.data else standard_library
    return CharGPT(config, read(config.max_bytes))


class CharGPT:
    """A `Task`: predict each next character of a text. Its accuracy is the share guessed right."""

    def __init__(self, config: Config, text: Text) -> None:
        needed = config.context + 1
        for part, length in (("training", len(text.train)), ("held-out", len(text.held_out))):
            if length < needed:
                raise ConfigError(
                    f"the {part} text has {length} characters and context = {config.context} needs "
                    f"{needed}; take more text or a shorter context"
                )
        self._config, self._text = config, text
        starts = torch.linspace(0, len(text.held_out) - needed, config.windows).long()
        self._held_out = _sequences(text.held_out, starts, config.context)

    def build_model(self, seed: int) -> nn.Module:
        """The GPT, initialised from the seed."""
        c = self._config
        return build_seeded(lambda: GPT(VOCABULARY, c.context, c.layers, c.heads, c.width), seed)

    def batches(self, rank: int, peers: int, batch_size: int, seed: int) -> Iterator[Batch]:
        """Sequences of one peer's piece of the text; those of a batch have the same length."""
        text, context = self._text.train, self._config.context
        piece = piece_of(len(text), rank, peers, seed)
        if len(piece) <= context:
            raise ConfigError(
                f"{peers} peers cannot share {len(text)} characters in pieces of more than "
                f"context = {context}; take more text or fewer peers"
            )
        return self._draw(
            text[piece.start : piece.stop], batch_size, generator("order", seed, peers, rank)
        )

    @property
    def samples(self) -> int:
        """Sequences of `context` characters, end to end."""
        return (len(self._text.train) - 1) // self._config.context

    def batch_of(self, indices: Sequence[int], seed: int) -> Batch:
        """These sequences, cut to one length, which follows from the seed and the first of them."""
        starts = torch.tensor(indices) * self._config.context
        length = self._length(generator("lengths", seed, *indices[:1]))
        return _sequences(self._text.train, starts, length)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy per character, in nats."""
        inputs, targets = on_device_of(model, batch)
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Mean cross-entropy and share of characters guessed right, on held-out sequences."""
        count, loss, right = self._held_out[1].numel(), 0.0, 0
        rows = max(1, AT_ONCE // self._config.context)
        with judging(model), torch.no_grad():
            for batch in batches_of(self._held_out, rows):
                inputs, targets = on_device_of(model, batch)
                scores, answers = model(inputs).flatten(0, 1), targets.flatten()
                loss += nn.functional.cross_entropy(scores, answers, reduction="sum").item()
                own = scores.gather(1, answers[:, None])[:, 0]
                right += int((own >= scores.amax(dim=1)).sum())  # argmax takes nine times as long
        return Evaluation(loss / count, right / count)

    def _draw(self, text: Tensor, batch_size: int, rng: torch.Generator) -> Iterator[Batch]:
        while True:
            length = self._length(rng)
            starts = torch.randint(len(text) - length, (batch_size,), generator=rng)
            yield _sequences(text, starts, length)

    def _length(self, rng: torch.Generator) -> int:
        shortest, longest = self._config.shortest, self._config.context
        if not shortest:
            return longest
        position = float(torch.rand((), generator=rng, dtype=torch.float64))
        # `longest + 1` is cut off below, so that `longest` itself is drawn as often as its share.
        drawn = math.exp(math.log(shortest) + position * math.log((longest + 1) / shortest))
        return min(longest, int(drawn))


def _sequences(text: Tensor, starts: Tensor, length: int) -> Batch:
    """Inputs ``(B, length)``, and targets: the same one place on."""
    both = text[starts[:, None] + torch.arange(length + 1)].long()
    return both[:, :-1], both[:, 1:]
