-- SPDX-License-Identifier: BSD-3-Clause
-- ps.nn: modules and initializations. Each family of modules has a file. This file only collects the families.
local nn_module = require "ps.nn.module"
local norms = require "ps.nn.norms"
local foreign = require "ps.core.foreign"

---@class ps.nn
local nn = {
  Module = nn_module.Module, class = nn_module.class, Parameter = nn_module.Parameter, is_module = nn_module.is_module,
  init = require "ps.nn.weights", fold = require("ps.nn.parts").fold,
  clip_grad_norm = norms.clip_grad_norm, clip_grad_norm_ = norms.clip_grad_norm,         -- PyTorch uses the second name
  clip_grad_value = norms.clip_grad_value, clip_grad_value_ = norms.clip_grad_value,
}
for _, family in ipairs { "nn.linear", "nn.embedding", "nn.norm", "nn.activation", "nn.conv", "nn.pool",
                        "nn.channel_norm", "nn.container", "nn.named", "nn.losses", "nn.transformer", "nn.attention",
                        "nn.encoder", "parallel.tensor.layers" } do
  for name, class in pairs(require("ps." .. family)) do nn[name] = class end
end

return foreign.public(nn, "nn")
