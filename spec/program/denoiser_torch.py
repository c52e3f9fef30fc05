# SPDX-License-Identifier: BSD-3-Clause
"""The network of examples/denoiser.lua in PyTorch: trains from the weights and batches of a file (--trace) and prints the
losses of its steps."""
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

WIDTH = 16


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


trace = load_file(sys.argv[1])
model = Denoiser(WIDTH)
model.load_state_dict({name: t for name, t in trace.items() if not name[0].isdigit()})
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
step = 1
while "%d.clean" % step in trace:
    optimizer.zero_grad()
    loss = model(*(trace["%d.%s" % (step, name)] for name in ("noisy", "level", "clean")))
    loss.backward()
    optimizer.step()
    print("step %d  loss %.9f" % (step, loss.item()))
    step += 1
