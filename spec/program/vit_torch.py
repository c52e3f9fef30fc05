# SPDX-License-Identifier: BSD-3-Clause
"""The network of examples/vit.lua in PyTorch."""
import torch
import torch.nn.functional as F

import torch_layout


class ViT(torch.nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        self.patches = torch.nn.Conv2d(1, width, 4, stride=4)
        self.register_parameter("class", torch.nn.Parameter(torch.zeros(1, 1, width)))
        self.places = torch.nn.Parameter(torch.zeros(1, 17, width))
        layer = torch.nn.TransformerEncoderLayer(width, heads, 2 * width, 0, "gelu", batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, torch.nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 10)

    def forward(self, image, digits):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([getattr(self, "class").expand(len(image), 1, x.shape[2]), x], 1) + self.places
        return F.cross_entropy(self.head(self.encoder(x)[:, 0]), digits)


torch_layout.run(ViT(32, 2, 4), 2e-3)
