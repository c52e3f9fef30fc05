-- SPDX-License-Identifier: BSD-3-Clause
-- Unknown options are errors that name the nearest option (caller.options). Every function that takes options is
-- called with an unknown one, and the sources are searched for functions that do not check their options.
local ps = require "ps"
local fails = require("spec.check_lib").fails
local paths = require "ps.paths"
local gpt2 = require "models.gpt2"
local tokenizer_lib = require "spec.tokenizer_lib"
local F, nn, optim, sched = ps.F, ps.nn, ps.optim, ps.sched

local x = ps.randn { 2, 3 }
local heads = ps.randn { 1, 2, 4, 8 }
local function model() return nn.Linear(3, 3) end
local function adam() return optim.AdamW(nn.Linear(3, 3), { lr = 0.1 }) end
local function with(options, more)
  for key, value in pairs(more) do options[key] = value end
  return options
end
local function engine(options)
  return ps.initialize { quiet = true, model_func = model,
    config = with({ optimizer = { type = "AdamW" }, plan_print = false }, options or {}) }
end

local function tokenizer()
  local path = tokenizer_lib.gpt2 {}
  local tok = ps.tokenizer.from_pretrained(path)
  tokenizer_lib.remove(path)
  return tok
end

-- Rows of the function's name for caller.options, an unknown option, the intended option (false if none is similar),
-- and the call. One source line can have several names ("sched." .. name); `source` is the expression in that line.
local CALLS = {
  { "F.linear", "residul", "residual", function(o) F.linear(x, ps.ones { 4, 3 }, nil, o) end },
  { "topk", "larges", "largest", function(o) x:topk(1, o) end },
  { "add", "aplha", "alpha", function(o) x:add(x, o) end, source = "call" },
  { "isclose", "rtl", "rtol", function(o) x:isclose(x, o) end, source = "call" },
  { "F.smooth_l1_loss", "bta", "beta", function(o) F.smooth_l1_loss(x, x, o) end },
  { "F.huber_loss", "dlta", "delta", function(o) F.huber_loss(x, x, o) end },
  { "F.triplet_margin_loss", "margins", "margin", function(o) F.triplet_margin_loss(x, x, x, o) end },
  { "F.margin_ranking_loss", "margins", "margin", function(o) F.margin_ranking_loss(x, x, x, o) end },
  { "F.cosine_embedding_loss", "margins", "margin", function(o) F.cosine_embedding_loss(x, x, x, o) end },
  { "F.hinge_embedding_loss", "margins", "margin", function(o) F.hinge_embedding_loss(x, x, o) end },
  { "F.gaussian_nll_loss", "ful", "full", function(o) F.gaussian_nll_loss(x, x, x, o) end },
  { "ps.randperm", "dtyp", "dtype", function(o) ps.randperm(3, o) end },
  { "ps.full_like", "dtyp", "dtype", function(o) ps.full_like(x, 1, o) end },
  { "ps.randint_like", "dtyp", "dtype", function(o) ps.randint_like(x, 0, 2, o) end, source = "call" },
  { "ps.rand_like", "dtyp", "dtype", function(o) ps.rand_like(x, o) end, source = "call" },
  { "index_add", "aplha", "alpha", function(o) x:index_add(0, ps.arange(2), x, o) end },
  { "optimizer:zero_grad", "set_to_non", "set_to_none", function(o) adam():zero_grad(o) end, source = "call" },
  { "F.mlp", "outin", "out_in", function(o) F.mlp(x, ps.ones { 4, 3 }, nil, ps.ones { 3, 4 }, nil, o) end },
  { "F.cross_entropy", "label_smothing", "label_smoothing", function(o)
    F.cross_entropy(x, ps.tensor({ 1, 1 }, "int64"), o)
  end },
  { "F.lm_loss", "reductn", "reduction", function(o)
    F.lm_loss(x, ps.ones { 4, 3 }, ps.tensor({ 1, 1 }, "int64"), o)
  end },
  { "backward", "retain_grap", "retain_graph", function(o) x:requires_grad(true):backward(x, o) end, source = "call" },
  { "ps.autograd.grad", "retain_grap", "retain_graph", function(o) ps.autograd.grad(x, x, o) end, source = "call" },
  { "ps.autograd.gradcheck", "epss", "eps", function(o) ps.autograd.gradcheck(F.gelu, x, o) end, source = "call" },
  { "ps.autograd.Function", "fowards", "forward", function(o) ps.autograd.Function(o) end },
  { "F.attention", "casual", "causal", function(o) F.attention(heads, heads, heads, o) end },
  { "F.dropout", "fist", "first", function(o) F.dropout(heads, 0.5, true, o) end },
  { "F.attention_packed", "is_causal", "causal", function(o) F.attention_packed(ps.randn { 1, 2, 12 }, 2, o) end },
  { "lora.wrap", "alpa", "alpha", function(o) ps.lora.wrap(model(), o) end },
  { "lora.load", "nam", "name", function(o) ps.lora.load(model(), "/nowhere", o) end },
  { "preference.wrap", "bta", "beta", function(o) ps.preference.wrap(gpt2.new "tiny", o) end },
  { "preference.encode", "sq", "seq", function(o) ps.preference.encode({}, {}, o) end },
  { "preference.batch", "pd", "pad", function(o) ps.preference.batch({}, o) end },
  { "preference.reference", "pth", "path", function(o) ps.preference.reference(model(), {}, o) end },
  { "lora.merge_folder", "tsk", "task", function(o) ps.lora.merge_folder("a", "b", "c", o) end },
  { "unload_adapter", "mrge", "merge", function(o)
    local net = ps.nn.Sequential(ps.nn.Linear(3, 3))
    ps.lora.wrap(net):unload_adapter(o)
  end },
  { "model:micro_batches", "gathr", "gather", function(o)
    local m = engine()
    local ok, problem = pcall(m.micro_batches, m, x, x, o)
    m:close()
    if not ok then error(problem, 0) end
  end },
  { "ps.empty", "devcie", "device", function(o) ps.empty({ 2 }, o) end, source = "call" },
  { "ps.zeros", "dtipe", "dtype", function(o) ps.zeros({ 2 }, o) end, source = "call" },
  { "ps.ones", "dtipe", "dtype", function(o) ps.ones({ 2 }, o) end, source = "call" },
  { "ps.full", "dtipe", "dtype", function(o) ps.full({ 2 }, 1, o) end, source = "call" },
  { "ps.arange", "dtipe", "dtype", function(o) ps.arange(0, 3, 1, o) end, source = "call" },
  { "ps.randn", "require_grad", "requires_grad", function(o) ps.randn({ 2 }, o) end, source = "call" },
  { "ps.rand", "dtipe", "dtype", function(o) ps.rand({ 2 }, o) end, source = "call" },
  { "ps.randint", "dtipe", "dtype", function(o) ps.randint(0, 3, { 2 }, o) end, source = "call" },
  { "ps.tensor", "dtipe", "dtype", function(o) ps.tensor({ 2 }, o) end, source = "call" },
  { "group:gathered_linear", "pices", "pieces", function(o)
    local group = ps.dist.self()
    local ok, problem = pcall(group.gathered_linear, group, x, ps.ones { 4, 3 }, nil, o)
    group:close()
    if not ok then error(problem, 0) end
  end, source = '"group:" .. call' },
  { "group:gathered_linears", "pices", "pieces", function(o)
    local group = ps.dist.self()
    local ok, problem = pcall(group.gathered_linears, group, x, { { ps.ones { 4, 3 } } }, o)
    group:close()
    if not ok then error(problem, 0) end
  end, source = '"group:" .. call' },
  { "group:linear_scattered", "keep", false, function(o)
    local group = ps.dist.self()
    local ok, problem = pcall(group.linear_scattered, group, x, ps.ones { 4, 3 }, o)
    group:close()
    if not ok then error(problem, 0) end
  end, source = '"group:" .. call' },
  { "group:lm_loss", "word", "words", function(o)
    local group = ps.dist.self()
    local ok, problem = pcall(group.lm_loss, group, x, ps.ones { 4, 3 }, ps.zeros({ 2 }, { dtype = "int64" }),
      ps.ones { 3, 2 }, o)
    group:close()
    if not ok then error(problem, 0) end
  end },
  { "tensor:to", "dtipe", "dtype", function(o) x:to(o) end },
  { "module:to", "dtipe", "dtype", function(o) model():to(o) end },
  { "ps.materialize", "devise", "device", function(o) ps.materialize(ps.deferred(nn.Linear, 2, 2), o) end },
  { "shard.new", "block", "blocks", function(o) require("ps.tensor.shard").new(o) end },
  { "load_state_dict", "strickt", "strict", function(o) local m = model(); m:load_state_dict(m:state_dict(), o) end },
  { "state_dict", "ties", "tied", function(o) model():state_dict(o) end },
  { "nn.Linear", "biass", "bias", function(o) nn.Linear(2, 3, o) end },
  { "nn.Conv1D", "stdd", "std", function(o) nn.Conv1D(2, 3, o) end },
  { "F.conv1d", "strid", "stride", function(o) F.conv1d(heads[0], ps.ones { 4, 4, 1 }, nil, o) end, source = "call" },
  { "F.conv2d", "group", "groups", function(o) F.conv2d(heads, ps.ones { 4, 2, 1, 1 }, nil, o) end, source = "call" },
  { "F.conv_transpose1d", "outputpadding", "output_padding", function(o)
    F.conv_transpose1d(heads[0], ps.ones { 4, 4, 1 }, nil, o)
  end, source = "call" },
  { "F.conv_transpose2d", "padding_mode", false, function(o)
    F.conv_transpose2d(heads, ps.ones { 2, 4, 1, 1 }, nil, o)
  end, source = "call" },
  { "F.max_pool1d", "ceilmode", "ceil_mode", function(o) F.max_pool1d(heads[0], 2, o) end, source = "call" },
  { "F.max_pool2d", "return_index", "return_indices", function(o) F.max_pool2d(heads, 2, o) end, source = "call" },
  { "F.avg_pool1d", "divisor", false, function(o) F.avg_pool1d(heads[0], 2, o) end, source = "call" },
  { "F.avg_pool2d", "count_include_padding", "count_include_pad", function(o) F.avg_pool2d(heads, 2, o) end,
    source = "call" },
  { "F.interpolate", "scalefactor", "scale_factor", function(o) F.interpolate(heads, o) end },
  { "F.batch_norm", "trainin", "training", function(o) F.batch_norm(heads, nil, nil, nil, nil, o) end },
  { "nn.Conv1d", "biass", "bias", function(o) nn.Conv1d(2, 3, 1, o) end, source = "name" },
  { "nn.Conv2d", "paddingmode", "padding_mode", function(o) nn.Conv2d(2, 3, 1, o) end, source = "name" },
  { "nn.ConvTranspose1d", "strides", "stride", function(o) nn.ConvTranspose1d(2, 3, 1, o) end, source = "name" },
  { "nn.ConvTranspose2d", "padding_mode", false, function(o) nn.ConvTranspose2d(2, 3, 1, o) end, source = "name" },
  { "nn.MaxPool2d", "strides", "stride", function(o) nn.MaxPool2d(2, o) end, source = '"nn." .. name' },
  { "nn.AvgPool1d", "strides", "stride", function(o) nn.AvgPool1d(2, o) end, source = '"nn." .. name' },
  { "nn.Upsample", "modes", "mode", function(o) nn.Upsample(o) end },
  { "nn.BatchNorm1d", "momentun", "momentum", function(o) nn.BatchNorm1d(2, o) end, source = "name" },
  { "nn.BatchNorm2d", "afine", "affine", function(o) nn.BatchNorm2d(2, o) end, source = "name" },
  { "nn.SyncBatchNorm", "epss", "eps", function(o) nn.SyncBatchNorm(2, o) end, source = "name" },
  { "nn.InstanceNorm1d", "momentm", "momentum", function(o) nn.InstanceNorm1d(2, o) end, source = "name" },
  { "nn.PReLU", "inti", "init", function(o) nn.PReLU(1, o) end },
  { "nn.EmbeddingBag", "mod", "mode", function(o) nn.EmbeddingBag(2, 3, o) end },
  { "F.embedding_bag", "mod", "mode", function(o)
    F.embedding_bag(ps.zeros({ 1, 1 }, { dtype = "int64" }), ps.ones { 2, 2 }, nil, o)
  end, source = "call" },
  { "F.normalize", "dims", "dim", function(o) F.normalize(ps.ones { 2, 2 }, o) end },
  { "nn.init.kaiming_normal_", "mod", "mode", function(o) nn.init.kaiming_normal_(ps.ones { 2, 2 }, o) end,
    source = '"nn.init." .. name' },
  { "bincount", "min_length", "minlength", function(o) ps.zeros({ 1 }, { dtype = "int64" }):bincount(o) end },
  { "unique", "return_count", "return_counts", function(o) ps.ones({ 2 }):unique(o) end },
  { "quantile", "keepdims", "keepdim", function(o) ps.ones({ 2 }):quantile(0.5, o) end, source = "call" },
  { "searchsorted", "rigth", "right", function(o) ps.ones({ 2 }):searchsorted(1, o) end },
  { "bucketize", "rigth", "right", function(o) ps.ones({ 2 }):bucketize(ps.ones { 2 }, o) end },
  { "ps.meshgrid", "indexin", "indexing", function(o) ps.meshgrid({ ps.ones { 2 } }, o) end, source = "call" },
  { "new_zeros", "dtyp", "dtype", function(o) ps.ones({ 2 }):new_zeros({ 2 }, o) end, source = "call" },
  { "new_full", "dtyp", "dtype", function(o) ps.ones({ 2 }):new_full({ 2 }, 1, o) end },
  { "addcmul", "valeu", "value", function(o) ps.ones({ 2 }):addcmul(ps.ones { 2 }, ps.ones { 2 }, o) end,
    source = "call" },
  { "addmm", "apha", "alpha", function(o) ps.ones({ 2 }):addmm(ps.ones { 2, 2 }, ps.ones { 2, 2 }, o) end,
    source = "name" },
  { "nn.GroupNorm", "afine", "affine", function(o) nn.GroupNorm(1, 2, o) end },
  { "nn.ParallelLMHead's loss", "reductn", "reduction", function(o)
    local head = nn.ParallelLMHead(2, 4, { group = ps.dist.self() })
    head:loss(ps.randn { 1, 2 }, ps.zeros({ 1 }, { dtype = "int64" }), o)
  end },
  { "nn.LMHead", "bias", false, function(o) nn.LMHead(2, 3, o) end },
  { "nn.Embedding", "sparse", false, function(o) nn.Embedding(2, 3, o) end },
  { "nn.LayerNorm", "elementwise_afine", "elementwise_affine", function(o) nn.LayerNorm(3, o) end },
  { "nn.RMSNorm", "epsilon", false, function(o) nn.RMSNorm(3, o) end },
  { "nn.MultiheadSelfAttention", "is_causal", "causal", function(o) nn.MultiheadSelfAttention(4, 2, o) end },
  { "nn.MultiheadSelfAttention's forward", "maks", "mask", function(o)
    nn.MultiheadSelfAttention(4, 2)(ps.randn { 1, 2, 4 }, o)
  end },
  { "nn.MSELoss", "reductoin", "reduction", function(o) nn.MSELoss(o) end, source = '"nn." .. class_name' },
  { "nn.MultiheadAttention", "batchfirst", "batch_first", function(o) nn.MultiheadAttention(4, 2, o) end },
  { "nn.MultiheadAttention's forward", "attn_maks", "attn_mask", function(o)
    nn.MultiheadAttention(3, 1)(ps.zeros { 1, 1, 3 }, nil, nil, o)
  end },
  { "nn.TransformerEncoderLayer", "droput", "dropout", function(o) nn.TransformerEncoderLayer(4, 2, o) end,
    source = "call" },
  { "nn.TransformerDecoderLayer", "droput", "dropout", function(o) nn.TransformerDecoderLayer(4, 2, o) end,
    source = "call" },
  { "nn.TransformerEncoderLayer's forward", "src_maks", "src_mask", function(o)
    nn.TransformerEncoderLayer(4, 2)(ps.zeros { 1, 1, 4 }, o)
  end },
  { "nn.TransformerDecoderLayer's forward", "tgt_maks", "tgt_mask", function(o)
    nn.TransformerDecoderLayer(4, 2)(ps.zeros { 1, 1, 4 }, ps.zeros { 1, 1, 4 }, o)
  end },
  { "nn.TransformerEncoder", "nrm", "norm", function(o) nn.TransformerEncoder({ nn.Identity() }, 1, o) end },
  { "nn.TransformerDecoder", "nrm", "norm", function(o) nn.TransformerDecoder({ nn.Identity() }, 1, o) end },
  { "nn.TransformerEncoder's forward", "maks", "mask", function(o) nn.TransformerEncoder { nn.Identity() }(x, o) end },
  { "nn.TransformerDecoder's forward", "tgt_maks", "tgt_mask", function(o)
    nn.TransformerDecoder { nn.Identity() }(x, x, o)
  end },
  { "F.attention", "attn_mask", "mask", function(o) F.attention(heads, heads, heads, o) end },
  { "nn.LayerNorm", "torch_dtype", "dtype", function(o) nn.LayerNorm(4, o) end },
  { "F.attention_weights", "casual", "causal", function(o) F.attention_weights(heads, heads, heads, o) end },
  { "nn.MLP", "droput", "dropout", function(o) nn.MLP(4, 8, o) end },
  { "nn.ColumnParallelLinear", "gather_inputs", "gather_input", function(o) nn.ColumnParallelLinear(4, 8, o) end },
  { "nn.RowParallelLinear", "splitinput", "split_input", function(o) nn.RowParallelLinear(4, 8, o) end },
  { "nn.VocabParallelEmbedding", "paddin_idx", "padding_idx", function(o) nn.VocabParallelEmbedding(4, 8, o) end },
  { "nn.ParallelLMHead", "tie", "tied", function(o) nn.ParallelLMHead(4, 8, o) end },
  { "nn.ParallelLMHead's loss", "ignoreindex", "ignore_index", function(o)
    nn.ParallelLMHead(4, 8, { group = ps.dist.self() }):loss(ps.ones { 2, 4 }, ps.zeros({ 2 }):long(), o)
  end },
  { "nn.ParallelCrossEntropy", "word", "words", function(o) nn.ParallelCrossEntropy(o) end },
  { "AdamW", "learning_rate", false, function(o) optim.AdamW(model(), o) end, source = "call" },
  { "Adam", "beta", "betas", function(o) optim.Adam(model(), o) end, source = "call" },
  { "SGD", "momentun", "momentum", function(o) optim.SGD(model(), o) end, source = "call" },
  { "AdamW, group 1", "weight_decy", "weight_decay", function(o)
    optim.AdamW({ with(o, { params = model():parameters() }) }, { lr = 1 })
  end, source = "call" },
  { "optimizer:step", "max_nrom", "max_norm", function(o) adam():step(o) end },
  { "optim.GradScaler", "init_scale", "scale", function(o) optim.GradScaler(o) end },
  { "a loss scaler", "hysteresys", "hysteresis", function(o) require("ps.optim.loss_scaler").new(o) end },
  { "ps.data.tokens", "widht", "width", function(o) ps.data.tokens(paths.root .. "/README.md", o) end },
  { "ps.data.write_tokens", "widht", "width", function(o) ps.data.write_tokens("/nowhere/x.bin", { 1 }, o) end },
  { "ps.data.loader", "shufle", "shuffle", function(o)
    ps.data.loader(with(o, { file = paths.root .. "/README.md", batch = 1, seq = 4 }))
  end },
  { "ps.data.mix", "exhaustd", "exhausted", function(o)
    ps.data.mix({ { ps.data.table { { text = "a" } }, 1 } }, o)
  end },
  { "ps.data.windows", "drop_last", false, function(o)
    ps.data.windows(with(o, { file = paths.root .. "/README.md", batch = 1, seq = 4 }))
  end },
  { "tokenizer.from_pretrained", "encodin", "encoding", function(o) ps.tokenizer.from_pretrained("/nowhere", o) end },
  { "tokenizer", "paddin", "padding", function(o) tokenizer()("a", o) end },
  { "tokenizer:encode", "add_special_token", "add_special_tokens", function(o) tokenizer():encode("a", o) end },
  { "encode", "add_special_token", "add_special_tokens", function(o) ps.tokenizer.bytes():encode("a", o) end },
  { "tokenizer:render_chat", "train_onn", "train_on", function(o) tokenizer():render_chat({}, o) end },
  { "tokenizer:encode_buffer", "offsets", false, function(o) tokenizer():encode_buffer("a", o) end },
  { "tokenizer:encode_line", "add_special_token", "add_special_tokens", function(o)
    tokenizer():encode_line("a", o)
  end },
  { "tokenizer:batch_decode", "skip_special_token", "skip_special_tokens", function(o)
    tokenizer():batch_decode({ { 97 } }, o)
  end },
  { "ps.data.encode_file", "losy", "lossy", function(o)
    ps.data.encode_file("/nowhere", "/nowhere", ps.tokenizer.bytes(), o)
  end },
  { "tokenizer:encode_file", "fields", "field", function(o) tokenizer():encode_file("/nowhere", print, o) end },
  { "tokenizer:decode", "skip_special_token", "skip_special_tokens", function(o) tokenizer():decode({ 97 }, o) end },
  { "tokenizer:chat_template", "tool", "tools", function(o) tokenizer():chat_template(o) end },
  { "tokenizer:apply_chat_template", "add_generation_promt", "add_generation_prompt", function(o)
    tokenizer():apply_chat_template({}, o)
  end },
  { "template:render", "tool", "tools", function(o) ps.chat.template("x"):render({}, o) end, source = "call" },
  { "template:trained", "dat", "date", function(o) ps.chat.template("x"):trained({}, o) end, source = "call" },
  { "ps.data.table", "on_eror", "on_error", function(o) ps.data.table({}, o) end },
  { "ps.data.format", "chek", "check", function(o) ps.data.format(ps.data.table {}, o) end },
  { "ps.train.evaluate", "stopp", "stop", function(o) ps.train.evaluate(model(), function() end, o) end },
  { "ps.train.run", "early_stopping", false, function(o)
    ps.train.run(with(o, { model = model(), optimizer = adam(), loader = {}, steps = 0 }))
  end },
  { "ps.train.run: eval", "evry", "every", function(o)
    ps.train.run { model = model(), optimizer = adam(), loader = {}, steps = 0, eval = o }
  end },
  { "ps.train.run: callbacks", "evaluat", "evaluate", function(o)
    ps.train.run { model = model(), optimizer = adam(), loader = {}, steps = 0, callbacks = o }
  end },
  { "ps.train.run: checkpoint", "evry", "every", function(o)
    ps.train.run { model = model(), optimizer = adam(), loader = {}, steps = 0, checkpoint = o }
  end },
  { "ps.checkpoints.save", "asynch", "async", function(o)
    ps.checkpoints.save("/nowhere", with(o, { model = model() }))
  end, source = '"ps.checkpoints." .. call' },
  { "ps.checkpoints.new_run", "forc", "force", function(o) ps.checkpoints.new_run("/nowhere", o) end },
  { "ps.checkpoints.load", "verfy", "verify", function(o)
    ps.checkpoints.load("/nowhere", with(o, { model = model() }))
  end, source = '"ps.checkpoints." .. call' },
  { "ps.load", "lasy", "lazy", function(o) ps.load("/nowhere", o) end },
  { "ps.safetensors.open", "verfy", "verify", function(o) ps.safetensors.open("/nowhere", o) end },
  { "ps.safetensors.save", "checksum", "checksums", function(o) ps.safetensors.save("/nowhere/x", {}, nil, o) end },
  { "torch_pt.open", "verfy", "verify", function(o) require("ps.io.torch_pt").open("/nowhere", o) end },
  { "merge.run", "stric", "strict", function(o)
    require("ps.checkpoints.merge").run({ "/nowhere.pt" }, with(o, { out = "x.pt" }))
  end },
  { "ps.chunks", "kinds", "kind", function(o) ps.chunks(o) end },
  { "ps.trace", "actoin", "action", function(o) ps.trace(o) end },
  { "ps.pretty.format", "widht", "width", function(o) ps.pretty.format({}, o) end },
  { "plot.text", "widht", "width", function(o) require("ps.train.plot").text({}, o) end },
  { "plot.png", "titel", "title", function(o) require("ps.train.plot").png("/nowhere/x.png", {}, o) end },
  { "ps.memory", "devise", "device", function(o) ps.memory(o) end },
  { "ps.profiler.start", "event", "events", function(o) ps.profiler.start(o) end },
  { "planning.plan", "hardwar", "hardware", function(o) require("ps.planning").plan(o) end },
  { "ps.profiler.save", "allign", "align", function(o) ps.profiler.save("unwritten.json", o) end },
  { "ps.profiler.report", "bi", "by", function(o) ps.profiler.report(o) end },
  { "ps.progress.new", "quite", "quiet", function(o) ps.progress.new(with(o, { total = 3 })) end },
  { "chunk layout", "capacty", "capacity", function(o) require("ps.engine.layout.pack").search({}, o) end },
  { "layout.pack", "lokback", "lookback", function(o)
    require("ps.engine.layout.pack").pack({ { name = "a", numel = 4, dtype = "fp32", trains = true } }, 1024, o)
  end },
  { "ps.init_distributed", "rendevous", "rendezvous", function(o) ps.init_distributed(o) end },
  { "config.read", "world_sise", "world_size", function(o) require("ps.config").read({}, o) end },
  { "ps.data.iterate", "seek", "seeks", function(o) ps.data.iterate(print, o) end, source = "CALL" },
  { "module:buffer", "persistant", "persistent", function(o) model():buffer("seen", ps.ones { 1 }, o) end },
  { "ps.initialize", "param_group", "param_groups", function(o)
    ps.initialize(with(o, { model_func = model, config = {} }))
  end },
  { "sched.get_scheduler", "num_warmup_step", "num_warmup_steps", function(o)
    sched.get_scheduler(with(o, { name = "linear", optimizer = adam() }))
  end },
  { "sched.ChainedScheduler", "scheduler", "schedulers", function(o)
    o.schedulers = {}
    sched.ChainedScheduler(o)
  end },
  { "sched.constant", "min_lr", "max_lr", function(o)
    sched.constant(with(o, { optimizer = adam(), max_lr = 1 }))
  end, source = '"sched." .. name' },
  { "gpt2", "dtipe", "dtype", function(o) gpt2.GPT2(gpt2.presets.tiny, o) end, source = "who" },
  { "gpt2: a batch by names", "label", "labels", function(o) gpt2.new("tiny")(o) end,
    source = 'who .. ": a batch by names"' },
  { "gpt2.new", "n_embed", "n_embd", function(o) gpt2.new(o) end, source = 'who .. ".new"' },
  { "gpt2.new", "n_layers", "n_layer", function(o) gpt2.new("tiny", o) end, source = 'who .. ".new"' },
  { "from_config", "tas", "task", function(o)
    ps.from_config({ model_type = "gpt2" }, o)
  end },
  { "from_pretrained", "num_label", "num_labels", function(o)
    gpt2.new("tiny"):save_pretrained "/tmp/ps_options_hf"
    local ok, problem = pcall(ps.from_pretrained, "/tmp/ps_options_hf", o)
    os.execute "rm -rf /tmp/ps_options_hf"
    assert(ok, problem)
  end },
  { "pipe.table", "micro_batch", "micro_batches", function(o)
    require("ps.parallel.pipeline.table").table(with(o, { schedule = "gpipe", stages = 2, micro_batches = 2 }))
  end },
  { "save_parallelized", "merge_checkpoint", "merge_checkpoints", function(o)
    gpt2.new("tiny"):save_parallelized("/tmp/ps_options_oslo", o)
  end },
  { "quantize", "tpe", "type", function(o) ps.quantize(nn.Linear(64, 2), o) end },
  { "serve.run", "prt", "port", function(o) require("ps.serve").run(nil, nil, o) end },
  { "gguf convert", "tpe", "type", function(o) require("ps.lora.merge_folder").convert("a", "b", o) end },
  { "save_gguf", "tpe", "type", function(o) gpt2.new("tiny"):save_gguf("/tmp/ps_options.gguf", o) end },
  { "gguf.open", "mmp", "mmap", function(o) require("ps.io.gguf").open("/nowhere.gguf", o) end },
  { "ps.evaluate.f1", "averag", "average", function(o) ps.evaluate.f1({ 1 }, { 1 }, o) end },
  { "ps.evaluate.run", "strid", "stride", function(o) ps.evaluate.run(model(), tokenizer(), o) end, source = "call" },
  { "save_pretrained", "max_size", false, function(o) gpt2.new("tiny"):save_pretrained("/tmp/ps_options_hf", o) end },
  { "F.embedding", "padding_index", "padding_idx", function(o) F.embedding(ps.tensor({ 1 }, "int64"), x, o) end },
  { "F.mse_loss", "reduce", false, function(o) F.mse_loss(x, x, o) end },
  { "F.l1_loss", "reductoin", "reduction", function(o) F.l1_loss(x, x, o) end },
  { "F.binary_cross_entropy", "reductoin", "reduction", function(o) F.binary_cross_entropy(x, x, o) end },
  { "F.binary_cross_entropy_with_logits", "posweight", "pos_weight", function(o)
    F.binary_cross_entropy_with_logits(x, x, o)
  end },
  { "ps.eye", "dtpye", "dtype", function(o) ps.eye(2, o) end },
  { "ps.linspace", "dtpye", "dtype", function(o) ps.linspace(0, 1, 3, o) end },
  { "F.kl_div", "logtarget", "log_target", function(o) F.kl_div(x, x, o) end },
  { "F.nll_loss", "wieght", "weight", function(o) F.nll_loss(x, ps.tensor({ 1, 1 }, "int64"), o) end },
  { "generate", "num_baems", "num_beams", function(o) gpt2.new("tiny"):generate({ 1 }, 1, o) end },
  { "optimizer:step of an engine", "max_norm", false, function(o)
    local _, optimizer = engine()
    optimizer:step(o)
  end },
  { "optimizer:step of an engine", "max_norm", false, function(o)
    local _, optimizer = engine { memory = "plain" }
    optimizer:step(o)
  end },
  { "model:backward", "wieght", "weight", function(o)
    local m = engine()
    m:backward(m(x):sum(), o)
  end },
  { "model:backward", "wieght", "weight", function(o)
    local m = engine { memory = "plain" }
    m:backward(m(x):sum(), o)
  end },
}

-- The calls of ps.bmt.
local bmt = require "ps.bmt"
local function in_run(fn)
  return function(o)
    bmt.init_distributed { quiet = true }
    local ok, problem = pcall(fn, o)
    bmt.close()
    if not ok then error(problem, 0) end
  end
end
for _, call in ipairs {
  { "bmt.init_distributed", "pipe_sise", "pipe_size", function(o) bmt.init_distributed(o) end },
  { "bmt.DistributedParameter", "init_metod", "init_method", in_run(function(o) bmt.DistributedParameter(x, o) end) },
  { "bmt.CheckpointBlock", "use_checkpont", "use_checkpoint", in_run(function(o) bmt.Block(model(), o) end) },
  { "bmt.TransformerBlockList", "num_hiden", "num_hidden", in_run(function(o)
    bmt.TransformerBlockList({ model() }, o)
  end), source = '"bmt." .. self.class_name' },
  { "a call of bmt.TransformerBlockList", "return_hidden_state", "return_hidden_states", in_run(function(o)
    bmt.TransformerBlockList { model() }(x, o)
  end), source = '"a call of bmt." .. self.class_name' },
  { "bmt.optim.AdamOptimizer", "hold_step", "hold_steps", in_run(function(o) bmt.optim.AdamOptimizer({ x }, o) end),
    source = '"bmt.optim." .. name' },
  { "bmt.optim.AdamOffloadOptimizer", "weight_decy", "weight_decay", in_run(function(o)
    bmt.optim.AdamOffloadOptimizer({ x }, o)
  end), source = '"bmt.optim." .. name' },
  { "a group of bmt.optim", "parms", "params", in_run(function(o) bmt.optim.AdamOptimizer { o } end) },
  { "bmt.nn.OpParallelLinear", "gather_imput", "gather_input", in_run(function(o)
    bmt.nn.OpParallelLinear(x, x, nil, o)
  end) },
  { "bmt.nn.Linear", "bais", "bias", in_run(function(o) bmt.nn.Linear(2, 2, o) end) },
  { "bmt.nn.ColumnParallelLinear", "gather_ouput", "gather_output", in_run(function(o)
    bmt.nn.ColumnParallelLinear(2, 2, o)
  end) },
  { "bmt.nn.RowParallelLinear", "split_imput", "split_input", in_run(function(o)
    bmt.nn.RowParallelLinear(2, 2, o)
  end) },
  { "bmt.nn.VPEmbedding", "init_sdt", "init_std", in_run(function(o) bmt.nn.VPEmbedding(2, 2, o) end) },
  { "bmt.nn.ParallelCrossEntropy", "ignore_indx", "ignore_index", in_run(function(o)
    bmt.nn.ParallelCrossEntropy(o)
  end) },
  { "bmt.optim.OptimManager", "los_scale", "loss_scale", in_run(function(o) bmt.optim.OptimManager(o) end) },
  { "OptimManager:clip_grad_norm", "norm_typ", "norm_type", in_run(function(o)
    bmt.optim.OptimManager():clip_grad_norm({}, 1, o)
  end) },
  { "bmt.lr_scheduler.Noam", "warmup_itr", "warmup_iter", function(o)
    bmt.lr_scheduler.Noam({ param_groups = {} }, o)
  end, source = '"bmt.lr_scheduler." .. name' },
  { "bmt.loss.FusedCrossEntropy", "ignore_indx", "ignore_index", function(o) bmt.loss.FusedCrossEntropy(o) end },
  { "bmt.save", "non_bloking", "non_blocking", in_run(function(o) bmt.save(model(), "none.pt", o) end) },
  { "bmt.load", "strct", "strict", in_run(function(o) bmt.load(model(), "none.pt", o) end) },
} do
  CALLS[#CALLS + 1] = call
end

-- Functions with a parameter called `options` that scripts do not call. They get options that another function has
-- checked.
local INNER = {
  ["lua/ps/bmt/lists.lua"] = "PipelineTransformerBlockList:init",
  ["lua/ps/parallel/tensor/layers.lua"] = "region_of",
  ["lua/ps/lora/files.lua"] = "save_merged adapters_of.Adapters:save_pretrained files.convert",
  ["lua/ps/lora/init.lua"] = "lora.load lora.from_pretrained lora.merge_folder",
  ["lua/ps/lora/merge_folder.lua"] = "stream write_folder", ["lua/ps/lora/gguf.lua"] = "gguf.write",
  ["lua/ps/lora/layers.lua"] = "head_loss", ["lua/ps/nn/packed.lua"] = "head_loss",
  ["lua/ps/bmt/optim.lua"] = "optim.AdamOptimizer",
  ["lua/ps/checkpoints/restore.lua"] = "*", ["lua/ps/checkpoints/rank_files.lua"] = "*",
  ["lua/ps/engine/layout/pack.lua"] = "pack_best judge range check_options",
  ["lua/ps/tensor/create.lua"] = "bare dtype_of device_of empty M.full",
  ["lua/ps/data/init.lua"] = "shards_of range_of small", ["lua/ps/data/text_rows.lua"] = "rows.fill",
  ["lua/ps/data/table.lua"] = "of_file", ["lua/ps/chat/json.lua"] = "*",
  ["lua/ps/chat/init.lua"] = "variables_of generation_prompt",
  ["lua/ps/engine/layout/build.lua"] = "build.place", ["lua/ps/engine/layout/rechunk.lua"] = "move least_set",
  ["lua/ps/engine/plan/shortage.lua"] = "*",
  ["lua/ps/engine/init.lua"] = "Engine:load_state_dict Engine:backward Engine:save_pretrained Engine:save_parallelized "
    .. "Engine:save_gguf",
  ["lua/ps/engine/step/backward.lua"] = "step.weight_of step.backward check_kept",
  ["lua/ps/tensor/functional.lua"] = "reduction_of first_head",
  ["lua/ps/tensor/like.lua"] = "T:new_full",
  ["lua/ps/tensor/shapes.lua"] = "T:addcmul T:addcdiv",
  ["lua/ps/tensor/images.lua"] = "F.conv1d F.conv2d F.conv_transpose1d F.conv_transpose2d pooling F.max_pool1d "
    .. "F.max_pool2d F.avg_pool1d F.avg_pool2d",
  ["lua/ps/nn/conv.lua"] = "*", ["lua/ps/nn/channel_norm.lua"] = "BatchNorm:init BatchNorm1d:init BatchNorm2d:init",
  ["lua/ps/memory/view.lua"] = "check_filter",
  ["lua/ps/checkpoints/merge.lua"] = "merged", ["lua/ps/nn/transformer.lua"] = "of_linear",
  ["lua/ps/nn/encoder.lua"] = "EncoderLayer:init DecoderLayer:init",
  ["lua/ps/optim/init.lua"] = "build optim.Adam optim.AdamW optim.SGD", ["lua/ps/optim/sched.lua"] = "*",
  ["lua/ps/optim/sched_torch.lua"] = "*", ["lua/ps/optim/sched_hugging_face.lua"] = "*",
  ["lua/ps/optim/schedule.lua"] = "*",
  ["lua/ps/train/init.lua"] = "gradients train.run schedule_of check_schedule", ["models/gpt2.lua"] = "GPT2:generate",
  ["lua/ps/tokenizer/description.lua"] = "description.add_token", ["lua/ps/tokenizer/text.lua"] = "text.open",
  ["lua/ps/tokenizer/init.lua"] = "tokenizer.from_pretrained",
  ["models/llama.lua"] = "CausalLM:generate",
  ["lua/ps/engine/own_state.lua"] = "*",                  -- Module:load_state_dict checks the options
  ["lua/ps/pretrained/generate.lua"] = "*", ["lua/ps/pretrained/model.lua"] = "asked Model:save_gguf",
  ["lua/ps/data/files.lua"] = "files.open",
  ["lua/ps/evaluate/init.lua"] = "windows_of TASKS.perplexity TASKS.choices TASKS.answers evaluate.run "
    .. "evaluate.callback",
  ["lua/ps/evaluate/likelihood.lua"] = "likelihood.sums",
  ["lua/ps/pretrained/init.lua"] = "family.from_pretrained", ["lua/ps/memory/trace.lua"] = "trace.trace",
  ["lua/ps/memory/views.lua"] = "views.chunks",
  ["lua/ps/init.lua"] = "ps.trace ps.load ps.from_pretrained ps.from_config ps.quantize",
}

local function sources()
  local list = {}
  local p = assert(io.popen(("cd '%s' && find lua models -name '*.lua' | sort"):format(paths.root)))
  for path in p:lines() do
    local f = assert(io.open(paths.root .. "/" .. path))
    list[path] = f:read("*a")
    f:close()
  end
  p:close()
  return list
end

describe("an unknown option of a function", function()
  after_each(function()
    local open = require("ps.engine.setup").current()
    if open then open:close() end
  end)

  for i, call in ipairs(CALLS) do
    it(("is refused by %s (%d): %s"):format(call[1], i, call[2]), function()
      local said = tostring(fails(function() call[4] { [call[2]] = true } end,
        ("%s: no option '%s'"):format(call[1], call[2])))
      local near = said:match("did you mean '([%w_]+)'")
      assert.equal(call[3] or nil, near, said)
      assert.truthy(said:find("^[^\n]*options_spec%.lua:%d+: "), said)
    end)
  end

  it("has a row above for every function that takes options", function()
    local known, missing = {}, {}
    for _, call in ipairs(CALLS) do known[call.source or '"' .. call[1] .. '"'] = true end
    for path, text in pairs(sources()) do
      for args in text:gmatch("caller%.options(%b())") do
        local name = args:match("^%([^,]+, (.-), [^,]+%)$")
        if path ~= "lua/ps/core/caller.lua" and not (name and known[name]) then
          missing[#missing + 1] = path .. " " .. args
        end
      end
    end
    assert.same({}, missing)
  end)
end)

describe("a function that takes options", function()
  it("checks them, by a list of names", function()
    local unchecked, all = {}, sources()
    all["lua/ps/core/caller.lua"] = nil
    for path, text in pairs(all) do
      for indent, name, params, body in text:gmatch("\n( *)[%w =]*function ?([%w_.:]*)(%b())(.-\n)%f[^\n]%1end") do
        local inner = INNER[path] or ""
        if params:find("%f[%w]options%f[%W]") and not body:find("options%(options") and inner ~= "*"
          and not (" " .. inner .. " "):find(" " .. name .. " ", 1, true) then
          unchecked[#unchecked + 1] = ("%s: %s%s%s"):format(path, indent, name, params)
        end
      end
    end
    assert.same({}, unchecked)
  end)

  it("names the value of an option and its valid values", function()
    fails(function() nn.Linear(2, 3, { bias = 3 }) end, "nn.Linear: bias is a number, not a boolean")
    fails(function() nn.Linear(2, 3, { "fp32" }) end, "nn.Linear: options must be named")
    fails(function() nn.Linear(2, 3, "fp32") end, "nn.Linear takes a table of options, not a string")
    fails(function() F.attention(heads, heads, heads, { mask = true }) end, "mask is a boolean, not a tensor")
    fails(function() ps.data.loader { file = "x", batch = 0 / 0 } end, "batch is nan, not a whole number")
    fails(function() F.gelu(x, "tan") end, "F.gelu: approximate is 'tan'; did you mean 'tanh'?")
    fails(function() nn.GELU("exact") end, "nn.GELU: approximate is 'exact' (there are none, tanh)")
    fails(function() nn.GELU { approximate = "tanh" } end, "nn.GELU: approximate is a table (there are none, tanh)")
    fails(function() F.cross_entropy(x, ps.tensor({ 1, 1 }, "int64"), { reduction = "men" }) end, "mean 'mean'?")
  end)

  it("says how to pass a shape", function()
    fails(function() ps.randn(2, 3) end, "ps.randn takes a shape as one list: ps.randn({ 2, 3 })")
    fails(function() ps.zeros(2, 3, 4, { dtype = "fp32" }) end, "ps.zeros({ 2, 3, 4 })")
    fails(function() ps.full(2, 3, 4) end, "ps.full({ 2, 3 }, 4)")
    assert.same({ 2 }, ps.zeros(2):shape())
  end)
end)

describe("schedules", function()
  local KEYS = require("ps.config.schema").root.sub.scheduler.sub.params.variants

  -- Values of options that must agree with other options, and options that exclude others (false).
  local AGREE = { polynomial = { lr_end = 0.01 }, cosine_with_min_lr = { min_lr = false, min_lr_rate = 0.1 },
    cosine_warmup_with_min_lr = { min_lr = false, min_lr_rate = 0.1 },
    warmup_stable_decay = { num_training_steps = 9 }, OneCycleLR = { pct_start = 0.5 },
    reduce_lr_on_plateau = { factor = 0.5 }, LambdaLR = { lr_lambda = function() return 1 end } }

  for name, keys in pairs(KEYS) do
    it("accept the configuration's keys: " .. name, function()
      local wrong, agree = { optimizer = adam() }, AGREE[name] or {}
      for _, row in ipairs(keys.rows) do
        local value = row.type.text:match("number") and 3 or row.default
        if agree[row.key] ~= nil then value = agree[row.key] or nil end
        wrong[row.key] = value
      end
      wrong.warmup_typ = "log"
      fails(function() sched[name](wrong) end, ("sched.%s: no option 'warmup_typ'"):format(name))
      wrong.warmup_typ = nil
      assert.equal(name, sched[name](wrong).name)
    end)
  end
end)

describe("nn.Linear", function()
  it("accepts the standard deviation of its initial weight", function()
    ps.manual_seed(1)
    local layer = nn.Linear(256, 512, { std = 0.02 })
    local n = layer.weight:numel()
    local mean = layer.weight:mean():item()
    local std = math.sqrt(((layer.weight - mean) ^ 2):sum():item() / n)
    -- A sample's deviation varies by std / sqrt(2 n), and its mean by std / sqrt(n). Five times these values are
    -- allowed.
    assert.truthy(math.abs(std - 0.02) < 5 * 0.02 / math.sqrt(2 * n), std)
    assert.truthy(math.abs(mean) < 5 * 0.02 / math.sqrt(n), mean)
    assert.equal(0, layer.bias:abs():sum():item())
  end)
end)
