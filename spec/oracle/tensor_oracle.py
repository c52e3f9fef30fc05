# SPDX-License-Identifier: BSD-3-Clause
"""Layers that two ranks share, with sequence parallelism, compared with PyTorch's parallelize_module on two processes
(gloo).

A case is a small network with random sizes and weights: a token embedding, a norm, a column layer, GELU, a row layer,
a residual, a norm and a head. Losses and every parameter's gradient, gathered from both ranks, must be those of
PyTorch's ranks. PyTorch's must be those of the same network in one process in fp64, so that a mistake of both would
be detected.

Every fourth case is a whole model, a small GPT-2 or Llama from transformers, which the engine shards by its table of
names. Its loss and gradients must be those of transformers in one process in fp64. A gradient is the change of one
step of SGD divided by the learning rate. PyTorch's ranks shard the same model with parallelize_module and train it.
The losses of five steps of AdamW must be equal to theirs, and to those of one process in fp64.
"""
import json
import os

import torch
import torch.multiprocessing as spawned
import transformers
from safetensors.torch import load_file, save_file

import runs

RANKS = 2
NEAR = 1e-5                                        # relative to a tensor's norm, in fp32
STEPS, ADAMW = 5, {"lr": 0.02, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.1}


class Net(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = torch.nn.Embedding(c["V"], c["C"])
        self.norm = torch.nn.LayerNorm(c["C"])
        self.up = torch.nn.Linear(c["C"], c["H"])
        self.down = torch.nn.Linear(c["H"], c["C"])
        self.last = torch.nn.LayerNorm(c["C"])
        self.head = torch.nn.Linear(c["C"], c["V"], bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))
        return self.head(self.last(x))


def loss_of(net, data):
    logits = net(data["ids"].long())
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["targets"].long().flatten())


def on_rank(rank, job):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
    torch.set_num_threads(1)
    with open(job, encoding="ascii") as f:
        cases = json.load(f)
    torch.distributed.init_process_group("gloo", init_method="file://%s.meet" % job, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for case in cases:
        data = load_file(case["data"])
        if "family" in case:
            losses = train(cut(make_model(case), case["family"], mesh), data)
            if rank == 0:
                save_file({"losses": losses}, os.path.join(case["out"], "torch.safetensors"))
            continue
        net = Net(case)
        net.load_state_dict({name: t for name, t in data.items() if name not in ("ids", "targets")})
        net = parallelize_module(net, mesh, {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1)),
            "last": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
        loss = loss_of(net, data)
        loss.backward()
        out = {name: p.grad.full_tensor().contiguous() for name, p in net.named_parameters()}
        out["loss"] = loss.detach().reshape(1)
        if rank == 0:
            save_file(out, os.path.join(case["out"], "torch.safetensors"))
    torch.distributed.destroy_process_group()


class Packed(torch.nn.Module):
    """GPT-2's queries, keys and values as three products, each of which can be sharded by columns."""

    def __init__(self, packed):
        super().__init__()
        for name, w, b in zip("qkv", packed.weight.chunk(3, 1), packed.bias.chunk(3)):
            self.add_module(name, linear(w, b))

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def linear(w, b):
    """Returns a Linear for GPT-2's Conv1D, [in, out], which parallelize_module does not support."""
    new = torch.nn.Linear(*w.shape)
    with torch.no_grad():
        new.weight.copy_(w.t())
        new.bias.copy_(b)
    return new


def cut(model, family, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    if family == "llama":
        at, columns, rows = ("model.layers.*.",
                             "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
                             "self_attn.o_proj mlp.down_proj")
    else:
        at, columns, rows = ("transformer.h.*.", "attn.c_attn.q attn.c_attn.k attn.c_attn.v mlp.c_fc",
                             "attn.c_proj mlp.c_proj")
        for block in model.transformer.h:
            block.attn.c_attn = Packed(block.attn.c_attn)
            block.attn.split_size //= RANKS
            for layer, name in (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj"):
                old = getattr(layer, name)
                setattr(layer, name, linear(old.weight, old.bias))
    plan = {at + name: ColwiseParallel() for name in columns.split()} | {at + name: RowwiseParallel()
                                                                         for name in rows.split()}
    return parallelize_module(model.eval(), mesh, plan)


def model_loss(model, data):
    logits = model(data["ids"].long()).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["targets"].long().flatten())


def train(model, data):
    """Returns the losses of STEPS steps."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **ADAMW)
    losses = []
    for _ in range(STEPS):
        loss = model_loss(model, data)
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(losses)


def draw_model(rng, family):
    heads = 2 * rng.randint(1, 2)
    case = {"family": family, "B": rng.randint(1, 3), "T": rng.randint(3, 9), "V": rng.randint(11, 40), "heads": heads,
            "C": heads * rng.choice([4, 8]), "layers": rng.randint(1, 2), "masked": rng.random() < 0.5,
            "tied": rng.random() < 0.5, "sequence": rng.random() < 0.7, "steps": STEPS, "adamw": ADAMW}
    if case["sequence"] and rng.random() < 0.5:
        case["pieces"] = rng.randint(2, 4)
    return case | ({"groups": 2, "H": 2 * rng.randint(4, 16)} if family == "llama" else {})


def make_model(case):
    torch.manual_seed(case["seed"])
    same = {"vocab_size": case["V"], "tie_word_embeddings": case["tied"], "initializer_range": 0.2}
    if case["family"] == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_embd=case["C"], n_layer=case["layers"], n_head=case["heads"], n_positions=16, embd_pdrop=0,
            attn_pdrop=0, resid_pdrop=0, attn_implementation="eager", **same))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=case["C"], num_hidden_layers=case["layers"], num_attention_heads=case["heads"],
        num_key_value_heads=case["groups"], intermediate_size=case["H"], max_position_embeddings=16,
        attn_implementation="eager", **same))


def draw(rng, index):
    if index % 4 == 3:
        return draw_model(rng, "gpt2" if index % 8 == 3 else "llama")
    return {"B": rng.randint(1, 3), "T": 2 * rng.randint(1, 6), "C": 4 * rng.randint(1, 6), "H": 2 * rng.randint(2, 20),
            "V": 2 * rng.randint(3, 40), "masked": rng.random() < 0.5, "keep": rng.random() < 0.3}


def write_data(case):
    data = {}
    if "family" in case:
        make_model(case).save_pretrained(case["model"])
    torch.manual_seed(case["seed"])
    if "family" not in case:
        data = {name: t.detach().clone() for name, t in Net(case).state_dict().items()}
    for name in data:
        if "norm" in name or "last" in name:
            data[name] += 0.3 * torch.randn_like(data[name])
    data["ids"] = torch.randint(case["V"], (case["B"], case["T"]), dtype=torch.int32)
    data["targets"] = torch.randint(case["V"], (case["B"], case["T"]), dtype=torch.int32)
    if case["masked"]:
        data["targets"][:, : case["T"] // 2] = -100
    save_file(data, case["data"])


def in_one_process(case):
    data = load_file(case["data"])
    if "family" in case:
        model = make_model(case).double().eval()
        loss = model_loss(model, data)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        return grads | {"loss": loss.detach().reshape(1), "losses": train(model, data)}
    net = Net(case).double()
    net.load_state_dict({name: t.double() for name, t in data.items() if name not in ("ids", "targets")})
    loss = loss_of(net, data)
    loss.backward()
    return {name: p.grad for name, p in net.named_parameters()} | {"loss": loss.detach().reshape(1)}


def judge(case):
    path = os.path.join(case["out"], "ours.safetensors")
    if not os.path.exists(path):
        return ["the ranks did not come to it"]
    ours, exact, theirs = load_file(path), in_one_process(case), None
    theirs = load_file(os.path.join(case["out"], "torch.safetensors"))
    off = ["there is %s" % sorted(ours)] if sorted(ours) != sorted(exact) else []
    for name, wanted in exact.items():
        scale = max(float(wanted.norm()), 1e-6)
        for who, got in (("ours", ours.get(name)), ("PyTorch's", theirs.get(name))):
            if got is not None and not runs.distance(got, wanted) <= NEAR * scale:
                off.append("%s: %s is off by %g of %g" % (name, who, runs.distance(got, wanted), scale))
    return off


def main():
    runs.quiet_transformers()
    run = runs.Run("tensor", cases=8)
    cases = list(run.cases(draw))
    for case in cases:
        write_data(case)
    job = os.path.join(run.folder, "job.json")
    with open(job, "w", encoding="ascii") as f:
        json.dump(cases, f)
    try:
        spawned.spawn(on_rank, args=(job,), nprocs=RANKS)
    except spawned.ProcessExitedException as e:  # seen once: gloo's threads abort PyTorch's process as it ends
        print("PyTorch's processes run again: %s" % e)
        if os.path.exists(job + ".meet"):
            os.remove(job + ".meet")
        spawned.spawn(on_rank, args=(job,), nprocs=RANKS)
    run.ranks("tensor_cases.lua", RANKS, job)
    for case in cases:
        run.judged_case(case, judge(case))
    run.end()


if __name__ == "__main__":
    main()
