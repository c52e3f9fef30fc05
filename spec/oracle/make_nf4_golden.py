# SPDX-License-Identifier: BSD-3-Clause
"""Writes spec/golden/nf4.safetensors: two small weights that bitsandbytes quantized to NF4, the second with double
quantization, in the tensors that transformers writes to a folder, and values that bitsandbytes computes from them.

    python spec/oracle/make_nf4_golden.py

`NAME.values` has every 32nd column of a weight's values: two values per block of 64. The metadata has the versions and
the quantization_config of transformers. Needs torch, transformers and bitsandbytes 0.50.2, on the CPU.
"""
import json
import os

import bitsandbytes as bnb
import torch
import transformers
from safetensors.torch import save_file

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "nf4.safetensors")
# One group of scales has 256 blocks; the second weight has 260.
WEIGHTS = {"single.weight": (6, 128, False), "double.weight": (130, 128, True)}


def main():
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, (rows, columns, double) in WEIGHTS.items():
        weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
        codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
        tensors[name] = codes
        for suffix, tensor in state.as_dict(packed=True).items():
            tensors[f"{name}.{suffix}"] = tensor.contiguous()
        tensors[name + ".values"] = bnb.functional.dequantize_4bit(codes, state)[:, ::32].contiguous()
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    save_file(tensors, PATH, {"format": "pt", "bitsandbytes": bnb.__version__, "torch": torch.__version__,
                              "transformers": transformers.__version__,
                              "quantization_config": json.dumps(how.to_dict(), sort_keys=True)})


if __name__ == "__main__":
    main()
