"""A byte-level decoder-only transformer, in plain PyTorch: it knows nothing of ranks or meshes.

RMSNorm, rotary embedding, causal attention and SwiGLU; no biases, no dropout. `train.py` trains it
in one process as it stands here, and on eight by giving its parameters a sharding and writing the two
`forward`s that mix them as expressions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


@dataclass(frozen=True)
class Size:
    """`width` is the size of the residual stream, `heads` split it, `sequence` is in bytes."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    sequence: int = 64

    @property
    def hidden(self) -> int:
        """SwiGLU has three matrices where an MLP has two: 8/3 of the width, up to a multiple of 32."""
        return math.ceil(8 * self.width / 3 / 32) * 32


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Heads(nn.Module):
    """Causal attention of as many heads as come in: each is independent of the others.

    Query, key and value are `batch sequence (heads head_dim)`, and so is the result.
    """

    def __init__(self, size: Size):
        super().__init__()
        self.head_dim = size.width // size.heads
        frequency = 10_000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angle = torch.outer(torch.arange(size.sequence), frequency)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def rotate(self, x: Tensor) -> Tensor:
        cosine, sine = self.cosine[: x.shape[-2]], self.sine[: x.shape[-2]]
        even, odd = x.chunk(2, dim=-1)
        return torch.cat((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = self.rotate(self.split(query)), self.rotate(self.split(key))
        mixed = F.scaled_dot_product_attention(query, key, self.split(value), is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.query = linear(size.width, size.width)
        self.key = linear(size.width, size.width)
        self.value = linear(size.width, size.width)
        self.heads = Heads(size)
        self.out = linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.heads(self.query(x), self.key(x), self.value(x)))


class MLP(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.gate = linear(size.width, size.hidden)
        self.up = linear(size.width, size.hidden)
        self.down = linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.mlp = MLP(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Tokens `batch sequence` to logits `batch sequence byte`.

    The same seed gives the same weights everywhere, however they are split afterwards.
    """

    Block = Block

    def __init__(self, size: Size, seed: int = 0):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(self.Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = linear(size.width, BYTES)
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            if weight.ndim == 2:
                small = weight is self.embedding.weight or weight is self.head.weight
                std = 0.02 if small else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def write(model: Transformer, prompt: bytes, length: int, sequence: int, seed: int = 0) -> str:
    """`prompt` and up to `length` bytes that the model adds to it, to the end of the line."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        tokens = torch.tensor([text[-sequence:]], device=device)
        weights = torch.softmax(model(tokens)[0, -1].float().cpu() / 0.7, dim=-1)
        byte = int(torch.multinomial(weights, 1, generator=generator))
        if byte == ord("\n"):
            break
        text.append(byte)
    line = bytes(text).decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() else "·" for char in line)
