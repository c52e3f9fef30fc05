# SPDX-License-Identifier: BSD-3-Clause
"""The network of examples/moe.lua in PyTorch."""
import math

import torch
import torch.nn.functional as F

import torch_layout


class Expert(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(torch.nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.norm, self.router = torch.nn.LayerNorm(width), torch.nn.Linear(width, experts)
        self.experts = torch.nn.ModuleList([Expert(width) for _ in range(experts)])

    def forward(self, x):
        h, n, E = self.norm(x), len(x), len(self.experts)
        room = math.ceil(1.25 * n / E)
        gates = F.softmax(self.router(h), -1)
        gate, expert = gates.max(-1)
        chosen = F.one_hot(expert, E).float()
        place = (chosen.cumsum(0) * chosen).sum(-1).long() - 1
        slots = F.one_hot(place.clamp(0, room), room + 1)[:, :room].float()
        y = 0
        for e, one in enumerate(self.experts):
            send = chosen[:, e:e + 1] * slots
            y = y + send @ one(send.T @ h)
        return x + gate.unsqueeze(1) * y, E * (chosen.mean(0) * gates.mean(0)).sum()


class Net(torch.nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, width), torch.nn.Linear(width, 1)
        self.layers = torch.nn.ModuleList([Mixture(width, experts), Mixture(width, experts)])

    def forward(self, at, value):
        x, aux = (3 * self.first(at)).sin(), 0
        for layer in self.layers:
            x, more = layer(x)
            aux = aux + more
        return F.mse_loss(self.last(x), value) + 0.01 * aux


torch_layout.run(Net(32, 4), 3e-3)
