# SPDX-License-Identifier: BSD-3-Clause
"""The network of examples/gpt.lua in PyTorch."""
import torch
import torch.nn.functional as F

import torch_layout

LENGTH = 10


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width) for _ in range(4))
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x, cos, sin):
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(10, width), torch.nn.LayerNorm(width)
        self.blocks = torch.nn.ModuleList([Block(width, heads) for _ in range(layers)])
        rates = 10000.0 ** (-torch.arange(0, width // heads, 2) * heads / width)
        angles = torch.arange(LENGTH).float()[:, None] * rates
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, to, **given):
        x = self.embed(given["from"])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy((self.norm(x) @ self.embed.weight.T).flatten(0, 1), to.flatten())


torch_layout.run(GPT(32, 2, 4), 3e-3)
