-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/pytorch_doc.lua [--check]: writes docs/pytorch.md, which lists PyTorch's names and the corresponding
-- names of psluajit. The first table has a row for each row of ops.def, in the order of ops.def. The tool reports an
-- error in three cases: an op has no entry in OPS below, an entry has no op, or a name does not exist in psluajit. With
-- --check, the tool writes nothing, and also exits with 1 if the file is out of date. spec/oracle/ops_oracle.py looks
-- up PyTorch's names in PyTorch.
local ps = require "ps"
local paths = require "ps.paths"
local write_file = require "ps.core.write_file"

local path = paths.root .. "/docs/pytorch.md"

-- Columns: op | PyTorch | psluajit | differences. "-" means that PyTorch or psluajit has no such name. If psluajit has
-- none, the last column says what to use instead.
local OPS = [[
reshape | Tensor.reshape | t:reshape, ps.reshape |
permute | Tensor.permute | t:permute, t:transpose, t:t | dimensions are given as numbers or as one list
slice | Tensor.narrow | t:slice, t:narrow, t:select | also t[{ {from, to}, i }]; steps are positive
expand | Tensor.expand | t:expand |
contiguous | Tensor.contiguous | t:contiguous, t:clone | contiguous may return the tensor itself
flip | flip | t:flip, ps.flip |
triangle | tril | t:tril, t:triu, ps.tril, ps.triu | upper = 1 is triu
cast | Tensor.to | t:to, t:float, t:half, t:long | types are strings: "fp32", "int64"; integer types saturate
to_device | Tensor.to | t:to | devices are strings: "cpu", "cuda"; a process has one GPU, "cuda"
all_reduce | distributed.all_reduce | - | group:sum(x) also sums the gradient; group:all_reduce works in place
all_gather | distributed.all_gather_into_tensor | - | group:gathered(x) has a gradient
reduce_scatter | distributed.reduce_scatter_tensor | - | group:scattered(x) has a gradient
broadcast | distributed.broadcast | - | group:copied(x) has a gradient; group:broadcast works in place
copy_to_tp | - | - | group:copy_to(x); the ..._tp rows assume that all ranks of the group compute the same loss
reduce_from_tp | - | - | group:reduce_from(x)
scatter_to_tp | - | - | group:scatter_to(x), along any dimension
gather_from_tp | - | - | group:gather_from(x), along any dimension
all_gather_again | - | - | group:gathered_again(x)
column_linear | - | - | group:gathered_linear(x, w, b, { pieces = n }), group:gathered_linears
row_linear | - | - | group:linear_scattered(x, w, { pieces = n })
column_linear_grad | - | - | the gradient of column_linear, in one op
logit_stats | - | - | used by nn.ParallelLMHead: the maxima and sums that ranks exchange about their logits
logit_loss | - | - | used by nn.ParallelLMHead: losses and gradients of the logits of one rank's part of the vocabulary
parallel_lm_loss | - | - | group:lm_loss(x, w, targets, share, options), the loss of nn.ParallelLMHead
counted_once | - | - | group:counted_once(x)
copy_ | Tensor.copy_ | t:copy_ | source and destination may overlap: the source is read first
fill_ | Tensor.fill_ | t:fill_, t:zero_ | a number that the integer type cannot hold is an error
arange_ | arange | ps.arange | int64 if all arguments are whole numbers, else fp32
uniform_ | Tensor.uniform_ | t:uniform_, ps.rand | draws the same numbers on every device, but not PyTorch's
normal_ | Tensor.normal_ | t:normal_, ps.randn | as uniform_
randint_ | randint | ps.randint | as uniform_
randperm_ | - | - | randperm on hosts
axpy_ | Tensor.add_ | t:add_ |
scale_ | Tensor.mul_ | t:mul_ |
scale_by_ | Tensor.mul_ | - | used by optimizers: multiplies by a number in device memory
add | add | ps.add, t:add | also a + b
sub | sub | ps.sub, t:sub | also a - b
mul | mul | ps.mul, t:mul | also a * b
div | div | ps.div, t:div | integers are divided as fp32 (as fp64 if it is the default)
pow | pow | ps.pow, t:pow | also a ^ b; integers ^ whole numbers >= 0 are integers, others are fp32
maximum | maximum | ps.maximum | the second argument may be a number
minimum | minimum | ps.minimum | the second argument may be a number
remainder | remainder | ps.remainder, t:remainder | also t % b
fmod | fmod | ps.fmod, t:fmod |
floor_divide | floor_divide | ps.floor_divide, t:floor_divide |
eq | eq | ps.eq, t:eq | Lua's == compares Lua values
ne | ne | ps.ne, t:ne |
lt | lt | ps.lt, t:lt | a number outside the range of the integer type is compared by value
le | le | ps.le, t:le |
gt | gt | ps.gt, t:gt |
ge | ge | ps.ge, t:ge |
logical_and | logical_and | t:logical_and |
logical_or | logical_or | t:logical_or |
lerp | lerp | ps.lerp, t:lerp | a weight that is a tensor is composed of other ops
prelu | nn.functional.prelu | F.prelu, nn.PReLU |
logit_entropy | nn.functional.binary_cross_entropy_with_logits | F.binary_cross_entropy_with_logits |
where | where | ps.where, t:where | t:where(condition, other); a number that the type cannot hold is an error
affine | - | - | alpha x + beta in one pass, for arithmetic of a tensor and numbers
pow_scalar | pow | t:pow |
clamp | clamp | ps.clamp, t:clamp |
exp | exp | ps.exp |
log | log | ps.log |
sqrt | sqrt | ps.sqrt |
rsqrt | rsqrt | ps.rsqrt |
reciprocal | reciprocal | t:reciprocal |
abs | abs | ps.abs |
sign | sign | ps.sign |
floor | floor | ps.floor |
ceil | ceil | ps.ceil |
round | round | ps.round |
trunc | trunc | ps.trunc, t:trunc |
nan_to_num | nan_to_num | ps.nan_to_num, t:nan_to_num |
sin | sin | ps.sin |
cos | cos | ps.cos |
erf | erf | ps.erf |
tanh | tanh | ps.tanh, F.tanh, nn.Tanh |
sigmoid | sigmoid | ps.sigmoid, F.sigmoid, nn.Sigmoid |
relu | relu | ps.relu, F.relu, nn.ReLU |
silu | nn.functional.silu | ps.silu, F.silu, nn.SiLU |
gelu | nn.functional.gelu | F.gelu, nn.GELU | the option approximate is "none" or "tanh"
log1p | log1p | ps.log1p, t:log1p |
expm1 | expm1 | ps.expm1, t:expm1 |
leaky_relu | nn.functional.leaky_relu | F.leaky_relu, nn.LeakyReLU |
elu | nn.functional.elu | F.elu, nn.ELU |
softplus | nn.functional.softplus | F.softplus, nn.Softplus |
slope | - | - | the gradients of hardsigmoid, hardswish, mish, logsigmoid and huber
hardsigmoid | nn.functional.hardsigmoid | F.hardsigmoid, nn.Hardsigmoid |
hardswish | nn.functional.hardswish | F.hardswish, nn.Hardswish |
mish | nn.functional.mish | F.mish, nn.Mish |
logsigmoid | nn.functional.logsigmoid | F.logsigmoid, nn.LogSigmoid |
huber | - | - | of a difference; used by huber_loss and smooth_l1_loss
silu_backward | - | - | silu's gradient
gelu_backward | - | - | gelu's gradient
act_mul | - | - | an activation times a gate in one pass
act_mul_backward | - | - | its gradient
isfinite | isfinite | ps.isfinite |
logical_not | logical_not | t:logical_not |
sum | sum | ps.sum, t:sum | dims is a number or a list of numbers
mean | mean | ps.mean, t:mean |
amax | amax | ps.amax, t:amax |
amin | amin | ps.amin, t:amin |
prod | prod | ps.prod, t:prod | dims may be a list; products with a gradient consist of other ops
var | - | - | var and std without a gradient on hosts, over the last dimension or all
median | - | - | median without a gradient on hosts
argmax | argmax | ps.argmax, t:argmax | returns the first of equal values
argmin | argmin | ps.argmin, t:argmin | returns the first of equal values
cumsum | cumsum | ps.cumsum, t:cumsum |
cumprod | cumprod | ps.cumprod, t:cumprod |
cumprod_backward | - | - | cumprod's gradient
cdist | - | - | cdist of p = 2 on hosts
cdist_backward | - | - | its gradient
topk | topk | ps.topk, t:topk | along the last dimension, sorted downwards; two results
sq_norms | - | - | sums of squares; used to clip gradients
grad_store | - | - | stores a gradient and computes its sum of squares
matmul | matmul | ps.matmul, t:matmul, t:mm, t:bmm | sums in fp32
linear | nn.functional.linear | F.linear, nn.Linear, nn.Conv1D | w is [out, in]; out_in = false and nn.Conv1D: [in, out]
linear_grad | - | - | linear's gradient
unpack | - | - | the numbers of packed weights (Q4_K, NF4, ...)
pack | - | - | packs cached keys and values as Q8_0
linear_packed | - | - | linear with packed weights, which have no gradient
mlp | - | F.mlp | two products with GELU between them
linear_gelu_backward | - | - | mlp's gradient
softmax | softmax | ps.softmax, F.softmax, nn.Softmax |
log_softmax | log_softmax | ps.log_softmax, F.log_softmax, nn.LogSoftmax |
softmax_backward | - | - | softmax's gradient
log_softmax_backward | - | - | log_softmax's gradient
cross_entropy | nn.functional.cross_entropy | F.cross_entropy, nn.CrossEntropyLoss | classes: see below; no target: 0
cross_entropy_backward | - | - | its gradient
nll_loss | - | - | nll_loss on hosts
nll_loss_backward | - | - | its gradient
lm_loss | - | F.lm_loss | linear and cross_entropy in blocks; the whole logits are never in memory
embedding | nn.functional.embedding | F.embedding, nn.Embedding, t:index_select | an index outside the table is an error
embedding_backward | - | - | its gradient
flat_index | - | - | combines several index tensors into one
gather | gather | ps.gather, t:gather |
scatter_add | scatter_add | ps.scatter_add, t:scatter_add, t:scatter_add_ | sums in row-major order
scatter_ | Tensor.scatter_ | t:scatter_ | if indices are equal, the last value wins
scatter | scatter | ps.scatter, t:scatter | as scatter_; overwritten values have gradient 0
scatter_backward | - | - | its gradient
scatter_reduce | scatter_reduce | ps.scatter_reduce, t:scatter_reduce | reduce = "prod" has no gradient
masked_scatter | - | - | masked_scatter without a gradient on hosts
unfold | - | - | unfold on hosts
unfold_backward | - | - | its gradient
searchsorted | searchsorted | ps.searchsorted, t:searchsorted | options are passed by name
concat | cat | ps.cat, ps.stack |
layer_norm | nn.functional.layer_norm | F.layer_norm, nn.LayerNorm | over the dimensions of w, or the last one
layer_norm_backward | - | - | its gradient
rms_norm | nn.functional.rms_norm | F.rms_norm, nn.RMSNorm | over the last dimension; eps is 1e-6 by default
rms_norm_backward | - | - | its gradient
channel_norm | nn.functional.batch_norm | F.batch_norm | also used by the layers: see below
channel_norm_backward | - | - | its gradient
conv | nn.functional.conv2d | F.conv2d, F.conv1d | options are passed by name: { stride = 2 }
conv_transpose | nn.functional.conv_transpose2d | F.conv_transpose2d | output_padding must be less than the stride
conv_weight | - | - | the gradient of conv's weight and bias
pad | nn.functional.pad | F.pad | modes other than constant: one or two dimensions
resample | nn.functional.interpolate | F.interpolate | nearest, nearest-exact, linear, bilinear, area
max_pool | nn.functional.max_pool2d | F.max_pool2d | return_indices is an option; max_unpool does not exist
max_pool_backward | - | - | its gradient
rope | - | - | rotates queries and keys by their positions
bernoulli | - | - | bernoulli on hosts
dropout | nn.functional.dropout | F.dropout, nn.Dropout | a resumed run draws the same numbers
attention | nn.functional.scaled_dot_product_attention | F.attention | mask: 4 dimensions; causal: see below
attention_backward | - | - | its gradient
attention_packed | - | F.attention_packed, nn.MultiheadSelfAttention | q, k and v are one tensor
attention_packed_backward | - | - | its gradient
adam_ | optim.AdamW | optim.Adam, optim.AdamW | one pass for all parameters
sgd_ | optim.SGD | optim.SGD |
rmsprop_ | optim.RMSprop | optim.RMSprop | centered is refused
adam_schedule_free_ | - | optim.AdamWScheduleFree | AdamWScheduleFree of schedulefree
master_lerp_ | - | - | optimizer:eval() and optimizer:train() of AdamWScheduleFree
lion_ | - | optim.Lion | lion-pytorch's
lion8bit_ | - | optim.Lion8bit | its average in 8 bits
lamb_ | - | optim.LAMB | timm's, without its clipping
muon_ | optim.Muon | optim.Muon | products are fp32 for fp32 parameters; groups name the optimizer of other parameters
adafactor_ | optim.Adafactor | optim.Adafactor, optim.HuggingFaceAdafactor | eps is eps1 and eps2
adam8bit_ | - | optim.AdamW8bit | averages in 8 bits
adam_bf16_ | - | optim.AdamWBF16 | averages in bf16
remainder_split_ | - | - | masters of memory = { master = "remainder" }
remainder_join | - | - | the same
sample | - | - | draws a token from logits with temperature, top_k, top_p and min_p; used by model:generate
]]

-- Columns: PyTorch | psluajit | differences. These functions are composed of several ops.
local OTHERS = [[
Tensor.var | t:var, ps.var |
Tensor.std | t:std, ps.std |
linalg.vector_norm | t:norm, ps.norm | the gradient is 0 if the norm is 0
logsumexp | t:logsumexp, ps.logsumexp |
roll | t:roll, ps.roll |
Tensor.repeat | t:tile, ps.tile | repeat is a reserved word of Lua
sort | t:sort, ps.sort | equal elements keep their order if descending, else they have the reverse order; two results
eye | ps.eye |
linspace | ps.linspace |
einsum | ps.einsum | "..." and diagonals are errors
nn.functional.one_hot | ps.one_hot |
masked_fill | ps.masked_fill, t:masked_fill, t:masked_fill_ |
masked_select | ps.masked_select, t:masked_select |
masked_scatter | ps.masked_scatter, t:masked_scatter, t:masked_scatter_ |
index_select | ps.index_select, t:index_select | the index may have any shape
index_put | ps.index_put, t:index_put, t:index_put_ | the first argument is any key of t[key]; write a tuple as a list
index_add | ps.index_add, t:index_add, t:index_add_ | alpha is the last argument
index_copy | ps.index_copy, t:index_copy, t:index_copy_ | if indices are equal, the last value wins
index_fill | ps.index_fill, t:index_fill, t:index_fill_ |
nonzero | ps.nonzero, t:nonzero |
split | t:split, ps.split | returns several results, not a tuple
chunk | t:chunk | returns several results, not a tuple
stack | ps.stack |
nn.functional.mse_loss | F.mse_loss, nn.MSELoss |
nn.functional.l1_loss | F.l1_loss, nn.L1Loss |
nn.functional.binary_cross_entropy | F.binary_cross_entropy, nn.BCELoss |
nn.functional.kl_div | F.kl_div, nn.KLDivLoss |
nn.functional.nll_loss | F.nll_loss, nn.NLLLoss | classes come last: see below; no target: 0
nn.functional.smooth_l1_loss | F.smooth_l1_loss, nn.SmoothL1Loss |
nn.functional.huber_loss | F.huber_loss, nn.HuberLoss |
nn.functional.selu | F.selu, nn.SELU |
nn.functional.hardtanh | F.hardtanh, nn.Hardtanh |
nn.functional.relu6 | F.relu6, nn.ReLU6 |
nn.functional.softsign | F.softsign, nn.Softsign |
nn.functional.glu | F.glu, nn.GLU |
nn.functional.celu | F.celu, nn.CELU |
nn.functional.softmin | F.softmin, nn.Softmin |
nn.functional.dropout1d | F.dropout1d, nn.Dropout1d | as dropout
nn.functional.dropout2d | F.dropout2d, nn.Dropout2d | as dropout
nn.functional.pixel_shuffle | F.pixel_shuffle, nn.PixelShuffle |
nn.functional.embedding_bag | F.embedding_bag, nn.EmbeddingBag | options by name; equal maxima share gradients
nn.functional.normalize | F.normalize | the gradient is 0 if the norm is 0
nn.functional.cosine_similarity | F.cosine_similarity, nn.CosineSimilarity |
isnan | ps.isnan, t:isnan |
isinf | ps.isinf, t:isinf |
argsort | ps.argsort, t:argsort |
isclose | ps.isclose, t:isclose | differences are computed in fp64
allclose | ps.allclose, t:allclose | returns a Lua boolean
equal | ps.equal, t:equal | returns a Lua boolean; the dtypes may differ
unbind | ps.unbind, t:unbind | returns several results, not a tuple
diag | ps.diag, t:diag |
outer | ps.outer, t:outer |
Tensor.unflatten | t:unflatten, nn.Unflatten |
Tensor.expand_as | t:expand_as |
repeat_interleave | ps.repeat_interleave, t:repeat_interleave |
bincount | ps.bincount, t:bincount | options are passed by name
count_nonzero | ps.count_nonzero, t:count_nonzero |
unique | ps.unique, t:unique | options are passed by name; always sorted, without dim
median | ps.median, t:median | along a dimension two results: values and indices
quantile | ps.quantile, t:quantile | options are passed by name
bucketize | ps.bucketize, t:bucketize | options are passed by name
Tensor.unfold | t:unfold | returns a copy
movedim | ps.movedim, t:movedim |
swapaxes | ps.swapaxes, t:swapaxes |
diagonal | ps.diagonal, t:diagonal | returns a copy
tril_indices | ps.tril_indices |
triu_indices | ps.triu_indices |
meshgrid | ps.meshgrid | takes a list of vectors; returns several results
Tensor.new_zeros | t:new_zeros, t:new_ones, t:new_full, t:new_empty | the shape is one list
addcmul | ps.addcmul, t:addcmul | value is the last argument
addcdiv | ps.addcdiv, t:addcdiv | value is the last argument
addmm | ps.addmm, t:addmm, ps.baddbmm, t:baddbmm | options are passed by name
dot | ps.dot, t:dot |
mv | ps.mv, t:mv |
diff | ps.diff, t:diff |
log2 | ps.log2, t:log2 |
log10 | ps.log10, t:log10 |
any | ps.any, t:any | of bool
all | t:all | returns bool; ps.all selects all elements of a dimension
max | ps.max, t:max | of one tensor, along a dimension (two results: values and indices), or of two tensors
min | ps.min, t:min | as max
square | ps.square, t:square |
squeeze | ps.squeeze, t:squeeze |
unsqueeze | ps.unsqueeze, t:unsqueeze |
flatten | ps.flatten, t:flatten |
clip | ps.clip, t:clip, t:clamp_min, t:clamp_max |
Tensor.lerp_ | t:lerp_, t:clamp_, t:exp_, t:pow_, t:relu_, t:addcmul_ | docs/api.md lists all in-place methods
Tensor.fill_diagonal_ | t:fill_diagonal_ |
cdist | ps.cdist, t:cdist | the gradient of a norm of 0 is 0
nn.functional.pairwise_distance | F.pairwise_distance |
nn.functional.triplet_margin_loss | F.triplet_margin_loss, nn.TripletMarginLoss | options are passed by name
nn.functional.margin_ranking_loss | F.margin_ranking_loss, nn.MarginRankingLoss | options are passed by name
nn.functional.cosine_embedding_loss | F.cosine_embedding_loss, nn.CosineEmbeddingLoss | options are passed by name
nn.functional.hinge_embedding_loss | F.hinge_embedding_loss, nn.HingeEmbeddingLoss | options are passed by name
nn.functional.gaussian_nll_loss | F.gaussian_nll_loss, nn.GaussianNLLLoss | options are passed by name
zeros_like | ps.zeros_like |
ones_like | ps.ones_like |
empty_like | ps.empty_like |
full_like | ps.full_like |
rand_like | ps.rand_like | as uniform_
randn_like | ps.randn_like | as uniform_
randint_like | ps.randint_like | as uniform_
randperm | ps.randperm | as uniform_
bernoulli | ps.bernoulli, t:bernoulli, t:bernoulli_ | as uniform_
multinomial | ps.multinomial, t:multinomial | as uniform_
nn.MultiheadAttention | nn.MultiheadAttention | options are passed by name; cache = {} decodes; causal masks: see below
nn.TransformerEncoderLayer | nn.TransformerEncoderLayer | settings and masks are passed by name
nn.TransformerDecoderLayer | nn.TransformerDecoderLayer | as nn.TransformerEncoderLayer; cache = {} decodes
nn.TransformerEncoder | nn.TransformerEncoder | arguments are (layer, n, { norm = }), or a list of layers
nn.TransformerDecoder | nn.TransformerDecoder | as nn.TransformerEncoder
nn.Sequential | nn.Sequential | indices begin at 0
nn.ModuleList | nn.ModuleList | indices begin at 0; list:size() is the length
nn.ModuleDict | nn.ModuleDict | { a = m } is sorted by name; { { "a", m } } keeps its order
nn.ParameterList | nn.ParameterList | indices begin at 0; list:size() is the length
nn.ParameterDict | nn.ParameterDict | as nn.ModuleDict
nn.Identity | nn.Identity |
nn.Flatten | nn.Flatten |
optim.lr_scheduler.LambdaLR | ps.sched.LambdaLR | `(optimizer, fn)` or { optimizer =, lr_lambda = }
optim.lr_scheduler.StepLR | ps.sched.StepLR | `(optimizer, 10, 0.5)` or { optimizer =, step_size =, gamma = }
optim.lr_scheduler.MultiStepLR | ps.sched.MultiStepLR | `(optimizer, { 10, 20 }, 0.5)`
optim.lr_scheduler.ExponentialLR | ps.sched.ExponentialLR | `(optimizer, 0.9)` or { optimizer =, gamma = }
optim.lr_scheduler.CosineAnnealingLR | ps.sched.CosineAnnealingLR | `(optimizer, 100)`
optim.lr_scheduler.CosineAnnealingWarmRestarts | ps.sched.CosineAnnealingWarmRestarts | `(optimizer, 100, 2)`
optim.lr_scheduler.ConstantLR | ps.sched.ConstantLR | `(optimizer, 0.5, 10)`
optim.lr_scheduler.LinearLR | ps.sched.LinearLR | `(optimizer, 0.1, 1, 10)`
optim.lr_scheduler.PolynomialLR | ps.sched.PolynomialLR | `(optimizer, 100, 2)`
optim.lr_scheduler.SequentialLR | ps.sched.SequentialLR | `(optimizer, { first, second }, { 10 })`
optim.lr_scheduler.MultiplicativeLR | ps.sched.MultiplicativeLR | `(optimizer, fn)` or { optimizer =, lr_lambda = }
optim.lr_scheduler.ChainedScheduler | ps.sched.ChainedScheduler | `({ first, second })`
optim.lr_scheduler.OneCycleLR | ps.sched.OneCycleLR | `(optimizer, 0.1, 100)`; after its last step the rate stays
optim.lr_scheduler.ReduceLROnPlateau | ps.sched.ReduceLROnPlateau | `(optimizer, "min", 0.5)`
nn.functional.conv1d | F.conv1d |
nn.functional.conv_transpose1d | F.conv_transpose1d |
nn.Conv1d | nn.Conv1d | options are passed by name; nn.Conv1D is GPT-2's linear layer
nn.Conv2d | nn.Conv2d | options are passed by name
nn.ConvTranspose1d | nn.ConvTranspose1d | options are passed by name
nn.ConvTranspose2d | nn.ConvTranspose2d | options are passed by name
nn.functional.max_pool1d | F.max_pool1d, nn.MaxPool1d | options are passed by name
nn.MaxPool2d | nn.MaxPool2d | options are passed by name
nn.functional.avg_pool1d | F.avg_pool1d, nn.AvgPool1d | options are passed by name
nn.functional.avg_pool2d | F.avg_pool2d, nn.AvgPool2d | options are passed by name
nn.functional.adaptive_avg_pool1d | F.adaptive_avg_pool1d, nn.AdaptiveAvgPool1d |
nn.functional.adaptive_avg_pool2d | F.adaptive_avg_pool2d, nn.AdaptiveAvgPool2d | false stands for None
nn.functional.adaptive_max_pool1d | F.adaptive_max_pool1d, nn.AdaptiveMaxPool1d | returns no indices
nn.functional.adaptive_max_pool2d | F.adaptive_max_pool2d, nn.AdaptiveMaxPool2d | returns no indices
nn.Upsample | nn.Upsample | options are passed by name
nn.BatchNorm1d | nn.BatchNorm1d | momentum = false stands for None; running statistics: see below
nn.BatchNorm2d | nn.BatchNorm2d | as nn.BatchNorm1d
nn.SyncBatchNorm | nn.SyncBatchNorm | statistics are over the data-parallel ranks
nn.functional.group_norm | F.group_norm, nn.GroupNorm |
nn.InstanceNorm1d | nn.InstanceNorm1d | without running statistics
nn.InstanceNorm2d | nn.InstanceNorm2d | as nn.InstanceNorm1d
nn.init.kaiming_normal_ | nn.init.kaiming_normal_, nn.init.kaiming_uniform_ | options are passed by name
nn.init.orthogonal_ | nn.init.orthogonal_ | as uniform_
nn.utils.clip_grad_norm_ | nn.clip_grad_norm_ | with an engine: see the function
nn.utils.clip_grad_value_ | nn.clip_grad_value_ | not with an engine
no_grad | ps.no_grad | the argument is a function
autocast | ps.autocast | `ps.autocast("bf16", fn)`; the lists of ops for CUDA on every device
utils.checkpoint.checkpoint | ps.recompute | the function may return only tensors
Tensor.backward | t:backward | options are in a table, { retain_graph = true }; create_graph does not exist
Tensor.register_hook | t:register_hook | a hook that changes the gradient in place is an error
autograd.Function | autograd.Function | autograd.Function "Name"; nil from backward stops the gradient
autograd.grad | autograd.grad | returns several results; options in a table; no create_graph
autograd.gradcheck | autograd.gradcheck | checks all outputs at once, multiplied by random weights
nn.Module.register_forward_pre_hook | module:register_forward_pre_hook |
nn.Module.register_forward_hook | module:register_forward_hook |
nn.Module.register_full_backward_hook | module:register_full_backward_hook |
save | ps.save | .pt and .safetensors
load | ps.load | never runs code from a file
manual_seed | ps.manual_seed | draws other numbers than PyTorch
]]

-- Differences that are not about names and that cause no error in a script.
local REST = [==[
- **`eps` of `nn.RMSNorm` and `F.rms_norm`** is 1e-6. PyTorch's default is the type's epsilon, 1.2e-7 in fp32.
- **`weight_decay` of AdamW in a configuration** of `ps.initialize` is 0, as in DeepSpeed. `optim.AdamW`, and groups of
  `param_groups` that name an optimizer other than the configuration's, have PyTorch's 0.01.
- **Running statistics of `nn.BatchNorm1d` and `2d`** move once per forward of a micro-batch; PyTorch moves them again
  when a checkpointed forward is recomputed. A step of an engine that is given up or skipped (an error, an overflow)
  restores them. Each rank computes them from its own rows, and those of rank 0 are saved; `nn.SyncBatchNorm` computes
  them from the rows of all ranks. They are fp32 in models of half types, too.
- **Classes come last** in `F.cross_entropy`, `F.nll_loss`, `nn.CrossEntropyLoss` and `nn.NLLLoss`. Logits are
  [N, L, C], where PyTorch's are [N, C, L]: write `logits:movedim(1, -1)`. Targets of another shape are an error, but
  the shapes cannot show the mistake if L is C or if the targets are class probabilities.
- **The mean loss over no targets** (each is -100) is 0. PyTorch's is NaN.
- **`F.binary_cross_entropy`** does not check its probabilities. Outside [0, 1] the loss is NaN, whereas PyTorch raises
  an error.
- **Causal masks with T queries and S keys, T < S**: query i sees the keys up to i + S - T, as in decoding with a
  cache. In PyTorch, `is_causal` lets query i see the keys up to i.
- **`p.grad`, `p.requires_grad`, `t.shape`, `t.dtype`** are methods: `p:grad()`. Without the parentheses each is a
  function, and Lua takes every function for true.
- **`t == 0`, `if t:any() then`**: Lua compares references, and takes every tensor for true. Write `t:eq(0)` and
  `if t:any():item() then`; `item()` of a bool is a boolean.
- **`a[{ i, j }]`** with index tensors pairs them, as `a[i, j]` does in PyTorch. A list of numbers in a key is a range:
  `a[{ { 0, 2 } }]` is `a[0:2]`, `a[ps.tensor({ 0, 2 }, "int64")]` is `a[[0, 2]]`.
- **`nn.Parameter(t)`** makes t itself a parameter, which two fields then share; PyTorch makes a new one. Write
  `nn.Parameter(t:clone())` for a copy.
- **`module:state_dict()`** has the parameters themselves. Compute with them under `ps.no_grad`, or take `t:detach()`;
  PyTorch's are detached.
- **`named_modules` and `named_children`** list a module that has two names under both. `modules`, `children` and
  `apply` visit it once.
- **A uint8 tensor as an index** is an error. PyTorch takes it for a mask.
- **Writes in place** (`a[key] = v`, and methods whose name ends in `_`) are not recorded for the backward pass.
  Outside `ps.no_grad`, a write is an error if the tensor or the value requires a gradient. `a:index_put(key, v)`,
  `a:scatter(...)` and `a:index_add(...)` return a new tensor and have gradients.
- **Targets** are integers: `ps.tensor({ 0, 1 }, "int64")`. `ps.tensor { 0, 1 }` is fp32, since Lua has one type of
  numbers.
]==]

local HOMES = { ps = ps, ["ps.sched"] = ps.sched, F = ps.functional, nn = ps.nn, optim = ps.optim,
  ["nn.init"] = ps.nn.init, autograd = ps.autograd, module = ps.nn.Module, t = require("ps.tensor").methods() }
local wrong = {}

local function check_names(names, of)
  if names == "-" then return end
  for name in (names .. ","):gmatch "%s*([^,]*)," do
    local home, key = name:match "^([%w.]+)[.:]([%w_]+)$"
    if not home or not HOMES[home] or rawget(HOMES[home], key) == nil and HOMES[home][key] == nil then
      wrong[#wrong + 1] = ("%s: there is no %s"):format(of, name)
    end
  end
end

local function fields_of(line)
  local list = {}
  for field in (line .. "|"):gmatch "%s*(.-)%s*|" do list[#list + 1] = field end
  return list
end

local function quoted(names)
  if names == "-" then return "" end
  return (names:gsub("[^,%s]+", "`%0`"))
end

local entries = {}
for line in OPS:gmatch "[^\n]+" do
  local f = fields_of(line)
  entries[f[1]] = f
end
local lines = { "# From PyTorch", "",
  "PyTorch's names (of `torch`) and ours: `t` is a tensor, `F` is `ps.F`, and `nn`, `optim` and `autograd` are",
  "`ps.nn`, `ps.optim` and `ps.autograd`. Each name has PyTorch's meaning, except as the last column says.",
  "Functions that return a tuple there return several results here: `local a, b = t:chunk(2)`, or",
  "`local list = { t:unbind() }` for a list of them.",
  "`make test-oracle` compares them with PyTorch. `psluajit tools/pytorch_doc.lua` writes this page from",
  "`src/ops.def`.", "", "## Ops", "",
  "| op | PyTorch | here | differences |", "|---|---|---|---|" }
for op = 0, ps.C.PS_OP_COUNT - 1 do
  local name = ps.op_info[op].name
  local f = entries[name]
  entries[name] = nil
  if f then
    check_names(f[3], name)
    lines[#lines + 1] = ("| `%s` | %s | %s | %s |"):format(name, quoted(f[2]), quoted(f[3]), f[4] or "")
  else wrong[#wrong + 1] = name .. ": tools/pytorch_doc.lua has no entry for this op" end
end
for name in pairs(entries) do wrong[#wrong + 1] = name .. ": there is no such op" end
for _, line in ipairs { "", "## Made of several ops", "", "| PyTorch | here | differences |", "|---|---|---|" } do
  lines[#lines + 1] = line
end
for line in OTHERS:gmatch "[^\n]+" do
  local f = fields_of(line)
  check_names(f[2], f[1])
  lines[#lines + 1] = ("| %s | %s | %s |"):format(quoted(f[1]), quoted(f[2]), f[3] or "")
end
for line in ("\n## Defaults and rules that differ\n\n" .. REST):gmatch "([^\n]*)\n" do lines[#lines + 1] = line end

table.sort(wrong)
for _, line in ipairs(wrong) do io.stderr:write("pytorch_doc: ", line, "\n") end
local text = table.concat(lines, "\n") .. "\n"
if arg[1] == "--check" then
  local file = io.open(path, "rb")
  local same = file and file:read("*a") == text
  if file then file:close() end
  if not same then io.stderr:write("docs/pytorch.md is out of date; run psluajit tools/pytorch_doc.lua\n") end
  os.exit(same and #wrong == 0 and 0 or 1)
end
assert(write_file(path, text))
os.exit(#wrong == 0 and 0 or 1)
