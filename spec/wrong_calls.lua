-- SPDX-License-Identifier: BSD-3-Clause
-- The calls of caller_spec.lua: calls with wrong arguments, each a line of a script that has ps, gpt2, nn, F, optim,
-- sched, x (a tensor [2, 3]) and TEXT (the path of a text).
-- Each line must fail.
local calls = [==[
ps.empty()
ps.empty("x")
ps.empty({2,"a"})
ps.empty({-1})
ps.empty({1.5})
ps.empty({2}, 3)
ps.empty({2}, {dtype="nope"})
ps.empty({2}, {dtype=4})
ps.empty({2}, {device="nope"})
ps.empty({2}, {device=4})
ps.zeros(nil)
ps.ones({1e20})
ps.full({2})
ps.full({2}, "a")
ps.full({2}, {})
ps.arange()
ps.arange("a")
ps.arange(1,2,0)
ps.arange(0,1,"b")
ps.randn()
ps.randn("a")
ps.randint()
ps.randint(5)
ps.randint(5,1,{2})
ps.randint("a","b",{2})
x:dot(nil)
x:add_(1, x)
F.attention_weights()
ps.tensor()
ps.tensor("hello")
ps.tensor({{1,2},{3}})
ps.tensor({1,"a"})
ps.tensor({1,{2}})
ps.tensor({function() end})
ps.tensor({1,2},{dtype="x"})
ps.cat()
ps.cat({})
ps.cat({x, 1})
ps.cat({x, ps.ones({2})})
ps.cat(x)
ps.cat({x,x}, "a")
ps.stack()
ps.stack({})
ps.stack({x}, 9)
ps.set_default_dtype("x")
ps.set_default_dtype()
ps.set_default_device("x")
ps.set_default_device()
ps.manual_seed()
ps.manual_seed("a")
ps.device()
ps.device("x")
ps.memory("x")
ps.memory(3)
ps.chunks(3)
ps.chunks({tier="x"})
ps.chunks({nope=1})
ps.trace(3)
ps.trace("w")
ps.trace(true)
ps.trace({action=1})
ps.trace({nope=1})
ps.set_memory_limit()
ps.set_memory_limit("a")
ps.set_memory_limit(-1)
ps.set_threads("a")
ps.set_threads()
ps.set_threads(-3)
ps.zeros_like()
ps.zeros_like(3)
ps.same(x, 3)
ps.same()
ps.reset_peak_memory("zz")
ps.memory_available("zz")
ps.load()
ps.load("nope.pt")
ps.load({})
x:view()
x:reshape()
x:reshape("a")
x:reshape({4})
x:reshape({-1,-1})
x:view(5,5)
x:permute()
x:permute(0)
x:permute("a", 1)
x:permute(0,0)
x:transpose(0,5)
x:transpose("a","b")
x:size("a")
x:size(9)
x:to("nope")
x:to(3)
x:item()
x:sum("a")
x:sum(9)
x:mean("q")
x:var("a")
x:std(9)
x:split()
x:split(0)
x:split("a")
x:split(2, 7)
x:gather()
x:gather(0)
x:gather(0, x)
x:topk()
x:topk(9)
x:topk("a")
x:cumsum("a")
x:clamp("a")
x:softmax("a")
x:softmax(7)
x:argmax("a")
x:matmul()
x:matmul(3)
x:matmul(x)
x:add()
x:add("a")
x:add(ps.ones({7}))
return x + "a"
return x + {}
return x + nil
return x .. "a"
return x < 3
return #x[5]
return x[9]
return x[{0,0,0}]
return x[{"a"}]
return x^"a"
return -x + true
x:copy_()
x:copy_(3)
x:copy_(ps.ones({9}))
x:fill_("a")
x:backward()
x:backward(3)
x:sum():backward()
x:requires_grad_("a")
x:expand()
x:expand({9,9})
x:unsqueeze()
x:unsqueeze("b")
x:unsqueeze(9)
x:masked_fill()
x:masked_fill(x, "a")
x:index_select()
x:narrow()
x:narrow(0, 5, 9)
x:narrow("a")
x:slice()
x:normal_("a")
x:flatten("a")
x:flatten(5,6)
x:pow()
x:pow("a")
ps.where()
ps.where(x)
ps.where(x, "a", 3)
ps.where(x > 0, x)
ps.matmul(3, x)
ps.exp(3)
ps.exp()
ps.exp("a")
ps.sum()
ps.gather(3)
ps.split(3)
ps.reshape(3, {1})
ps.maximum(x)
ps.maximum(3, 4)
ps.maximum(x, "a")
F.linear()
F.linear(x)
F.linear(x, 3)
F.linear(x, ps.ones({7,7}))
F.linear(3, x)
F.gelu()
F.gelu("a")
F.dropout()
F.dropout(x, "a")
F.dropout(x, 2)
F.dropout(x, -1)
F.layer_norm()
F.layer_norm(x, ps.ones({7}))
F.layer_norm(x, ps.ones({3}), ps.ones({3}), "a")
F.embedding()
F.embedding(x)
F.embedding(x, x)
F.embedding(ps.tensor({9},{dtype="int32"}), x)
F.embedding({1,2}, x)
F.cross_entropy()
F.cross_entropy(x)
F.cross_entropy(x, x:sum(-1))
F.cross_entropy(x, {1,2})
F.cross_entropy(x, ps.tensor({9,9},{dtype="int32"}))
F.cross_entropy(x, ps.tensor({1,1},{dtype="int32"}), "a")
F.softmax(x, "a")
F.log_softmax(x, {})
F.attention()
F.attention(x, x, x)
F.attention(x)
F.lm_loss()
F.lm_loss(x, x, x)
F.relu(nil)
F.silu({})
ps.ops.add(3, 4)
ps.ops.matmul(x)
ps.ops.gelu()
ps.no_grad()
ps.no_grad(3)
ps.enable_grad(3)
ps.scope()
ps.scope(3)
ps.scope_end()
ps.scope_end(77)
ps.scope_end("a")
ps.recompute()
ps.recompute(3)
ps.checkpoint(x)
ps.offload_activations()
ps.offload_activations(3)
ps.backward()
ps.backward(3)
ps.backward(x)
ps.data.loader()
ps.data.loader({})
ps.data.loader(3)
ps.data.loader({file="nope.bin"})
ps.data.loader({file=TEXT})
ps.data.loader({file=TEXT, batch="a", seq=4})
ps.data.loader({file=TEXT, batch=2, seq=4, split=3})
ps.data.loader({file=TEXT, batch=2, seq=4, split={"a","b"}})
ps.data.loader({file=TEXT, batch=2, seq=4, seed="a"})
ps.data.loader({file=TEXT, batch=2.5, seq=4})
ps.data.loader({file=TEXT, batch=2, seq=4000})
ps.data.loader({file=TEXT, batch=2, seq=4, vocab="x"})
ps.data.loader({shards=3, batch=2, seq=4})
ps.data.loader({shards={3}, batch=2, seq=4})
ps.data.loader({file=TEXT, batch=2, seq=4, first="a"})
ps.data.loader({file=TEXT, batch=2, seq=4, rank=7})
ps.data.loader({file=TEXT, batch=2, seq=4}):seek()
ps.data.loader({file=TEXT, batch=2, seq=4}):seek({})
ps.data.loader({file=TEXT, batch=2, seq=4}):load_state_dict()
ps.data.loader({file=TEXT, batch=2, seq=4}):load_state_dict({})
ps.data.tokens()
ps.data.tokens(3)
ps.data.tokens("nope")
ps.data.tokens(TEXT, 3)
ps.data.tokens(TEXT, {width="a"})
ps.data.tokens(TEXT, {width=3})
ps.data.tokens(TEXT):read()
ps.data.tokens(TEXT):read(0, 1e9)
ps.data.tokens(TEXT):read(0, -1)
ps.data.write_tokens()
ps.data.write_tokens(TEXT .. ".bin")
ps.data.write_tokens(TEXT .. ".bin", {"a"})
ps.data.write_tokens(TEXT .. ".bin", 3)
ps.data.encode_text()
ps.data.encode_text("abc", TEXT .. ".bin")
ps.data.encode_text(3, TEXT .. ".bin", ps.tokenizer.bytes())
ps.data.encode_file()
ps.data.encode_file("nope", TEXT .. ".bin", ps.tokenizer.bytes())
ps.data.windows()
ps.data.windows({})
ps.data.windows({file=TEXT})
ps.data.windows({file=TEXT, batch=2, seq="a"})
ps.data.windows({file=TEXT, batch="a", seq=4})()
ps.data.windows({file=TEXT, seq=4})()
nn.Linear()
nn.Linear(3)
nn.Linear("a", 3)
nn.Linear(3, 4, "a")
nn.Linear(3, 4, {dtype="nope"})
nn.Linear(3, 4)(3)
nn.Linear(3, 4)()
nn.Linear(3, 4)(ps.ones({7}))
nn.Embedding()
nn.Embedding("a")
nn.LayerNorm()
nn.LayerNorm("a")
nn.LayerNorm(4)("a")
nn.Dropout("a")
nn.Dropout(3)
nn.Sequential(3)
nn.Sequential({3})
nn.ModuleList({3})
nn.Module()
nn.Module.new()
nn.Linear(3,4):load_state_dict()
nn.Linear(3,4):load_state_dict({})
nn.Linear(3,4):load_state_dict({weight=3, bias=4})
nn.Linear(3,4):load_state_dict({weight=x, bias=x})
nn.Linear(3,4):to("nope")
nn.Linear(3,4):to()
nn.Linear(3,4):save_pretrained()
nn.init.normal_()
nn.init.normal_(x, "a")
nn.init.uniform_(3)
nn.init.zeros_()
gpt2.new()
gpt2.new("nope")
gpt2.new(3)
gpt2.new({n_layer="a"})
gpt2.new({n_head=3, n_embd=4, vocab_size=3, n_positions=4, n_layer=1})
gpt2.new("tiny", 3)
gpt2.new("tiny", {dtype="nope"})
gpt2.new("tiny", {nope=1})
gpt2.new("tiny", {n_layer="x"})
gpt2.new("tiny", {dropout=7})
gpt2.new("tiny")()
gpt2.new("tiny")(3)
gpt2.new("tiny")(x)
gpt2.new("tiny")(ps.zeros({1,999},{dtype="int32"}))
gpt2.new("tiny"):generate()
gpt2.new("tiny"):generate("a")
gpt2.new("tiny"):generate({1}, "a")
gpt2.new("tiny"):generate({}, 3)
gpt2.new("tiny"):generate({99999}, 3)
gpt2.new("tiny"):generate({1}, 3, {temperature="a"})
gpt2.new("tiny"):generate({1}, 3, {top_k="a"})
gpt2.from_pretrained()
gpt2.from_pretrained("nope")
optim.AdamW()
optim.AdamW(3)
optim.AdamW({})
optim.AdamW({3})
optim.AdamW(nn.Linear(3,4), 3)
optim.AdamW(nn.Linear(3,4), {lr="a"})
optim.AdamW(nn.Linear(3,4), {lr=1, betas=3})
optim.AdamW(nn.Linear(3,4), {lr=1, nope=1})
optim.AdamW(nn.Linear(3,4), {lr=1, max_norm="a"})
optim.AdamW(nn.Linear(3,4), {lr=1}):step(3)
optim.AdamW(nn.Linear(3,4), {lr=1}):load_state_dict()
optim.AdamW(nn.Linear(3,4), {lr=1}):load_state_dict({}, 3)
optim.AdamW({{params=3}}, {lr=1})
optim.AdamW({{}}, {lr=1})
optim.groups()
optim.groups(3)
optim.groups(nn.Linear(3,4), "a")
optim.GradScaler(3)
optim.clip_grad_norm()
optim.clip_grad_norm(3)
optim.clip_grad_norm_(nn.Linear(3,4), "a")
sched.warmup_cosine()
sched.warmup_cosine({})
sched.warmup_cosine(3)
sched.warmup_cosine({optimizer=3, max_lr=1, min_lr=0, warmup=1, total=3})
sched.warmup_cosine({optimizer=optim.AdamW(nn.Linear(3,4), {lr=1}), max_lr="a", min_lr=0, warmup=1, total=3})
sched.new()
sched.lambda()
ps.checkpoints.save()
ps.checkpoints.load("nope", {model=nn.Linear(3,4)})
ps.checkpoints.load(TEXT, {model=nn.Linear(3,4)})
ps.checkpoints.find()
ps.checkpoints.find(3)
ps.train.run()
ps.train.run({})
ps.train.run({model=3})
ps.train.run({model=nn.Linear(3,4), optimizer=3, loader=4, steps="a"})
ps.train.evaluate()
ps.train.evaluate(3)
ps.train.evaluate(nn.Linear(3,4))
ps.tokenizer.bytes():encode(3)
ps.tokenizer.bytes():encode()
ps.tokenizer.bytes():decode()
ps.tokenizer.bytes():decode("a")
ps.tokenizer.bytes():decode({999})
ps.progress.new()
ps.progress.new(3)
ps.progress.new({total="a"})
ps.dist.new_group()
ps.functional.gelu(1)
require "ps.checkpoints.merge".run()
require "ps.train.plot".text()
]==]

-- The same code for a model that ps.initialize creates with these configuration keys.
local settings = [==[
config="nope.json"
config=TEXT
config=3
config={nope=1}
config={optimizer=3}
config={optimizer={type="nope"}}
config={optimizer={type="AdamW", params=3}}
config={optimizer={type="AdamW", params={lr="a"}}}
config={optimizer={type="AdamW", params={lr=1}}, memory=3.5}
config={optimizer={type="AdamW", params={lr=1}}, memory={host="lots"}}
config={optimizer={type="AdamW", params={lr=1}}, memory={host=-5}}
config={optimizer={type="AdamW", params={lr=1}}, memory={host="1KiB"}}
config={optimizer={type="AdamW", params={lr=1}}, memory={disk={path="/nowhere"}}}
config={optimizer={type="AdamW", params={lr=1}}, memory={disk=3}}
config={optimizer={type="AdamW", params={lr=1}}, bf16={enabled="x"}}
config={optimizer={type="AdamW", params={lr=1}}, bf16={enabled=true}, fp16={enabled=true}}
config={optimizer={type="AdamW", params={lr=1}}, zero_optimization={stage=9}}
config={optimizer={type="AdamW", params={lr=1}}, device="nope"}
config={optimizer={type="AdamW", params={lr=1}}, device="cuda"}
config={optimizer={type="AdamW", params={lr=1}}, scheduler={type="nope"}}
config={optimizer={type="AdamW", params={lr=1}}, scheduler={type="WarmupLR", params={warmup_num_steps="a"}}}
config={optimizer={type="AdamW", params={lr=1}}, gradient_clipping="a"}
config={optimizer={type="AdamW", params={lr=1}}, train_batch_size="a"}
config={optimizer={type="AdamW", params={lr=1}}, chunk_size=-3}
config={optimizer={type="AdamW", params={lr=1}}}, param_groups=3
config={optimizer={type="AdamW", params={lr=1}}}, local_rank="a"
]==]

-- Calls of functions and methods without their object, and with invalid counts. The error begins with the script's line
-- and contains these words. Each row is a line and its words, separated by |.
local named = [==[
ps.var(3) | ps.var | a tensor | a number
ps.std({}) | ps.std | a tensor | a table
ps.permute("a", 1) | ps.permute | a tensor
ps.argmin() | ps.argmin | a tensor
ps.argmax(3) | ps.argmax | a tensor
ps.transpose(3) | ps.transpose | a tensor
ps.topk({}, 1) | ps.topk | a tensor
ps.cumsum(3, 0) | ps.cumsum | a tensor
ps.clamp(3, 0, 1) | ps.clamp | a tensor
ps.matmul(3, x) | ps.matmul | a tensor
ps.add(3, 4) | ps.add | a tensor
ps.div("a", x) | ps.div | a tensor
ps.pow(2, 3) | ps.pow | a tensor
ps.where(3, x, x) | ps.where | a tensor
ps.softmax() | ps.softmax | a tensor
x:masked_select(3) | masked_select | the mask | a tensor
x:index_select(0, {1}) | index_select | index | a tensor
x:masked_fill(x:gt(0), "a") | masked_fill | value | a number
x[0] = "a" | t[key] = value | a string | a tensor
x:set_grad(3) | set_grad | a tensor
nn.Parameter() | nn.Parameter | a tensor
nn.Parameter(3) | nn.Parameter | a tensor
nn.Parameter({}) | nn.Parameter | a tensor
nn.Parameter(ps.arange(3)) | float
nn.Linear(2, 2):param("w") | param | a tensor
nn.Linear(2, 2):buffer("w", 3) | buffer | a tensor
nn.Linear(2, 2):param(nil, x) | param | the name
nn.clip_grad_norm() | nn.clip_grad_norm | parameters
nn.clip_grad_norm(3, 1) | nn.clip_grad_norm | parameters
nn.clip_grad_norm({3}, 1) | nn.clip_grad_norm | a number
nn.clip_grad_norm(nn.Linear(2, 2)) | nn.clip_grad_norm | max_norm
nn.clip_grad_norm(nn.Linear(2, 2), "a") | nn.clip_grad_norm | max_norm
optim.global_norm(3) | optim.global_norm | gradients
sched.from_config() | sched.from_config | the configuration
sched.from_config(3) | sched.from_config | the configuration
sched.from_config({type = "WarmupLR"}) | sched | optimizer
optim.AdamW(nn.Linear(2, 2)):set_lr() | set_lr | a number
optim.AdamW(nn.Linear(2, 2)):set_lr("a") | set_lr | a number
optim.AdamW(nn.Linear(2, 2)):state_dict(3) | state_dict | a module
optim.AdamW(nn.Linear(2, 2)).set_lr(3) | optimizer:set_lr | colon
optim.AdamW(nn.Linear(2, 2)).state_dict() | optimizer:state_dict | colon
nn.Linear.new() | new | a class
nn.class() | nn.class | the name
nn.class("A", 3) | nn.class | a class
gpt2.new("tiny"):init() | gpt2 | the configuration
gpt2.new("tiny"):init(3) | gpt2 | the configuration
gpt2.new("tiny"):flops_per_token("a") | flops_per_token | a number
nn.MLP("a") | nn.MLP | the width | a whole number
nn.MLP(4, {}, nil) | nn.MLP | the hidden width | a whole number
nn.MultiheadSelfAttention(4) | heads | a whole number
nn.MultiheadSelfAttention({}, 2) | the width | a whole number
nn.MultiheadSelfAttention(4, -1) | -1 heads
nn.init.kaiming_uniform_(x, {mode=1}) | kaiming_uniform_ | a string
nn.init.kaiming_normal_(x, "a") | kaiming_normal_ | a number
nn.init.xavier_uniform_(x, {}) | xavier_uniform_ | a number
nn.init.xavier_normal_(x, {}) | xavier_normal_ | a number
x:unsqueeze(0/0) | unsqueeze | a whole number
x:unsqueeze(0.5) | unsqueeze | a whole number
x:sum(0/0) | dimension | a whole number
x:sum(0.5) | dimension | a whole number
x:size(0.5) | dimension | a whole number
x:select(0, 0/0) | select | a whole number
x:select(0, "a") | select | a whole number
x:split(0/0) | split | a whole number
x:split(1.5) | split | a whole number
x:split({1, 0.5, 0.5}) | split | a whole number
x:split(1/0) | split | a whole number
x:chunk() | chunk | a whole number
x:chunk(0) | chunk | 1
x:chunk(0/0) | chunk | a whole number
x:slice(1, 0/0) | slice | a whole number
x:slice(1, 0, 1.5) | slice | a whole number
x:slice(1, 0, 2, 0/0) | slice | a whole number
x:narrow(1, 0/0, 1) | slice | a whole number
x:narrow(1, 0, 1.5) | slice | a whole number
x:reshape(1.5, 4) | reshape | a whole number
x:reshape(0/0, 6) | reshape | a whole number
x:view(2^70, 3) | reshape | a whole number
x:expand(2, 0/0) | expand | a whole number
x:permute(0.5, 1) | permute | a whole number
x:topk(1.5) | topk | a whole number
x:topk(2^32 + 1) | topk | a whole number
x:cumsum(0/0) | cumsum | a whole number
ps.empty({0/0}) | size
ps.empty({1/0}) | size
ps.arange(0/0) | ps.arange
ps.arange(1/0) | ps.arange
ps.arange(0, 1, 0/0) | ps.arange
ps.randint(0, 0/0, {2}) | randint | a whole number
ps.stack({x}, 0/0) | unsqueeze | a whole number
ps.cat({x}, 0/0) | concat | a whole number
F.cross_entropy(x, ps.zeros({2}, {dtype="int64"}), {ignore_index=0.5}) | ignore_index | whole
ps.ops.sum(x, 0.5) | sum | a whole number
ps.ops.sum(x, -1) | sum | a whole number
ps.safetensors.open() | ps.safetensors.open: the path is nil
ps.safetensors.open({}) | ps.safetensors.open: the path is a table
ps.safetensors.open(TEXT, 3) | ps.safetensors.open | a table of options
ps.safetensors.save() | ps.safetensors.save | the tensors by name is nil
ps.safetensors.save(3, {}) | the path is a number
ps.safetensors.save(TEXT .. "x", {1}) | tensors by name | '1'
ps.safetensors.save(TEXT .. "x", {a=1}) | tensors by name | 'a' is a number
ps.safetensors.save(TEXT .. "x", {a=x}, 3) | the metadata is a number
ps.safetensors.save(TEXT .. "x", {a=x}, {k=1}) | 'k' | metadata | a number
ps.safetensors.save(TEXT .. "x", {a=x}, {"v"}) | a name | metadata | a number
ps.safetensors.copy(TEXT .. "x", {a=x}, {}) | ps.safetensors.copy | a function, not nil
ps.safetensors.writer(TEXT .. "x") | ps.safetensors.writer | the list of tensors is nil
ps.serialize.list() | ps.serialize.list | nil
ps.serialize.dict(3) | ps.serialize.dict | a number
ps.checkpoints.make_folder() | make_folder: the path is nil
ps.checkpoints.make_folder({}) | make_folder: the path is a table
ps.checkpoints.make_folder("") | make_folder: the path is empty
require("ps.checkpoints.merge").run({}, {out="x.pt"}) | merge.run | empty
require("ps.checkpoints.merge").run({3}, {out="x.pt"}) | merge.run: a file is a number
require("ps.checkpoints.merge").folder() | merge.folder | nil
require("ps.checkpoints.merge").folder("x") | merge.folder | nil
gpt2.new("tiny"):save_pretrained() | save_pretrained: the folder is nil
gpt2.new("tiny"):load_weights() | load_weights
gpt2.new("tiny"):load_weights(3) | load_weights: a path is a number
gpt2.from_pretrained() | from_pretrained: the folder is nil
gpt2.from_pretrained("/nope") | /nope/config.json
]==]

return { calls = calls, settings = settings, named = named }
