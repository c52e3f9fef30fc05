# SPDX-License-Identifier: BSD-3-Clause
"""The network of examples/seq2seq.lua in PyTorch."""
import torch
import torch.nn.functional as F

import torch_layout

LENGTH = 8


class Sorter(torch.nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        options = dict(dim_feedforward=2 * width, dropout=0, batch_first=True, norm_first=True)
        self.places = torch.nn.Parameter(torch.zeros(LENGTH, width))
        self.embed, self.norm = torch.nn.Embedding(11, width), torch.nn.LayerNorm(width)
        self.encoder = torch.nn.ModuleList([torch.nn.TransformerEncoderLayer(width, heads, **options)
                                            for _ in range(layers)])
        self.decoder = torch.nn.ModuleList([torch.nn.TransformerDecoderLayer(width, heads, **options)
                                            for _ in range(layers)])

    def forward(self, into, to, **given):
        memory, x = self.embed(given["from"]) + self.places, self.embed(into) + self.places
        for layer in self.encoder:
            memory = layer(memory)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy((self.norm(x) @ self.embed.weight.T).flatten(0, 1), to.flatten())


torch_layout.run(Sorter(32, 2, 4), 2e-3)
