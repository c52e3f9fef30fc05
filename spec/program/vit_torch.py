# SPDX-License-Identifier: BSD-3-Clause
"""The network of examples/vit.lua in PyTorch: trains from the weights and batches of a file (--trace) and prints the
losses of its steps."""
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


class ViT(torch.nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        self.patches = torch.nn.Conv2d(1, width, 4, stride=4)
        self.register_parameter("class", torch.nn.Parameter(torch.zeros(1, 1, width)))
        self.places = torch.nn.Parameter(torch.zeros(1, 17, width))
        layer = torch.nn.TransformerEncoderLayer(width, heads, 2 * width, 0, "gelu", batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, torch.nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 10)

    def forward(self, image, target):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([getattr(self, "class").expand(len(image), 1, x.shape[2]), x], 1) + self.places
        return F.cross_entropy(self.head(self.encoder(x)[:, 0]), target)


trace = load_file(sys.argv[1])
model = ViT(32, 2, 4)
model.load_state_dict({name: t for name, t in trace.items() if not name[0].isdigit()})
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
step = 1
while "%d.image" % step in trace:
    optimizer.zero_grad()
    loss = model(trace["%d.image" % step], trace["%d.digits" % step])
    loss.backward()
    optimizer.step()
    print("step %d  loss %.9f" % (step, loss.item()))
    step += 1
