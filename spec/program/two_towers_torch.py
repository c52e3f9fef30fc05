# SPDX-License-Identifier: BSD-3-Clause
"""The network of examples/two_towers.lua in PyTorch."""
import torch
import torch.nn.functional as F

import torch_layout


class Tower(torch.nn.Module):
    def __init__(self, inputs, hidden, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(inputs, hidden), torch.nn.Linear(hidden, width)

    def forward(self, x):
        return F.normalize(self.down(F.gelu(self.up(x))), dim=-1)


class Towers(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([2.0]))
        self.image = Tower(16 * 32, 4 * width, width)
        self.table = torch.nn.Embedding(20, width)
        self.text = Tower(2 * width, 4 * width, width)

    def forward(self, image, text):
        text = self.text(self.table(text + torch.tensor([[0, 10]])).flatten(1))
        logits = self.image(image.flatten(1)) @ text.T * self.scale.exp()
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


torch_layout.run(Towers(32), 2e-3)
