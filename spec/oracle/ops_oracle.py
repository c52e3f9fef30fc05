# SPDX-License-Identifier: BSD-3-Clause
"""Every row of ops.def, and the methods of tensors over them, against PyTorch."""
import torch

from oracle import Case, Row, lua, main


def binary(name, fn, exact):
    def draw(d):
        a, b = d.dtype(), d.dtype()
        shape = d.shape()
        return Case("x[1]:%s(x[2])" % name, lambda x, m: fn(x[0], x[1]),
                    [d.input(shape, a, True), d.input(shape, b, True)], exact={"out0"} if exact else False)
    return Row(name, draw, name)


ROWS = [binary("add", torch.add, True), binary("mul", torch.mul, True)]

if __name__ == "__main__":
    main("ops", ROWS, 5000)
