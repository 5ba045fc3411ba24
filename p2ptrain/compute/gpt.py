"""A small GPT: what comes next, for every place of a text at once.

::

    x   = tokens[text] + positions
    x   = x + attention(norm(x))          each block; a place sees itself and what came before
    x   = x + wide(norm(x))
    out = norm(x) @ tokens.T              the head is tied to the embedding

Norms stand before each branch (pre-norm), so that the residual stream runs from end to end and deep
models train without tricks. There are no biases in the matrices and no dropout: a character model
of this size sees each text about once. Weights start at a deviation of 0.02 as in GPT-2, those that
write into the residual stream at ``0.02 / sqrt(2 layers)``.

Legend of shapes: ``B`` texts, ``T`` places, ``H`` heads, ``D`` numbers of a head, ``W`` = H * D,
``V`` vocabulary.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVIATION = 0.02


class GPT(nn.Module):
    """``(B, T)`` symbols to ``(B, T, V)`` scores of what follows each; T is at most `context`."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self._initialise(DEVIATION / math.sqrt(2 * layers))

    def forward(self, text_BT: Tensor) -> Tensor:
        """Scores of what follows each place."""
        places_T = torch.arange(text_BT.shape[1], device=text_BT.device)
        x_BTW = self.tokens(text_BT) + self.positions(places_T)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return F.linear(self.norm(x_BTW), self.tokens.weight)

    def _initialise(self, into_stream: float) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(
                    weight, std=into_stream if name.endswith("out.weight") else DEVIATION
                )


class Block(nn.Module):
    """Causal self-attention, then a network of two layers at each place."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.wide_norm = nn.LayerNorm(width)
        self.wide_in = nn.Linear(width, 4 * width, bias=False)
        self.wide_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Add what the two branches have to say."""
        x_BTW = x_BTW + self.attention_out(self._attend(self.attention_norm(x_BTW)))
        wide = F.gelu(self.wide_in(self.wide_norm(x_BTW)), approximate="tanh")
        added: Tensor = x_BTW + self.wide_out(wide)
        return added

    def _attend(self, x_BTW: Tensor) -> Tensor:
        thrice = self.attention_in(x_BTW).unflatten(2, (3, self.heads, -1))
        queries, keys, values = thrice.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        heard_BHTD = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return heard_BHTD.transpose(1, 2).flatten(2)
