# SPDX-License-Identifier: BSD-3-Clause
"""The network of examples/denoiser.lua in PyTorch."""
import torch
import torch.nn.functional as F

import torch_layout


class Denoiser(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Conv2d(2, width, 3, padding=1)
        self.norm1 = torch.nn.GroupNorm(4, width)
        self.down = torch.nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm2 = torch.nn.GroupNorm(4, 2 * width)
        self.middle = torch.nn.Conv2d(2 * width, width, 3, padding=1)
        self.up = torch.nn.Upsample(scale_factor=2)
        self.last = torch.nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, noisy, level, clean):
        x = F.silu(self.norm1(self.first(torch.cat([noisy, level.expand(noisy.shape)], 1))))
        y = F.silu(self.norm2(self.down(x)))
        y = self.last(torch.cat([x, self.up(F.silu(self.middle(y)))], 1))
        return F.mse_loss(y, clean)


torch_layout.run(Denoiser(16), 2e-3)
