-- SPDX-License-Identifier: BSD-3-Clause
-- Names of PyTorch, DeepSpeed, Hugging Face and PatrickStar that psluajit lacks, and what to write instead (see
-- foreign.lua). This file is loaded when a script first asks for a name that an object lacks.
local PRECISION = "write ps.autocast(\"bf16\", function() ... end), or bf16 = { enabled = true } or fp16 = { enabled = "
  .. "true } into the configuration of ps.initialize"
local LOOP = "the loop is model:backward(loss); optimizer:step()"
local SAVE = "write ps.checkpoints.save(folder, { model = model, optimizer = optimizer, step = n }) on all ranks"
local LOAD = "write ps.checkpoints.load(folder, { model = model, optimizer = optimizer }) on all ranks"
local SIZES = "the configuration has the batch sizes; ps.engine() has steps, micro and micros"
local ENGINE = "ps.initialize distributes a model over ranks"
local SCHEDULES = "there are ps.sched.LambdaLR, StepLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR "
  .. "and others of PyTorch, ps.sched.get_scheduler, linear, cosine and others of Hugging Face, and DeepSpeed's "
  .. "(docs/optimizers.md); optimizer:set_lr(lr) sets any other rate"
local OPTIMIZERS = "there are ps.optim.Adam, AdamW, SGD, Lion, Muon, Adafactor, HuggingFaceAdafactor, LAMB, AdamW8bit, "
  .. "AdamWBF16, RMSprop, AdamWScheduleFree and Lion8bit"
local GROUPS = "give the groups to ps.initialize { param_groups = ... } or to ps.optim's optimizer when it is made"
local LAYERS = "write a class with nn.class from the ops in ps.F"
-- Returns the hints for the layers of one and two dimensions that pad with a mode of F.pad.
local function pads(mode)
  return ("write F.pad(x, { left, right }, %s) in forward"):format(mode),
    ("write F.pad(x, { left, right, top, bottom }, %s) in forward"):format(mode)
end
local REFLECT_1, REFLECT_2 = pads "\"reflect\""
local REPLICATE_1, REPLICATE_2 = pads "\"replicate\""
local CONSTANT_1, CONSTANT_2 = pads "\"constant\", value"
local ZERO_1, ZERO_2 = pads "\"constant\", 0"
local THREE = "there are layers of one and two dimensions"
local FOURIER = "there is no Fourier transform: a short one is ps.matmul with matrices of cosines and sines"
local COMPLEX = "there are no complex numbers: keep real and imaginary parts in two tensors; F.rope turns pairs"
local RECURRENT = "recurrent layers are left out: write a cell of nn.Linear, F.sigmoid and F.tanh and call it once per "
  .. "step, or use nn.TransformerEncoderLayer"
local SOLVERS = "decompositions and solvers are left out: compute them outside and ps.load the result; there are "
  .. "ps.norm and ps.matmul"
local SPARSE = "all tensors are dense: keep indices and values, and use t:index_add, t:scatter_add or nn.Embedding"
local COPY = "make a second model by the same call, then other:load_state_dict(model:state_dict()) copies the values"
local WORLD = "write ps.init_distributed(), ps.rank(), ps.world_size(), ps.synchronize(), ps.mesh.group \"world\""

-- Texts that say what to write instead of a name. The outer key is the name's owner, and the inner key is the name.
return {
  ps = {
    inference_mode = "write ps.no_grad(function() ... end)", set_grad_enabled = "write ps.no_grad(function() ... end)",
    is_grad_enabled = "write ps.grad_enabled()",
    amp = PRECISION, compile = "it is not needed: ps.initialize plans each step",
    distributions = "write ps.multinomial(probs, 1) for samples, F.log_softmax(logits, -1):gather(-1, samples) for "
      .. "their log-probabilities, and mean + std * ps.randn_like(std) for normal ones",
    distributed = WORLD, cuda = "write ps.memory(), ps.devices()",
    fft = FOURIER, stft = FOURIER, istft = FOURIER, complex = COMPLEX, polar = COMPLEX, view_as_complex = COMPLEX,
    view_as_real = COMPLEX, complex64 = COMPLEX, linalg = SOLVERS, svd = SOLVERS, inverse = SOLVERS,
    cholesky = SOLVERS, sparse = SPARSE, sparse_coo_tensor = SPARSE, jit = "LuaJIT compiles scripts as they are",
    onnx = "write model:save_pretrained(folder)", copy = COPY, deepcopy = COPY,
    utils = "write ps.data.loader { ... }, ps.recompute(fn, ...)",
    from_numpy = "write ps.tensor(list), or ps.load(path)", get_rng_state = "write ps.rng()",
    set_rng_state = "write ps.manual_seed(seed), or fields of ps.rng()", seed = "write ps.manual_seed(seed)",
    checkpointing = "write ps.recompute(fn, ...), or model:recompute_blocks()",
    float32 = "types are strings: \"fp32\"", float = "types are strings: \"fp32\"",
    float16 = "types are strings: \"fp16\"", half = "types are strings: \"fp16\"",
    bfloat16 = "types are strings: \"bf16\"", float64 = "types are strings: \"fp64\"",
    double = "types are strings: \"fp64\"", int32 = "types are strings: \"int32\"",
    int64 = "types are strings: \"int64\"", long = "types are strings: \"int64\"",
    uint8 = "types are strings: \"uint8\"", bool = "types are strings: \"bool\"",
  },
  -- How to compute functions of PyTorch (torch_names.lua). In the formulas, x and y are tensors and d is a dimension.
  formulas = {
    absolute = "x:abs()", acosh = "(x + (x * x - 1):sqrt()):log()", adjoint = "x:transpose(-2, -1)",
    aminmax = "x:amin(), x:amax()", arccosh = "(x + (x * x - 1):sqrt()):log()",
    arcsinh = "(x + (x * x + 1):sqrt()):log()", arctanh = "((1 + x) / (1 - x)):log() / 2", argwhere = "x:nonzero()",
    as_tensor = "ps.tensor { 1, 2 }", asarray = "ps.tensor { 1, 2 }", asinh = "(x + (x * x + 1):sqrt()):log()",
    atanh = "((1 + x) / (1 - x)):log() / 2", broadcast_to = "x:expand(x:shape())", concat = "ps.cat({ x, y }, d)",
    concatenate = "ps.cat({ x, y }, d)", cosh = "(x:exp() + (-x):exp()) / 2", deg2rad = "x * (math.pi / 180)",
    dist = "(x - y):norm()", divide = "x / y", element_size = "x:nbytes() / x:numel()", erfc = "1 - x:erf()",
    exp2 = "(x * math.log(2)):exp()", fix = "x:trunc()", fliplr = "x:flip { 1 }", flipud = "x:flip { 0 }",
    frac = "x - x:trunc()", frobenius_norm = "x:norm()", get_device = "x:device()", greater = "x:gt(y)",
    greater_equal = "x:ge(y)", hardshrink = "x:masked_fill(x:abs():le(0.5), 0)", hstack = "ps.cat({ x, y }, 1)",
    hypot = "(x * x + y * y):sqrt()", is_floating_point = "x:is_float()", isneginf = "x:eq(-math.huge)",
    isposinf = "x:eq(math.huge)", itemsize = "x:nbytes() / x:numel()", less = "x:lt(y)", less_equal = "x:le(y)",
    logaddexp = "ps.stack({ x, y }):logsumexp(0)", logical_xor = "x:bool():ne(y:bool())", logit = "(x / (1 - x)):log()",
    logspace = "10 ^ ps.linspace(0, 2, 3)", mT = "x:transpose(-2, -1)", moveaxis = "x:movedim(0, 1)",
    msort = "(x:sort(0))", multiply = "x * y", nansum = "x:masked_fill(x:isnan(), 0):sum()", ndimension = "x:dim()",
    negative = "-x", nelement = "x:numel()", new_tensor = "ps.tensor({ 1, 2 }, { dtype = x:dtype() })",
    normal = "mean + std * ps.randn { 2, 3 }", not_equal = "x:ne(y)", poisson_nll_loss = "(x:exp() - y * x):mean()",
    rad2deg = "x * (180 / math.pi)", range = "ps.arange(first, last + 1)", ravel = "x:flatten()", rsub = "y - x",
    register_post_accumulate_grad_hook = "x:register_hook(fn)", scalar_tensor = "ps.tensor(3)",
    set_num_threads = "ps.set_threads(n)", sgn = "x:sign()",
    sinh = "(x:exp() - (-x):exp()) / 2", std_mean = "x:std(d), x:mean(d)", subtract = "x - y",
    take_along_dim = "x:gather(d, index)", tan = "x:sin() / x:cos()", tensordot = "ps.einsum(\"ij,jk->ik\", x, y)",
    trace = "x:diagonal():sum()", true_divide = "x / y", var_mean = "x:var(d), x:mean(d)",
    vstack = "ps.cat({ x, y }, 0)",
    row_stack = "ps.cat({ x, y }, 0)", xlogy = "ps.where(x:eq(0), 0, x * y:log())",
    ger = "x:unsqueeze(1) * y", vdot = "(x * y):sum()",
    soft_margin_loss = "F.softplus(-y * x):mean()", softshrink = "x:sign() * F.relu(x:abs() - 0.5)",
    tanhshrink = "x - x:tanh()", threshold = "ps.where(x:gt(threshold), x, value)",
    LazyLinear = "nn.Linear(inputs, outputs)", NLLLoss2d = "nn.NLLLoss()",
    PairwiseDistance = "F.pairwise_distance(x, y)", Softmax2d = "F.softmax(x, 1)",
    PoissonNLLLoss = "(x:exp() - y * x):mean()", SoftMarginLoss = "F.softplus(-y * x):mean()",
    Softshrink = "x:sign() * F.relu(x:abs() - 0.5)", Tanhshrink = "x - x:tanh()",
    Hardshrink = "x:masked_fill(x:abs():le(0.5), 0)", Threshold = "ps.where(x:gt(threshold), x, value)",
  },
  -- methods and fields of tensors
  t = {
    cuda = "write t:to(\"cuda\")", cpu = "write t:to(\"cpu\")", numpy = "write t:tolist()",
    data = "write t:detach(), or ps.no_grad(function() t:copy_(value) end)", T = "write t:t()",
    retain_grad = "write t:register_hook(fn), or ps.inspect.record_tensor(t, name), which records a gradient",
    is_leaf = "leaves are the tensors that no op made; t:needs_grad() is whether gradients reach the tensor",
    detach_ = "write t = t:detach()", fft = "there is no Fourier transform", real = "there are no complex numbers",
    imag = "there are no complex numbers", is_complex = "there are no complex numbers",
    type = "write t:dtype(), t:to(\"fp32\")", type_as = "write t:to(other:dtype())", ndim = "write t:dim()",
    H = "write t:t()", is_cuda = "write t:device()", is_cpu = "write t:device()",
  },
  F = {
    scaled_dot_product_attention = "write ps.F.attention(q, k, v, { mask = mask }); docs/pytorch.md has what differs",
    multi_head_attention_forward = "write nn.MultiheadAttention(width, heads)",
    ctc_loss = LAYERS, grid_sample = LAYERS,
  },
  nn = {
    RNN = RECURRENT, LSTM = RECURRENT, GRU = RECURRENT, RNNCell = RECURRENT, LSTMCell = RECURRENT,
    GRUCell = RECURRENT, functional = "write ps.F",
    utils = "write nn.clip_grad_norm_(model:parameters(), max_norm), nn.clip_grad_value_(model:parameters(), value); "
      .. "weight_norm and spectral_norm are missing: compute the weight in forward",
    ReflectionPad1d = REFLECT_1, ReflectionPad2d = REFLECT_2, ReplicationPad1d = REPLICATE_1,
    ReplicationPad2d = REPLICATE_2, ConstantPad1d = CONSTANT_1, ConstantPad2d = CONSTANT_2, ZeroPad1d = ZERO_1,
    ZeroPad2d = ZERO_2, Conv3d = THREE,
    MaxPool3d = THREE, AvgPool3d = THREE, BatchNorm3d = THREE, InstanceNorm3d = THREE, Dropout3d = THREE,
    parallel = ENGINE, DataParallel = ENGINE,
    Transformer = "write nn.TransformerEncoder(layer, n) and nn.TransformerDecoder(layer, n)",
  },
  optim = {
    lr_scheduler = SCHEDULES, Adagrad = OPTIMIZERS, Adadelta = OPTIMIZERS, LBFGS = OPTIMIZERS,
    ASGD = OPTIMIZERS, Rprop = OPTIMIZERS, SparseAdam = OPTIMIZERS, Adamax = OPTIMIZERS, NAdam = OPTIMIZERS,
    RAdam = OPTIMIZERS, FusedAdam = OPTIMIZERS, DeepSpeedCPUAdam = OPTIMIZERS,
  },
  sched = {
    CyclicLR = SCHEDULES, greedy = SCHEDULES,
    get_constant_schedule = "write ps.sched.constant { optimizer =, max_lr = }, or make no schedule",
    get_constant_schedule_with_warmup = "write ps.sched.constant_with_warmup(optimizer, num_warmup_steps)",
    get_linear_schedule_with_warmup = "write ps.sched.linear(optimizer, num_warmup_steps, num_training_steps)",
    get_cosine_schedule_with_warmup = "write ps.sched.cosine(optimizer, num_warmup_steps, num_training_steps)",
    get_cosine_with_hard_restarts_schedule_with_warmup =
      "write ps.sched.cosine_with_restarts(optimizer, num_warmup_steps, num_training_steps, num_cycles)",
    get_polynomial_decay_schedule_with_warmup =
      "write ps.sched.polynomial(optimizer, num_warmup_steps, num_training_steps, lr_end, power)",
    get_inverse_sqrt_schedule = "write ps.sched.inverse_sqrt(optimizer, num_warmup_steps, timescale)",
    get_wsd_schedule = "write ps.sched.warmup_stable_decay { optimizer =, num_warmup_steps =, num_decay_steps =, "
      .. "num_training_steps = }",
  },
  optimizer = {
    add_param_group = GROUPS, backward = "write model:backward(loss)",
    clip_master_grads = "write nn.clip_grad_norm_(model, max_norm), or gradient_clipping into the configuration",
    clip_grad_norm = "write nn.clip_grad_norm_(model, max_norm), or gradient_clipping into the configuration",
    get_lr = "write optimizer.lr, or optimizer.param_groups[1].lr",
    get_last_lr = "write optimizer.lr, or schedule:get_last_lr()",
    register_step_post_hook = "write the call after optimizer:step()",
    register_step_pre_hook = "write the call before optimizer:step()",
  },
  schedule = {
    last_epoch = "write schedule.count", base_lrs = "write optimizer.param_groups[1].initial_lr",
    get_lr = "write schedule:get_last_lr()", print_lr = "write print(optimizer.lr)",
    _last_lr = "write schedule:get_last_lr()",
  },
  scaler = {
    step = "write optimizer:step { scaler = scaler }", unscale_ = "optimizer:step { scaler = scaler } does it",
    get_scale = "write scaler.scale",
  },
  module = {
    register_backward_hook = "write module:register_full_backward_hook(fn)",
    register_buffer = "write module:buffer(name, tensor)", get_buffer = "read the field: model.bn.running_mean",
    register_module = "write module[name] = other", compile = "it is not needed: ps.initialize plans each step",
    register_parameter = "write module:param(name, tensor)", add_module = "write module[name] = other",
    gradient_checkpointing_enable = "write model:recompute_blocks(), or activation_checkpointing in the configuration",
    gradient_checkpointing_disable = "write model:recompute_blocks(false)",
    get_parameter = "read the field: model.fc.weight", get_submodule = "read the field: model.layers[0].attn",
    get_input_embeddings = "read the field: model.wte", get_output_embeddings = "read the field: model.lm_head",
    set_submodule = "assign the field: model.fc = nn.Linear(4, 4)",
    clone = COPY, deepcopy = COPY, copy = COPY,
    tie_weights = "assign one parameter to both fields when the module is made",
  },
  -- the model that ps.initialize returns
  model = {
    step = "write optimizer:step()", set_lr = "write optimizer:set_lr(lr)",
    get_lr = "write optimizer.lr, or schedule:get_last_lr()", save_checkpoint = SAVE, load_checkpoint = LOAD,
    get_global_grad_norm = "write optimizer:step().grad_norm, with gradient_clipping in the configuration",
    train_batch = "write for out in model:micro_batches(loader) do model:backward(out.loss) end; optimizer:step()",
    eval_batch = "write ps.train.evaluate(model, batches), or a loop of model:micro_batches within ps.no_grad",
    is_gradient_accumulation_boundary = "write model:at_boundary()", gradient_accumulation_steps = SIZES,
    set_gradient_accumulation_boundary = SIZES, train_batch_size = SIZES, train_micro_batch_size_per_gpu = SIZES,
    set_train_batch_size = SIZES, global_steps = SIZES, micro_steps = SIZES, global_samples = SIZES,
    save_16bit_model = "write model:save_pretrained(folder), or ps.save(model:state_dict(), path)",
    save_fp16_model = "write model:save_pretrained(folder), or ps.save(model:state_dict(), path)",
    allreduce_gradients = LOOP, no_sync = LOOP .. "; ranks sum gradients once per step; set "
      .. "gradient_accumulation_steps in the configuration",
    loss_scale = "write optimizer.scaler.scale", cur_scale = "write optimizer.scaler.scale",
    fp16_enabled = PRECISION, bfloat16_enabled = PRECISION, destroy = "write model:close()",
    zero_optimization_stage = "the configuration has zero_optimization = { stage = n }",
    lr_scheduler = "with a scheduler in the configuration optimizer:step() advances it; optimizer.lr is the rate",
    clip_grad_norm_ = "write nn.clip_grad_norm_(model, max_norm), or gradient_clipping into the configuration",
  },
  loader = {
    set_epoch = "write loader:seek { epoch = n, batch = 0 }; epochs follow one another by themselves",
    sampler = "write loader:seek { epoch = n, batch = 0 }; epochs follow one another by themselves",
    dataset = "the loader reads the data that its option texts, shards or file names",
  },
}
