-- SPDX-License-Identifier: BSD-3-Clause
-- The calls that bench/small_ops.lua measures. There is at least one call for each op of docs/pytorch.md that computes.
-- Both programs use this table, so that they measure the same call on the same shapes.
--
-- Columns: op of docs/pytorch.md | inputs | psluajit | PyTorch | inputs with a gradient. If the column of PyTorch is
-- "=", PyTorch's call is psluajit's call in the syntax of Python. If the last column names inputs, the call is also
-- measured together with its backward. An input is written as NAME=KIND. Both programs define the same kinds (`kinds`
-- in bench/small_ops.lua, KINDS in the peer).
local CASES = [[
reshape | x=m | x:reshape(-1) | = | x
permute | x=m | x:transpose(0, 1) | = | x
slice | x=v | x:narrow(0, 1, 8) | = | x
expand | x=c | x:expand(4, -1, 8) | = | x
contiguous | x=m | x:t():contiguous() | =
contiguous | x=v | x:clone() | = | x
cast | x=v | x:double() | = | x
cast | x=i | x:float() | =
flip | x=m | x:flip(1) | = | x
triangle | x=m | x:tril() | = | x
copy_ | x=v,y=v | x:copy_(y) | =
fill_ | x=v | x:fill_(1) | =
arange_ | x=v | ps.arange(x:size(0)) | =
uniform_ | x=v | x:uniform_() | =
normal_ | x=v | x:normal_() | =
randint_ | x=v | ps.randint(0, 9, { x:size(0) }) | torch.randint(0, 9, (x.size(0),))
axpy_ | x=v,y=v | x:add_(y) | =
scale_ | x=v | x:mul_(1) | =
add | x=v,y=v | x + y | = | x,y
add | x=i,y=i | x + y | =
add | x=m,y=w | x + y | = | x,y
sub | x=v,y=v | x - y | = | x,y
mul | x=v,y=v | x * y | = | x,y
mul | x=m,y=c | x * y | = | x,y
div | x=v,y=u | x / y | = | x,y
pow | x=u,y=u | x ^ y | x ** y | x,y
maximum | x=v,y=v | ps.maximum(x, y) | = | x,y
minimum | x=v,y=v | ps.minimum(x, y) | = | x,y
eq | x=v,y=v | x:eq(y) | =
ne | x=i | x:ne(3) | =
lt | x=v,y=v | x:lt(y) | =
le | x=v | x:le(0.5) | =
gt | x=v | x:gt(0) | =
ge | x=v,y=v | x:ge(y) | =
logical_and | x=b,y=b | x:logical_and(y) | =
logical_or | x=b,y=b | x:logical_or(y) | =
where | c=b,x=v,y=v | ps.where(c, x, y) | = | x,y
affine | x=v | x * 2 | = | x
affine | x=v | x + 1.5 | = | x
pow_scalar | x=v | x ^ 2 | x ** 2 | x
pow_scalar | x=u | x ^ 1.5 | x ** 1.5 | x
clamp | x=v | x:clamp(-1, 1) | = | x
exp | x=v | x:exp() | = | x
log | x=u | x:log() | = | x
sqrt | x=u | x:sqrt() | = | x
rsqrt | x=u | x:rsqrt() | = | x
reciprocal | x=u | x:reciprocal() | = | x
abs | x=v | x:abs() | = | x
sign | x=v | x:sign() | =
floor | x=v | x:floor() | =
ceil | x=v | x:ceil() | =
round | x=v | x:round() | =
sin | x=v | x:sin() | = | x
cos | x=v | x:cos() | = | x
erf | x=v | x:erf() | = | x
tanh | x=v | x:tanh() | = | x
sigmoid | x=v | x:sigmoid() | = | x
relu | x=v | F.relu(x) | = | x
silu | x=v | F.silu(x) | = | x
gelu | x=v | F.gelu(x) | = | x
gelu | x=v | F.gelu(x, "tanh") | F.gelu(x, approximate="tanh") | x
log1p | x=u | x:log1p() | = | x
expm1 | x=v | x:expm1() | = | x
leaky_relu | x=v | F.leaky_relu(x, 0.2) | = | x
elu | x=v | F.elu(x) | = | x
softplus | x=v | F.softplus(x) | = | x
isfinite | x=v | x:isfinite() | =
logical_not | x=b | x:logical_not() | =
sum | x=v | x:sum() | = | x
sum | x=m | x:sum(0) | = | x
mean | x=m | x:mean(-1) | = | x
amax | x=m | x:amax(-1) | = | x
amin | x=v | x:amin() | = | x
prod | x=u | x:prod() | = | x
argmax | x=m | x:argmax(-1) | =
argmin | x=m | x:argmin(0) | =
cumsum | x=m | x:cumsum(1) | = | x
topk | x=m | x:topk(3) | = | x
matmul | x=m,y=m | x:matmul(y) | = | x,y
linear | x=m,y=m,z=w | F.linear(x, y, z) | = | x,y,z
softmax | x=m | F.softmax(x, -1) | = | x
log_softmax | x=m | F.log_softmax(x, -1) | = | x
cross_entropy | x=r,y=h | F.cross_entropy(x, y) | = | x
embedding | x=r,i=k | F.embedding(i, x) | = | x
gather | x=m,i=g | x:gather(1, i) | = | x
scatter_add | x=r,i=kk,y=r | x:scatter_add(0, i, y) | = | x,y
scatter_ | x=m,i=g,y=m | x:scatter_(1, i, y) | =
scatter | x=m,i=g,y=m | x:scatter(1, i, y) | = | x,y
scatter_reduce | x=r,i=kk,y=r | x:scatter_reduce(0, i, y, "amax") | = | x,y
concat | x=m,y=m | ps.cat({ x, y }, -1) | torch.cat([x, y], -1) | x,y
concat | x=m,y=m | ps.cat({ x, y }, 0) | torch.cat([x, y], 0) | x,y
layer_norm | x=m,y=w,z=w | F.layer_norm(x, y, z) | F.layer_norm(x, y.shape, y, z) | x,y,z
rms_norm | x=m,y=w | F.rms_norm(x, y) | F.rms_norm(x, y.shape, y, 1e-6) | x,y
channel_norm | x=img,y=c4,z=c4 | F.group_norm(x, 2, y, z) | = | x,y,z
conv | x=img,y=f | F.conv2d(x, y, nil, { padding = 1 }) | F.conv2d(x, y, padding=1) | x,y
conv_transpose | x=img,y=f | F.conv_transpose2d(x, y) | = | x,y
pad | x=m | F.pad(x, { 1, 2 }) | F.pad(x, (1, 2)) | x
resample | x=img | F.interpolate(x, { scale_factor = 2 }) | F.interpolate(x, scale_factor=2) | x
max_pool | x=img | F.max_pool2d(x, 2) | = | x
dropout | x=v | F.dropout(x, 0.1) | = | x
attention | x=a,y=a,z=a | F.attention(x, y, z) | F.scaled_dot_product_attention(x, y, z) | x,y,z
Tensor.var | x=m | x:var(-1) | = | x
Tensor.std | x=m | x:std(-1) | = | x
linalg.vector_norm | x=v | x:norm() | torch.linalg.vector_norm(x) | x
logsumexp | x=m | x:logsumexp(-1) | = | x
roll | x=m | x:roll(1, 0) | = | x
Tensor.repeat | x=m | x:tile(2, 1) | x.repeat(2, 1) | x
sort | x=v | x:sort() | = | x
eye | x=w | ps.eye(x:size(0)) | =
linspace | x=v | ps.linspace(0, 1, x:size(0)) | =
einsum | x=m,y=m | ps.einsum("ij,jk->ik", x, y) | = | x,y
nn.functional.one_hot | i=h | ps.one_hot(i, 16) | F.one_hot(i, 16)
masked_fill | x=v,c=b | x:masked_fill(c, 0) | = | x
masked_select | x=v,c=b | x:masked_select(c) | = | x
masked_scatter | x=v,c=b,y=v | x:masked_scatter(c, y) | = | x,y
index_select | x=m,i=j | x:index_select(0, i) | = | x
index_select | x=r,i=k | x[i] | = | x
index_select | x=m,i=j,k=j | x[{ i, k }] | x[i, k] | x
index_put | x=m,i=j,y=w | x:index_put({ i, i }, y) | x.index_put((i, i), y) | x,y
index_add | x=r,i=k,y=r | x:index_add(0, i, y) | = | x,y
index_copy | x=r,i=perm,y=r | x:index_copy(0, i, y) | = | x,y
index_fill | x=r,i=k | x:index_fill(0, i, 2) | = | x
nonzero | x=b | x:nonzero() | =
split | x=m | x:split(2) | =
chunk | x=m | x:chunk(2) | =
stack | x=v,y=v | ps.stack({ x, y }) | torch.stack([x, y]) | x,y
nn.functional.mse_loss | x=v,y=v | F.mse_loss(x, y) | = | x
nn.functional.l1_loss | x=v,y=v | F.l1_loss(x, y) | = | x
nn.functional.binary_cross_entropy | x=p,y=p | F.binary_cross_entropy(x, y) | = | x
logit_entropy | x=v,y=p | F.binary_cross_entropy_with_logits(x, y) | = | x
nn.functional.kl_div | x=v,y=p | F.kl_div(x, y, { reduction = "sum" }) | F.kl_div(x, y, reduction="sum") | x
nn.functional.nll_loss | x=r,y=h | F.nll_loss(x, y) | = | x
nn.functional.smooth_l1_loss | x=v,y=v | F.smooth_l1_loss(x, y) | = | x
nn.functional.huber_loss | x=v,y=v | F.huber_loss(x, y) | = | x
nn.functional.selu | x=v | F.selu(x) | = | x
nn.functional.hardtanh | x=v | F.hardtanh(x) | = | x
nn.functional.relu6 | x=v | F.relu6(x) | = | x
mish | x=v | F.mish(x) | = | x
logsigmoid | x=v | F.logsigmoid(x) | = | x
hardsigmoid | x=v | F.hardsigmoid(x) | = | x
hardswish | x=v | F.hardswish(x) | = | x
nn.functional.softsign | x=v | F.softsign(x) | = | x
nn.functional.glu | x=m | F.glu(x) | = | x
prelu | x=v,y=one | F.prelu(x, y) | = | x,y
nn.functional.celu | x=v | F.celu(x) | = | x
nn.functional.softmin | x=m | F.softmin(x, -1) | = | x
nn.functional.pixel_shuffle | x=img | F.pixel_shuffle(x, 2) | = | x
nn.functional.dropout1d | x=sig | F.dropout1d(x, 0.1) | = | x
nn.functional.dropout2d | x=img | F.dropout2d(x, 0.1) | = | x
nn.functional.embedding_bag | x=r,i=bag | F.embedding_bag(i, x) | = | x
nn.functional.normalize | x=m | F.normalize(x) | = | x
nn.functional.cosine_similarity | x=m,y=m | F.cosine_similarity(x, y) | = | x,y
cumprod | x=mu | x:cumprod(1) | = | x
isnan | x=v | x:isnan() | =
isinf | x=v | x:isinf() | =
lerp | x=v,y=v | x:lerp(y, 0.3) | = | x,y
argsort | x=m | x:argsort() | =
isclose | x=v,y=v | x:isclose(y) | =
allclose | x=v,y=v | x:allclose(y) | =
equal | x=v | x:equal(x) | torch.equal(x, x.view(-1))
unbind | x=four | x:unbind(0) | =
diag | x=w | x:diag() | = | x
outer | x=w,y=w | x:outer(y) | = | x,y
remainder | x=v,y=u | x:remainder(y) | =
fmod | x=v,y=u | x:fmod(y) | =
trunc | x=v | x:trunc() | =
Tensor.unflatten | x=r | x:unflatten(1, { 4, 4 }) | x.unflatten(1, (4, 4)) | x
Tensor.expand_as | x=w,y=m | x:expand_as(y) | =
repeat_interleave | x=w | x:repeat_interleave(2) | = | x
cdist | x=d16,y=d16 | ps.cdist(x, y) | = | x
nn.functional.pairwise_distance | x=m,y=m | F.pairwise_distance(x, y) | = | x
bincount | i=i | i:bincount() | =
count_nonzero | x=v | x:count_nonzero() | =
unique | x=i | x:unique() | =
median | x=v | x:median() | = | x
quantile | x=v | x:quantile(0.3) | =
searchsorted | x=w,y=v | ps.searchsorted(x, y) | =
bucketize | x=v,y=w | x:bucketize(y) | torch.bucketize(x, y)
nan_to_num | x=v | x:nan_to_num() | =
Tensor.unfold | x=v | x:unfold(0, 4, 2) | x.unfold(0, 4, 2).contiguous() | x
movedim | x=r | x:movedim(0, 1) | =
diagonal | x=m | x:diagonal() | =
tril_indices | x=w | ps.tril_indices(x:size(0), 4) | =
meshgrid | x=w,y=w | ps.meshgrid({ x, y }) | torch.meshgrid(x, y, indexing="ij")
Tensor.new_zeros | x=v | x:new_zeros(x:shape()) | x.new_zeros(x.shape)
addcmul | x=v,y=v,z=v | x:addcmul(y, z, 0.5) | x.addcmul(y, z, value=0.5) | x,y,z
addmm | x=w,y=m,z=m | x:addmm(y, z) | = | x,y,z
dot | x=v,y=v | x:dot(y) | = | x,y
mv | x=m,y=w | x:mv(y) | = | x,y
diff | x=v | x:diff() | = | x
floor_divide | x=v,y=u | x:floor_divide(y) | =
log2 | x=u | x:log2() | = | x
any | x=b | x:any() | =
all | x=b | x:all() | =
max | x=m | x:max(1) | = | x
square | x=v | x:square() | = | x
squeeze | x=one | x:squeeze() | =
Tensor.lerp_ | x=v,y=v | x:lerp_(y, 0.3) | =
zeros_like | x=v | ps.zeros_like(x) | =
ones_like | x=v | ps.ones_like(x) | =
empty_like | x=v | ps.empty_like(x) | =
full_like | x=v | ps.full_like(x, 2) | =
rand_like | x=v | ps.rand_like(x) | =
randn_like | x=v | ps.randn_like(x) | =
randperm | x=v | ps.randperm(x:size(0)) | =
bernoulli | x=p | x:bernoulli() | =
multinomial | x=p | x:multinomial(4) | =
nn.functional.conv1d | x=sig,y=f1 | F.conv1d(x, y) | = | x,y
nn.functional.avg_pool2d | x=img | F.avg_pool2d(x, 2) | = | x
nn.functional.adaptive_avg_pool2d | x=img | F.adaptive_avg_pool2d(x, 1) | = | x
swapaxes | x=m | x:swapaxes(0, 1) | =
triu_indices | x=w | ps.triu_indices(x:size(0), 4) | =
addcdiv | x=v,y=v,z=u | x:addcdiv(y, z, 0.5) | x.addcdiv(y, z, value=0.5) | x,y,z
log10 | x=u | x:log10() | = | x
min | x=v,y=v | ps.min(x, y) | =
unsqueeze | x=v | x:unsqueeze(0) | =
flatten | x=m | x:flatten() | =
clip | x=v | x:clip(-1, 1) | =
Tensor.fill_diagonal_ | x=m | x:fill_diagonal_(1) | =
nn.functional.triplet_margin_loss | x=m,y=m,z=m | F.triplet_margin_loss(x, y, z) | = | x,y,z
nn.functional.margin_ranking_loss | x=v,y=v,z=v | F.margin_ranking_loss(x, y, z) | = | x,y
nn.functional.cosine_embedding_loss | x=m,y=m,z=sg | F.cosine_embedding_loss(x, y, z) | = | x,y
nn.functional.hinge_embedding_loss | x=v,y=v | F.hinge_embedding_loss(x, y) | = | x
nn.functional.gaussian_nll_loss | x=v,y=v,z=u | F.gaussian_nll_loss(x, y, z) | = | x,z
randint_like | x=v | ps.randint_like(x, 9) | =
nn.functional.conv_transpose1d | x=sig,y=f1 | F.conv_transpose1d(x, y) | = | x,y
nn.functional.max_pool1d | x=sig | F.max_pool1d(x, 2) | = | x
nn.functional.avg_pool1d | x=sig | F.avg_pool1d(x, 2) | = | x
nn.functional.adaptive_avg_pool1d | x=sig | F.adaptive_avg_pool1d(x, 2) | = | x
nn.functional.adaptive_max_pool1d | x=sig | F.adaptive_max_pool1d(x, 2) | = | x
nn.functional.adaptive_max_pool2d | x=img | F.adaptive_max_pool2d(x, 1) | = | x
nn.functional.group_norm | x=img | F.group_norm(x, 4) | = | x
item | x=one | x:item() | =
]]

local list = {}
for line in CASES:gmatch "[^\n]+" do
  local fields = {}
  for field in (line .. "|"):gmatch "%s*(.-)%s*|" do fields[#fields + 1] = field end
  local op, inputs, ours, theirs, grads = unpack(fields)
  if theirs == "=" then theirs = ours:gsub("ps%.", "torch."):gsub(":", "."):gsub("%^", "**") end
  list[#list + 1] = { op = op, inputs = inputs, ours = ours, theirs = theirs, grads = grads or "" }
end

-- Patterns of the names in docs/pytorch.md that have no call in this file. The keys are the reasons why.
local LEFT_OUT = {
  ["updates of parameters: bench/optim.lua and bench/adam.lua measure them"] = { "_$", "^optim%." },
  ["parts of updates and of checkpoints"] = { "^scale_by_$", "^sq_norms$", "^grad_store$", "^remainder_" },
  ["modules call the functions that are measured"] = { "^nn%.%u" },
  ["other kinds of functions: modes, hooks, files, initial values"] = { "grad", "autocast", "checkpoint$", "backward$",
    "hook$", "^autograd%.", "^save$", "^load$", "^manual_seed$", "^nn%.init%." },
  ["messages between ranks: bench/dist.lua measures them"] = { "^all_", "^reduce_scatter$", "^broadcast$" },
  ["copies between devices: bench/gpu_offload.lua measures them"] = { "^to_device$" },
}

return { cases = list, left_out = LEFT_OUT }
