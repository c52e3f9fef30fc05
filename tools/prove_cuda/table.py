# SPDX-License-Identifier: BSD-3-Clause
"""The properties that are proved for each kernel. A row has a kernel, a launch as in the host code, and the operands'
shapes.

A parameter is a number, the name of an object in device memory, None (a null pointer), or a Struct with such fields.
Two parameters with the same name share their memory; such rows prove that an op works in place. The integers in an
object can be given: if an index determines which element is written, the proof needs it.
"""
import math
import re

from layout import Struct

F32, BF16, F16, F64, I32, I64, U8, BOOL = range(8)
PROVED, UNDECIDED, REFUSED = "proved", "undecided", "refused"
PLANTS = "plants"                                    # the sample checks only a row's planted errors (see Row.quick)
# Files with barriers whose kernels are not proved, so that removing a barrier would not be detected.
NO_PLANTS = ("attention_hopper", "random")


class Row:
    """One kernel and one launch. values: {object: (type, its integers)}. branches: only one side of each
    data-dependent branch is followed. outcome: the prover's result when the row was written. why: for undecided and
    refused rows. quick: part of the sample. PLANTS: without its proof, which takes a minute. plants: indices of the
    kernel's synchronization instructions without which the proof must fail. redundant: those without which the
    kernel is still proved. seconds: processor seconds after which the row is undecided."""

    def __init__(self, source, kernel, shape, grid, block, args, shared=0, branches=False, outcome=PROVED, why="",
                 quick=False, plants=(), redundant=(), seconds=300, values=None):
        self.source, self.kernel, self.shape = source, kernel, shape
        self.grid = tuple(grid) + (1,) * (3 - len(grid)) if isinstance(grid, (tuple, list)) else (grid, 1, 1)
        self.block, self.args, self.branches = block, args, branches
        self.shared = shared or dynamic_shared(source, kernel)
        self.outcome, self.why, self.quick = outcome, why, quick
        self.plants, self.redundant, self.seconds, self.values = plants, redundant, seconds, values or {}

    def __str__(self):
        return f"{self.source} {self.kernel}: {self.shape}"


def places(size, *strides):
    return Struct("places", len(strides), ndim=len(size), numel=math.prod(size), size=size, stride=strides)


def rows_of_add_up():
    yield Row("add_up", "add_up<bf16>", "3 ranks, 5001 elements", 2, 256,
              [Struct("addends", at=["a", "b", "c"]), 3, 625, 5001, "to"], quick=True)
    yield Row("add_up", "add_up<float>", "2 ranks, into the memory of the first, 1030 elements", 2, 256,
              [Struct("addends", at=["a", "b"]), 2, 257, 1030, "a"])


def rows_of_rope():
    def call(y):
        return Struct("rope_call", x="x", cos="cos", sin="sin", y=y, B=2, H=3, T=5, D=20, half=8,
                      x_b=300, x_h=20, x_t=60, y_b=300, y_h=20, y_t=60, c_t=8, s_t=8)
    yield Row("rope", "rope_kernel<bf16>", "2 x 3 heads, T 5, D 20, 16 of them turned", 2, 256, [call("y")], quick=True)
    yield Row("rope", "rope_kernel<float>", "the same in place", 2, 256, [call("x")])
    packs = dict(D=32, half=16, x_b=480, x_h=32, x_t=96, y_b=480, y_h=32, y_t=96, c_t=16, s_t=16)
    yield Row("rope", "rope_packs_kernel<bf16>", "2 x 3 heads, T 5, D 32", 1, 256,
              [Struct("rope_call", **{**call("y"), **packs})])
    yield Row("rope", "rope_packs_kernel<float>", "the same in place", 1, 256,
              [Struct("rope_call", **{**call("x"), **packs})])


def rows_of_conv():
    def call(**more):
        shape = Struct("ps_conv_shape", c=4, o=6, groups=2, out=[3, 6], k=[3, 2], stride=[2, 1], dilation=[1, 1],
                       before=[1, 1], **{"in": [5, 6]})
        shape["n"] = 2                                  # as an argument of Struct it would be mistaken for a template's
        return Struct("conv_call", **{**dict(s=shape, x="x", w="w", y="y", bias="bias", out="out", bias_dtype=F32,
                                             dw_dtype=BF16, db_dtype=BF16), **more})
    yield Row("conv", "conv_kernel<bf16>", "2 x 4 x 5 x 6 in 2 groups to 2 x 6 x 3 x 6", 1, 256, [call()])
    yield Row("conv", "conv_transpose_kernel<bf16>", "2 x 6 x 3 x 6 in 2 groups to 2 x 4 x 5 x 6", 1, 256, [call()])
    small = Struct("ps_conv_shape", c=2, o=2, groups=2, out=[2, 3], k=[1, 2], stride=[1, 1], dilation=[1, 1],
                   **{"in": [2, 4]})
    small["n"] = 3
    yield Row("conv", "conv_weight_kernel<bf16>", "2 x 1 x 1 x 2 and a bias, from 3 x 2 x 3 places", 3, 128,
              [call(s=small, out_b="db", bias=None)], quick=True, plants=(0, 1))


def rows_of_image():
    pad = Struct("pad_call", x="x", y="y", ndim=2, dtype=F32, numel=6 * 9, out=[6, 9], before=[1, 2],
                 **{"in": [4, 5]})
    yield Row("image", "pad_kernel<unsigned int>", "4 x 5 to 6 x 9", 1, 256, [pad])
    def resample(transpose, size, given):
        return Struct("resample_call", a=Struct("ps_attrs_resample", kind=0, transpose=transpose, size=[2, 3],
                                                kernel=[2, 2], stride=[2, 2]),
                      x="x", y="y", numel=2 * given[0] * given[1], out=given, **{"in": size})
    yield Row("image", "resample_kernel<float>", "means of 2 x 2 windows of 2 x 4 x 6", 1, 256,
              [resample(0, [4, 6], [2, 3])])
    yield Row("image", "resample_back_kernel<float>", "the gradient of 2 x 2 means of 2 x 4 x 6", 1, 256,
              [resample(1, [2, 3], [4, 6])],
              outcome=REFUSED, why="an element whose weight is 0 is skipped by a comparison of doubles")
    def pool(numel):
        return Struct("pool_call", a=Struct("ps_attrs_max_pool", kernel=[2, 2], stride=[2, 2], dilation=[1, 1],
                                            size=[2, 3]),
                      x="x", y="y", index="index", numel=numel, out=[2, 3], **{"in": [4, 6]})
    yield Row("image", "max_pool_kernel<float>", "2 x 2 windows of 2 x 4 x 6", 1, 256, [pool(12)], branches=True)
    yield Row("image", "max_pool_back_kernel<float>", "the gradient of 2 x 2 windows of 2 x 4 x 6", 1, 256,
              [pool(48)], branches=True)


def rows_of_channel_norm():
    def call(**more):
        return Struct("norm_call", **{**dict(x="x", dy="dy", w="w", b="b", mean="mean", var="var", y="y",
                                             mean_out="m", var_out="v", dx="dx", dw="dw", db="db", N=3, C=4, S=50,
                                             sets=4, count=150, w_dtype=F32, b_dtype=F32, dw_dtype=F32,
                                             eps=1e-5), **more})
    yield Row("channel_norm", "channel_norm_kernel<float>", "4 channels of 3 x 50", 2, 128, [call()], quick=True,
              plants=(0, 1))
    yield Row("channel_norm", "channel_norm_dx_kernel<float>", "4 channels of 3 x 50", 2, 128, [call()])
    yield Row("channel_norm", "channel_norm_dw_kernel<float>", "4 channels of 3 x 50", 2, 128, [call()])


def rows_of_gemm():
    def product(batch, residual=None, **more):
        def mat(data, rows, cols):
            return Struct("ps_cu_mat", data=data, rows=rows, cols=cols, stride_row=cols, stride_col=1, **more)
        return Struct("ps_cu_gemm", a=mat("a", 17, 20), b=mat("b", 20, 16), dst=mat("c", 17, 16), batch=batch,
                      step_a=340, step_b=320, step_dst=272, accumulate=1, bias="bias", bias_dtype=F32,
                      residual=residual, ld_residual=16)
    yield Row("gemm", "plain_kernel<float>", "17 x 16 x 20, batch of 2, accumulating", 2, 256, [product(2)],
              quick=True, plants=(0, 1))
    yield Row("gemm", "plain_kernel<double>", "17 x 16 x 20, the residual in dst's memory", 2, 256,
              [product(1, "c", dtype=F64)])


def rows_of_reduce():
    def target(y="y", parts=None, y_type=F32, op=0):
        return Struct("target", parts=parts, y=y, y_type=y_type, op=op, divide=1.0)
    kept, reduced = places([8], [1000]), places([1000], [1])
    yield Row("reduce", "together_kernel<double>", "8 sums of 1000, two of them a block", 4, 256,
              [target(), "x", F32, kept, reduced], quick=True, plants=(0, 1))
    yield Row("reduce", "together_kernel<double>", "2 sums of 3000 in 3 parts", (2, 3), 256,
              [target(parts="parts"), "x", BF16, places([2], [3000]), places([3000], [1])])
    yield Row("reduce", "together_kernel<long>", "3 largest of 77", 3, 32,
              [target(y_type=I64, op=1), "x", I64, places([3], [77]), places([77], [1])], branches=True)
    yield Row("reduce", "apart_kernel<double>", "300 sums of 40 in 2 parts", (2, 2), 256,
              [target(parts="parts"), "x", F32, places([300], [1]), places([40], [300])])
    yield Row("reduce", "apart_kernel<long>", "300 sums of 20", 2, 256,
              [target(y_type=I64), "x", I32, places([300], [1]), places([20], [300])])
    yield Row("reduce", "columns_kernel<bf16>", "264 columns of 37 rows in 2 parts", (1, 2), 512,
              [target(parts="parts"), "x", 264, 37, 264])
    yield Row("reduce", "columns_kernel<float>", "132 columns of 20 rows, 136 apart", 1, 512,
              [target(), "x", 132, 20, 136])
    yield Row("reduce", "combine_kernel<double>", "300 sums of 3 parts", 2, 256,
              [target(parts="parts"), 300, 3], quick=True)
    yield Row("reduce", "combine_kernel<long>", "300 sums of 3 parts", 2, 256,
              [target(parts="parts", y_type=I64), 300, 3])
    yield Row("reduce", "arg_kernel<double>", "5 rows of 300", 3, 256,
              [1, "y", "x", F32, places([5], [300]), 300, 1], branches=True)
    yield Row("reduce", "cumsum_kernel<double>", "2 x 37 lanes of 11, in reverse", 1, 256,
              ["y", F32, "x", F32, places([2, 37], [407, 1], [407, 1]), 11, 37, 37, 1])
    yield Row("reduce", "cumsum_kernel<long>", "37 lanes of 11, in place", 1, 256,
              ["x", I64, "x", I64, places([37], [1], [1]), 11, 37, 37, 0])
    yield Row("reduce", "cumprod_kernel<double>", "2 x 37 lanes of 11", 1, 256, ["y", F32, "x", F32, 74, 11, 37])
    yield Row("reduce", "cumprod_kernel<long>", "37 lanes of 11, in place", 1, 256, ["x", I64, "x", I64, 37, 11, 37])
    yield Row("reduce", "cumprod_backward_kernel", "2 x 37 lanes of 11", 1, 256,
              ["dx", "x", "dy", "later", F32, 74, 11, 37])
    yield Row("reduce", "topk_kernel<double>", "3 rows of 300, the 2 largest", 2, 256,
              ["values", "indices", "x", F32, places([3, 300], [300, 1]), 3, 300, 2], branches=True)


def rows_of_rows():
    targets = {"target": ("u64", [17, 300, 5]), "count": ("u64", [2])}
    def ce(V, wide, grad="grad", **more):
        return Struct("ps_cu_ce", **{**dict(
            logits="x", dtype=BF16, rows=2, V=V, ld=wide, wide=wide, target="target", target_dtype=I64, ignore=-100,
            grad=grad, grad_dtype=BF16, scale=1.0, count="count", dloss="dloss", loss="loss", lse="lse"), **more})
    def words(**more):
        return Struct("some_words", **{**dict(
            logits="x", target="target", mass=None, target_dtype=I64, ranks=2, kinds=3, rows=3, V=300, first=100,
            words=299, next=3, stats="stats", share="share", dloss=1.0, loss="loss", grad="grad"), **more})
    yield Row("rows", "total_kernel<float>", "1000 losses", 1, 256, ["loss", 1000, None, "out", F32], quick=True,
              plants=(1,), redundant=(0,))
    yield Row("rows", "total_kernel<double>", "1000 losses, divided by a count", 1, 1024,
              ["loss", 1000, "count", "out", F64], values={"count": ("u64", [900])})
    yield Row("rows", "softmax_kernel<bf16>", "3 rows of 264", 2, 128, ["y", "x", 3, 264, 0], quick=True,
              plants=(1, 3), redundant=(0, 2))
    yield Row("rows", "softmax_kernel<bf16>", "5 rows of 77, in place", 3, 32, ["x", "x", 5, 77, 1])
    yield Row("rows", "softmax_kernel<double>", "3 rows of 131", 2, 128, ["y", "x", 3, 131, 0], branches=True)
    yield Row("rows", "softmax_backward_kernel<bf16>", "3 rows of 264", 2, 128, ["dx", "y", "dy", 3, 264, 0])
    yield Row("rows", "softmax_backward_kernel<float>", "5 rows of 77, dx in dy's memory", 3, 32,
              ["dy", "y", "dy", 5, 77, 1])
    yield Row("rows", "count_kernel", "3000 targets", 1, 1024,
              [Struct("trap_to", out="trap", taken="taken"), 5, "target", I64, 3000, 50257, -100, "count"],
              values={"target": ("u64", [i * 31 % 50257 for i in range(3000)])})
    yield Row("rows", "ce_kernel<bf16, bf16>", "losses of 2 rows of 1001, 1024 apart", 1, 128, [ce(1001, 1024, None)],
              values=targets, branches=True)
    yield Row("rows", "ce_kernel<bf16, bf16>", "the gradient in the logits' memory", 1, 128, [ce(1001, 1024, "x")],
              values=targets, branches=True, outcome=REFUSED,
              why="the gradient's alignment comes from a pointer with two sources, which the rewrite does not follow")
    yield Row("rows", "ce_kept_kernel<bf16, bf16>", "2 rows of 2000", 1, 1024, [ce(2000, 2000), 250], shared=4000,
              values=targets, branches=True)
    yield Row("rows", "logit_stats_kernel<bf16>", "3 rows of 300, 299 words", 2, 128, [words()],
              values=targets, branches=True)
    yield Row("rows", "logit_stats_kernel<float>", "3 rows of 300, with a mass", 2, 128, [words(mass="mass", kinds=4)],
              values=targets, branches=True)
    yield Row("rows", "logit_loss_kernel<bf16>", "3 rows of 300, 2 ranks", 2, 128, [words()],
              values=targets, branches=True)
    yield Row("rows", "logit_loss_kernel<float>", "the gradient in the logits' memory", 2, 128, [words(grad="x")],
              values=targets, branches=True)


def rows_of_copy():
    yield Row("copy", "move_kernel<unsigned int>", "transposing 17 x 33", 3, 256,
              ["y", "x", places([17, 33], [1, 17], [33, 1])], quick=True)
    yield Row("copy", "move_kernel<unsigned char>", "rows of 77, 80 apart", 2, 256,
              ["y", "x", places([5, 77], [77, 1], [80, 1])])
    yield Row("copy", "convert_kernel", "int32 to bf16, 17 x 33 transposed", 3, 256,
              ["y", BF16, "x", I32, places([17, 33], [1, 17], [33, 1])])
    yield Row("copy", "convert_flat<bf16, float>", "3001 elements", 2, 256, ["y", "x", 3001])
    yield Row("copy", "convert_flat<float, f16>", "3001 elements", 2, 256, ["y", "x", 3001])
    order = Struct("order_call", x="x", y="y", ndim=3, upper=1, dims=5, numel=2 * 17 * 9, shape=[2, 17, 9], diagonal=-2)
    yield Row("copy", "flip_kernel<unsigned int>", "2 x 17 x 9, dimensions 0 and 2", 2, 256, [order])
    yield Row("copy", "triangle_kernel<unsigned int>", "2 x 17 x 9, from the second diagonal below on", 2, 256, [order])
    yield Row("copy", "fill_kernel", "fp16, rows of 77, 80 apart", 2, 256, ["x", F16, 1.5, places([5, 77], [80, 1])])
    yield Row("copy", "arange_kernel", "int64, 1000", 4, 256, ["x", I64, 1000, 3.0, 2.0, 1], branches=True)


def rows_of_elementwise():
    zero = Struct("settings")
    def operands(y, b="b", **more):
        return Struct("operands", y=y, a="a", b=b, **more)
    x = places([17, 33], [1, 17], [33, 1], [0, 1])
    yield Row("elementwise", "flat_kernel<float, -1>", "op mul, in place, 3001", 2, 256,
              ["mul", zero, "x", "x", "b", 3001], quick=True)
    yield Row("elementwise", "flat_kernel<bf16, gelu>", "9001", 2, 256, ["gelu", zero, "y", "x", None, 9001],
              branches=True)
    yield Row("elementwise", "flat_kernel<bf16, add>", "9001, into b's memory", 2, 256,
              ["add", zero, "b", "x", "b", 9001])
    yield Row("elementwise", "any_kernel<float>", "op add, 17 x 33 transposed, b broadcast", 3, 256,
              ["add", zero, operands("y"), x])
    yield Row("elementwise", "any_kernel<long>", "op sub of int32, 17 x 33", 3, 256,
              ["sub", zero, operands("y", y_type=I32, a_type=I32, b_type=I32), x])
    yield Row("elementwise", "any_kernel<double>", "op div of fp64, 17 x 33", 3, 256,
              ["div", zero, operands("y", y_type=F64, a_type=F64, b_type=F64), x])
    yield Row("elementwise", "act_mul_backward_kernel<bf16>", "3001", 2, 256,
              [0, "x", "up", "dy", "dx", "dup", 3001, 1], branches=True)
    yield Row("elementwise", "scale_by_kernel<bf16>", "3001", 2, 256, ["x", 3001, 1, 1.0, "by", F32], branches=True)
    for dtype, T in ((BF16, "bf16"), (F32, "float")):
        yield Row("elementwise", f"slope_columns_kernel<{T}>", "37 rows of 40, the gradient in dy's memory", 1, 512,
                  [Struct("target", y="db", y_type=dtype, divide=1.0), "pre", "dy", 40, 37], quick=True, plants=(0,))
    yield Row("elementwise", "where_kernel", "fp32, 17 x 33", 3, 256,
              [operands("y"), "cond", BOOL, places([17, 33], [1, 17], [33, 1], [33, 1], [0, 1])],
              branches=True, outcome=UNDECIDED,
              why="a value selects the operand whose address is used, which the prover does not follow")


def rows_of_norm():
    def weights(p, dtype=F32):
        return Struct("weights", p=p, dtype=dtype)
    yield Row("norm", "norm_slices_kernel<bf16, false, 256, 4>", "9 rows of 512", 2, 64,
              ["y", "x", "w", "b", "mean", "rstd", 9, 512, 1e-5], plants=(0, 1, 2, 3))
    yield Row("norm", "norm_slices_kernel<bf16, true, 256, 4>", "rms, 9 rows of 512, in place", 2, 64,
              ["x", "x", "w", None, None, "rstd", 9, 512, 1e-5])
    yield Row("norm", "norm_kernel<bf16, false>", "3 rows of 520", 2, 128,
              ["y", "x", weights("w"), weights("b"), "mean", "rstd", 3, 520, 1e-5])
    yield Row("norm", "norm_kernel<float, true>", "rms, 5 rows of 77", 2, 32,
              ["y", "x", weights("w"), weights(None), None, "rstd", 5, 77, 1e-5])
    back = ["w", "mean", "rstd"]
    for dx, said in (("dx", ""), ("dy", ", dx in dy's memory"), ("add", ", dx in add's memory")):
        yield Row("norm", "slices_backward_kernel<bf16, false, 256, 4>", "9 rows of 512" + said, 2, 64,
                  [dx, "dy", "x"] + back + ["add", "parts", 9, 512], plants=(0, 1) if not said else ())
    for C, dx, said in ((520, "dx", ""), (520, "dy", ", dx in dy's memory"), (77, "dx", "")):
        yield Row("norm", "dx_kernel<bf16, false>", f"3 rows of {C}{said}", 2, 128 if C > 128 else 32,
                  [dx, "dy", "x", weights("w"), "mean", "rstd", None, 3, C],
                  plants=(0, 1, 2, 3) if dx == "dx" and C > 128 else ())
    yield Row("norm", "dw_kernel<bf16, false>", "37 rows of 40, 2 parts", (2, 2), 256,
              ["parts", "dy", "x", "mean", "rstd", 37, 40], quick=True, plants=(0,))
    yield Row("norm", "dw_total_kernel<float>", "33 parts of 20", (1, 2), 1024,
              ["dw", BF16, "db", F32, "parts", 33, 20],
              quick=True, plants=(0,))


def optim_work(kernel_types, param="param", unit=1024, states=2):
    """Two tensors of 1500 and 1027 elements, as in optim.h. kernel_types: of parameter, gradient and master."""
    p, g, m = kernel_types
    state = ["m", "v"][:states] if states < 4 else ["m", "m_scale", "v", "v_scale"]
    one = dict(param=param, master="master", grad="grad", state=state, numel=1500, first_unit=0, param_type=p,
               grad_type=g, master_type=m, aligned=1)
    two = dict(one, param=param and param + "2", master="master2", grad="grad2", state=[name + "2" for name in state],
               numel=1027, first_unit=-(-1500 // unit))
    return Struct("work", n=2, units=-(-1500 // unit) - (-1027 // unit), it=[one, two])


def rows_of_optim():
    work = optim_work
    h = Struct("adam_constants", scale=1.0, keep=1.0, b1=.9, b2=.99, omb1=.1, omb2=.01, inv=1.0, eps=1e-8, step=.1)
    adam = Struct("ps_attrs_adam_", lr=.1, beta1=.9, beta2=.99, eps=1e-8, grad_scale=1.0, bias1=.5, bias2=.5)
    sgd = Struct("ps_attrs_sgd_", lr=.1, momentum=.9, grad_scale=1.0)
    yield Row("optim", "adam_kernel<bf16, bf16>", "two tensors, 1500 and 1027", 2, 256, [h, work((BF16, BF16, F32))],
              quick=True)
    yield Row("optim", "adam_kernel<float, float>", "parameters that are their masters", 2, 256,
              [h, work((F32, F32, F32), "master")])
    yield Row("optim", "adam_kernel<bf16, remainders>", "two tensors, masters as remainders", 2, 256,
              [h, work((BF16, BF16, U8))])
    yield Row("optim", "adam_any_kernel", "bf16 gradients, fp32 parameters", 2, 256, [h, adam, work((F32, BF16, F32))])
    yield Row("optim", "adam_any_kernel", "fp64", 2, 256, [h, adam, work((F64, F64, F64))], branches=True)
    yield Row("optim", "sgd_kernel", "two tensors, fp32, momentum", 2, 256, [sgd, work((F32, F32, F32))], branches=True)
    squares = [dict(src="a", dst="b", numel=1100, first_unit=0, src_type=F32, dst_type=BF16),
               dict(src="c", dst=None, numel=100, first_unit=1, src_type=BF16, dst_type=BF16)]
    work_of_squares = Struct("squares_work", n=2, units=2, it=squares)
    yield Row("optim", "squares_kernel", "two tensors, one stored as bf16", 1, 256, ["parts", work_of_squares],
              quick=True, plants=(0, 1))
    yield Row("optim", "squares_total_kernel", "two tensors", 2, 256, ["out", "parts", work_of_squares], plants=(1,),
              redundant=(0,))


def rows_of_update():
    lion = Struct("lion_rule", scale=1.0, keep=1.0, b1=.9, b2=.99, c1=.1, c2=.01, lr=.1)
    yield Row("update", "rule_kernel<lion_rule>", "two tensors, bf16 with fp32 masters", 2, 256,
              [lion, optim_work((BF16, BF16, F32), states=1)], branches=True)
    rmsprop = Struct("rmsprop_rule", scale=1.0, alpha=.9, rest=.1, eps=1e-8, momentum=.9, lr=.1)
    yield Row("update", "rule_kernel<rmsprop_rule>", "two tensors, masters as remainders", 2, 256,
              [rmsprop, optim_work((BF16, BF16, U8))], branches=True)
    free = Struct("schedule_free_rule", scale=1.0, b2=.99, c2=.01, inv=1.0, eps=1e-8, lr=.1, average=.1, toward=-.1)
    yield Row("update", "rule_kernel<schedule_free_rule>", "two tensors, fp32 that are their masters", 2, 256,
              [free, optim_work((F32, F32, F32), "master")], branches=True)
    yield Row("update", "rule_kernel<lerp_rule>", "two tensors, bf16 with fp32 masters", 2, 256,
              [Struct("lerp_rule", weight=.3, near_master=1), optim_work((BF16, F32, F32), states=0)], branches=True)
    adamw = Struct("adamw_constants", scale=1.0, keep=1.0, b1=.9, b2=.99, c1=.1, c2=.01, inv=1.0, eps=1e-8, step=.1,
                   seed=7, t=3)
    yield Row("update", "adam_bf16_kernel", "two tensors, 1500 and 1027", 2, 256,
              [adamw, optim_work((BF16, BF16, F32))], quick=True, branches=True)
    codes = Struct("code_tables")
    for master, shape in ((F32, "300 elements"), (U8, "300 elements, masters as remainders")):
        one = optim_work((BF16, BF16, master), unit=256, states=4)
        one["n"], one["units"], one["it"] = 1, 2, [dict(one["it"][0], numel=300)]
        yield Row("update", "adam8bit_kernel", shape, 1, 64, [adamw, codes, one], branches=True, quick=True,
                  plants=(1,))
    yield Row("update", "remainder_split_kernel", "two tensors", 2, 256, [optim_work((BF16, F32, U8), states=0)],
              branches=True)
    yield Row("update", "remainder_join_kernel", "1000", 2, 256, ["y", "w", "low", 1000])


def rows_of_whole():
    one = optim_work((BF16, BF16, F32))["it"][0]
    it = Struct("item", **one)
    h = Struct("lamb_constants", scale=1.0, b1=.9, b2=.99, c1=.1, c2=.01, inv1=1.0, inv2=1.0, eps=1e-8, wd=.1, lr=.1,
               adapt=1)
    yield Row("whole", "in_order_kernel", "300 terms", 1, 256, ["out", "x", 300], quick=True, plants=(0, 1))
    yield Row("whole", "lamb_sums_kernel<float>", "600 elements", 1, 256,
              [h, Struct("item", **dict(one, numel=600)), "sums", 1], branches=True, quick=True, plants=(0, 1))
    yield Row("whole", "lamb_kernel<float>", "1500 elements", 2, 256, [h, it, "totals"], branches=True)

    def factored(**more):
        return Struct("factored", **dict(dict(it=Struct("item", **dict(one, numel=900)), batch=1, R=3, C=300, matrix=1,
                                              scale=1.0, eps1=1e-7, keep=.9, take=.1, by_row="by_row",
                                              row_mean="row_mean"), **more))
    adafactor = Struct("ps_attrs_adafactor_", grad_scale=1.0, t=3, lr=.01, beta2_decay=-.8, eps1=1e-7, eps2=1e-3, d=1.0)
    yield Row("whole", "row_squares_kernel<float, 0>", "3 rows of 300, of the master", 2, 256, [factored()],
              branches=True)
    yield Row("whole", "row_squares_kernel<float, 1>", "3 rows of 300, of the update", 2, 256, [factored()],
              branches=True)
    yield Row("whole", "row_averages_kernel<float>", "3 rows of 300", 2, 256, [factored()], branches=True, plants=(0,))
    yield Row("whole", "column_averages_kernel<float>", "300 columns of 3", 2, 256, [factored()], branches=True)
    yield Row("whole", "row_mean_kernel<float>", "300 rows", 1, 256, [factored(R=300, C=3)])
    yield Row("whole", "adafactor_kernel<float>", "3 rows of 300", 2, 256, [factored(), adafactor, "totals"],
              branches=True)


def rows_of_packed():
    q4_k = Struct("packed_type", type=12, block=256, bytes=144)
    part = Struct("packed_part", t=q4_k, w="w", rows=3, row_nbytes=288, per_row=64)
    yield Row("packed", "unpack_kernel<bf16>", "3 rows of 2 blocks of Q4_K", 1, 256, ["y", part], quick=True,
              branches=True)
    double = Struct("packed_type", type=257, block=64, bytes=33)
    part = Struct("packed_part", t=double, w="w", rows=3, row_nbytes=66, per_row=16, scales="scales", first=250,
                  row_blocks=2)
    yield Row("packed", "unpack_kernel<bf16>", "3 rows of 2 blocks of NF4_DOUBLE", 1, 256, ["y", part], branches=True)
    q8_0 = Struct("packed_type", type=8, block=32, bytes=34)
    part = Struct("packed_part", t=q8_0, w="w", rows=5, row_nbytes=68, per_row=8)
    few = Struct("few_call", w=part, x="x", y="y", bias="bias", residual="residual", bias_dtype=F32, M=3)
    few["N"], few["K"] = 5, 64
    yield Row("packed", "few_rows_kernel<bf16, bf16>", "3 rows of 64 and 5 rows of Q8_0", 1, 256, [few], branches=True)
    yield Row("packed", "pack_kernel<bf16>", "6 blocks", 1, 256, ["to", "x", 6], branches=True)
    yield Row("packed", "round_kernel<bf16>", "6 parts", 1, 256, ["to", "x", 6], branches=True)


def rows_of_random():
    drop = Struct("ps_attrs_dropout", p=.1, seed=7, step=3, sample=2, op=1, per_sample=1000)
    trap = Struct("trap_to", out="trap", taken="taken")
    sample = Struct("ps_attrs_sample", temperature=1.0, top_p=1.0, seed=7)
    yield Row("random", "uniform_kernel", "fp32, 1000", 4, 256,
              ["x", F32, 1000, Struct("ps_attrs_uniform_", low=0.0, high=1.0, seed=7)], branches=True)
    yield Row("random", "normal_kernel", "bf16, 1000", 4, 256,
              ["x", BF16, 1000, Struct("ps_attrs_normal_", std=1.0, seed=7)], branches=True,
              outcome=UNDECIDED,
              why="the cosine reads a table of CUDA's own at an address that the prover does not follow")
    yield Row("random", "randint_kernel", "int64, 1000", 4, 256,
              ["x", I64, 1000, Struct("ps_attrs_randint_", low=0, high=10, seed=7)], quick=True)
    yield Row("random", "dropout_kernel<bf16>", "two samples of 1000, at once", 2, 256,
              ["y", "x", 0, 2000, 1000, drop, 1.25, 1], branches=True)
    yield Row("random", "dropout_kernel<float>", "elements 3 .. 1503, in place", 2, 256,
              ["x", "x", 3, 1503, 1000, drop, 1.25, 0], branches=True)
    yield Row("random", "dropout_rows_kernel<bf16>", "7 rows of 50", 1, 256,
              [trap, "y", "x", "rows", I64, 7, 50, 1000, drop, 1.25],
              values={"rows": ("u64", [3, 0, 41, 7, 8, 20, 21])}, branches=True)
    yield Row("random", "sample_kernel<float>", "2 rows of 300, temperature 1", 2, 128,
              [trap, "index", "x", 2, 300, 12, sample], branches=True, seconds=60, outcome=UNDECIDED,
              why="the proof takes more than a minute: 170 sums over a block for each row")


class Positions:
    """Indices of n positions in an embedding of V rows, and the result of sorting them. Row 7 is hot."""

    def __init__(self, n, V):
        index = [7 if i % 3 == 0 else i * 11 % V for i in range(n)]
        self.sorted = sorted(range(n), key=lambda i: (index[i], i))
        count = [index.count(v) for v in range(V)]
        self.begin = [sum(count[:v]) for v in range(V + 1)]
        hot = [v for v in range(V) if count[v] > 64]
        self.values = {"index": ("u64", index), "count": ("u32", count), "begin": ("u32", self.begin),
                       "sorted": ("u32", self.sorted), "mixed": ("u32", self.sorted[::-1]), "hot": ("u32", hot),
                       "n_hot": ("u32", [len(hot)])}

    def of(self, *names):
        return {name: self.values[name] for name in names}


def rows_of_table():
    index = Struct("indices", p="index", dtype=I64, first=0, total=50)
    trap = Struct("trap_to", out="trap", taken="taken")
    few, many = Positions(20, 50), Positions(300, 50)
    known = many.of("sorted", "begin", "hot", "n_hot")
    def sums(C, dw_type=BF16, add=1):
        return Struct("sums_of", dw="dw", dw_type=dw_type, dy="dy", sorted="sorted", begin="begin", hot="hot",
                      n_hot="n_hot", V=50, C=C, add=add)
    yield Row("table", "embedding_kernel<uint4>", "20 rows of 40 x 16 bytes", 4, 128,
              [trap, "y", "w", index, 20, 50, 40], values=few.of("index"), quick=True)
    yield Row("table", "embedding_kernel<unsigned short>", "20 rows of 77", 4, 128,
              [trap, "y", "w", index, 20, 50, 77], values=few.of("index"))
    yield Row("table", "histogram_kernel", "300 positions", 2, 256, [trap, "count", index, 300, 50, -1],
              values=many.of("index"), outcome=REFUSED, why="the prover does not support atomic sums")
    yield Row("table", "scan_kernel", "V 1500", 1, 1024, ["begin", "cursor", "hot", "n_hot", "count", 1500],
              values={"count": ("u32", [v % 5 for v in range(1500)])}, quick=True, plants=(0, 1))
    yield Row("table", "scan_kernel", "V 3000, 6 hot rows", 1, 1024, ["begin", "cursor", "hot", "n_hot", "count", 3000],
              values={"count": ("u32", [70 if v % 500 == 3 else v % 5 for v in range(3000)])}, outcome=UNDECIDED,
              why="the place of a hot row depends on a sum in shared memory, whose value the prover does not follow")
    yield Row("table", "place_kernel", "300 positions", 2, 256, ["mixed", "cursor", index, 300, 50, -1],
              values=many.of("index"), outcome=REFUSED, why="the prover does not support atomic sums")
    yield Row("table", "sort_kernel", "300 positions, V 50", 4, 128, ["sorted", "mixed", "begin", index, 300, 50],
              values=many.of("index", "mixed", "begin"))
    long = Positions(1800, 50)
    yield Row("table", "sort_kernel", "1800 positions, of which one row has 624", 2, 128,
              ["sorted", "mixed", "begin", index, 1800, 8], values=long.of("index", "mixed", "begin"),
              outcome=UNDECIDED, why="places depend on sums in shared memory, whose values the prover does not follow")
    yield Row("table", "embedding_sum_kernel<bf16, 8>", "50 rows of 264", 4, 256, [sums(264)], values=known)
    yield Row("table", "embedding_sum_kernel<float, 1>", "50 rows of 77", 4, 256, [sums(77, F32, 0)], values=known)
    yield Row("table", "embedding_hot_kernel<bf16, 8>", "rows of 264", (2, 2), 512, [sums(264)], values=known)
    shape = Struct("shape", ndim=2, dim=1, width=1, size=[20, 15], stride=[30, 1])
    picks = {"index": ("u64", [i * 7 % 30 for i in range(300)])}
    yield Row("table", "gather_kernel<unsigned int>", "20 x 15 of 20 x 30", 2, 256,
              [trap, "y", "x", "index", I64, 300, 30, shape], values=picks)
    yield Row("table", "scatter_add_kernel<double>", "20 x 15 into 20 x 30", 1, 256,
              [trap, "sum", "src", F32, "index", I64, 20, 30, shape], values=picks)
    yield Row("table", "scatter_reduce_kernel<double>", "20 x 15 into 20 x 30, products", 1, 256,
              [trap, "all", "src", F32, "index", I64, 20, 30, shape, 2], values=picks)
    yield Row("table", "scatter_kernel<unsigned int>", "20 x 15 into 20 x 30", 1, 256,
              [trap, "y", "src", "index", I64, 20, 30, shape, 0], values=picks)
    yield Row("table", "scatter_backward_kernel<unsigned int>", "20 x 15 into 20 x 30", 1, 256,
              [trap, "dx", "dsrc", "index", I64, 20, 30, shape], values=picks)
    coordinates = Struct("coordinates", ndim=1, dtype=[I64], p=["index"], shape=[300], stride=[[1]], size=[30])
    coordinates["n"] = 1
    yield Row("table", "flat_index_kernel", "300 indices of one dimension", 2, 256, [trap, "y", 300, coordinates],
              values=picks)
    yield Row("table", "search_kernel<double>", "300 values in a row of 77", 2, 256,
              ["y", "seq", "values", F32, 77, 300, 300, 0], outcome=REFUSED,
              why="the number of steps of a search depends on its comparisons")
    yield Row("table", "search_kernel<long>", "3 rows of 100 values in rows of 9", 2, 256,
              ["y", "seq", "values", I64, 9, 100, 300, 1], outcome=REFUSED,
              why="the number of steps of a search depends on its comparisons")


def dynamic_shared(source, kernel):
    """Returns the bytes of shared memory that the host code requests for attention on tensor cores, or 0 for other
    kernels."""
    match = re.match(r"(forward|dq|dkv)_kernel<\w+, (\d+)(?:, (\w+))?", kernel)
    if not match:
        return 0
    kind, D, lean = match.group(1), int(match.group(2)), match.group(3) == "true"
    if source == "attention_hopper":                 # rows, then tiles of 64 columns of 2 bytes, aligned to 1024
        rows = {"forward": {64: 192 + 4 * 128, 128: 128 + 4 * 128}, "dq": {64: 256 + 5 * 128, 128: 256 + 5 * 64},
                "dkv": {64: 2 * 128 + 6 * 64, 128: 2 * 128 + 6 * 64}}[kind][D]
        return rows * D * 2 + (3 * 1024 if kind == "dkv" else 0) + 1024
    if kind == "forward":
        rows = 64 if D == 256 else 128
        return (rows + 4 * (64 if lean else 32)) * D * 2
    if kind == "dq":
        rows = 64 if D == 256 else 128
        return (2 * rows + 4 * (64 if D == 64 else 32) // (1 if lean else 2)) * D * 2
    rows, queries = {64: (128, 64), 128: (128, 32), 256: (64, 16)}[D]
    return (2 * rows + 4 * queries) * D * 2 + 16 * queries


def attention(T, S, D, B=1, H=1, causal=1, **more):
    def heads(p, rows):
        return Struct("heads", p=p, b=H * rows * D, h=rows * D, row=D, aligned=int(D % 8 == 0))
    return Struct("attention", **{**dict(
        q=heads("q", T), k=heads("k", S), v=heads("v", S), y=heads("y", T), dy=heads("dy", T), dq=heads("dq", T),
        dk=heads("dk", S), dv=heads("dv", S), group=1, lse="lse", lse_b=H * T, lse_h=T, delta="delta",
        B=B, H=H, T=T, S=S, D=D, scale=.125, keep=1.0, scale_d=.125, keep_d=1.0, causal=causal,
        sure=1 if causal else 0), **more})


def rows_of_attention_plain():
    yield Row("attention_plain", "forward_kernel<float>", "T S 2, D 16, causal", (2, 1), 128,
              [attention(2, 2, 16)], branches=True, quick=True, plants=(1, 4), redundant=(0, 2, 5))
    yield Row("attention_plain", "delta_kernel<bf16>", "T 37, D 64, 2 heads", (2, 2), 256,
              [attention(37, 37, 64, H=2), 8])
    yield Row("attention_plain", "sure_kernel", "a sample of 300 keys, masked", 1, 256,
              [attention(300, 300, 64, mask="mask", mask_b=300, mask_j=1), "sure"],
              values={"mask": ("u32", [0, 0x01010000] + [0x01010101] * 73)}, outcome=REFUSED,
              why="the second search begins at a maximum over the block, whose value the prover does not follow")
    yield Row("attention_plain", "segments_kernel", "2 samples of 300 ids", 2, 256,
              ["ids", 300, 1, "begin", "end", 300],
              values={"ids": ("u32", [1] * 90 + [2] * 200 + [0] * 10 + [3] * 300)})
    yield Row("attention_plain", "dq_kernel<float>", "T S 2, D 16, causal", (2, 1), 128, [attention(2, 2, 16)],
              branches=True)
    yield Row("attention_plain", "dkv_kernel<float>", "T S 2, D 16, causal", (2, 1), 128, [attention(2, 2, 16)],
              branches=True)
    yield Row("attention_plain", "sum_heads_kernel<bf16>", "4 heads share 2 keys'", 2, 256,
              [attention(5, 9, 16, H=4, group=2), Struct("heads", p="dk", b=2 * 9 * 16, h=9 * 16, row=16), "each"])


def rows_of_attention_flash():
    yield Row("attention_flash", "forward_kernel<bf16, 64, true>", "T S 128, causal, 2 tiles", (1, 1), 128,
              [attention(128, 128, 64)], quick=PLANTS, plants=(1, 2, 3), seconds=900)
    yield Row("attention_flash", "forward_kernel<bf16, 64, true>", "T S 192, causal", (2, 1), 128,
              [attention(192, 192, 64)], seconds=900)
    yield Row("attention_flash", "forward_kernel<f16, 64, true>", "T 100, S 140, 2 heads, causal", (1, 2), 128,
              [attention(100, 140, 64, H=2)], seconds=900)
    yield Row("attention_flash", "forward_kernel<bf16, 128, true>", "T S 128, causal", (1, 1), 128,
              [attention(128, 128, 128)], seconds=900)
    yield Row("attention_flash", "forward_kernel<bf16, 256, false>", "T S 64, D 200", (1, 1), 128,
              [attention(64, 64, 200)], seconds=900)


def rows_of_attention_flash_backward():
    def name(kind, DP, lean, T="bf16"):
        return f"{kind}_kernel<{T}, {DP}, {lean}, {kind}_shape<{DP}, {lean}> >"
    yield Row("attention_flash_backward", name("dq", 64, "true"), "T S 128, causal", (1, 1), 128,
              [attention(128, 128, 64)], quick=True, plants=(1, 2))
    yield Row("attention_flash_backward", name("dkv", 64, "true"), "T S 128, causal", (1, 1), 128,
              [attention(128, 128, 64)], )
    yield Row("attention_flash_backward", name("dq", 128, "true"), "T S 128, causal", (1, 1), 128,
              [attention(128, 128, 128)], )
    yield Row("attention_flash_backward", name("dkv", 128, "true"), "T S 128, causal", (1, 1), 256,
              [attention(128, 128, 128)], seconds=600)
    yield Row("attention_flash_backward", name("dkv", 256, "false"), "T S 64, D 200", (2, 1), 128,
              [attention(64, 64, 200)], outcome=UNDECIDED, why="memory", seconds=600)


def rows_of_attention_hopper():
    why = "the prover does not support wgmma"
    yield Row("attention_hopper", "forward_kernel<bf16, 64>", "T S 192", (1, 1), 384, [attention(192, 192, 64)],
              outcome=REFUSED, why=why)
    yield Row("attention_hopper", "dq_kernel<bf16, 64>", "T S 128", (1, 1), 256, [attention(128, 128, 64)],
              outcome=REFUSED, why=why)
    yield Row("attention_hopper", "dkv_kernel<bf16, 64>", "T S 128", (1, 1), 256, [attention(128, 128, 64)],
              outcome=REFUSED, why=why)


ROWS = [row for name, rows in sorted(globals().items()) if name.startswith("rows_of_") for row in rows()]
