-- SPDX-License-Identifier: BSD-3-Clause
-- Prints an optimizer at the prompt in at most ten lines. The first line describes the optimizer, and the other lines
-- describe its parameter groups.
local LINES = 10

---@param number integer number of the group, counted from 1
---@param group {kind: string, lr: number, betas?: number[], momentum?: number, eps?: number, weight_decay?: number}
---@param params ps.Tensor[]
---@param named boolean whether the line contains the name of the group's optimizer
---@return string
local function line(number, group, params, named)
  local numel = 0
  for _, p in ipairs(params) do numel = numel + p:numel() end
  local parts = { ("  group %d: %s%d tensor%s, %d number%s, lr %g"):format(number,
    named and group.kind .. ", " or "", #params,
    #params == 1 and "" or "s", numel, numel == 1 and "" or "s", group.lr) }
  if group.betas then parts[#parts + 1] = ("betas %g, %g"):format(group.betas[1], group.betas[2]) end
  for _, key in ipairs { "momentum", "eps", "weight_decay" } do
    if group[key] then parts[#parts + 1] = ("%s %g"):format(key, group[key]) end
  end
  return table.concat(parts, ", ")
end

---@param optimizer {kind: string, steps: integer, max_norm?: number, groups: table[]}
---@param params_of fun(number: integer): ps.Tensor[] returns the parameters of group `number`, counted from 1
---@return string
return function(optimizer, params_of)
  local lines = { ("%s, %d step%s%s"):format(optimizer.kind, optimizer.steps, optimizer.steps == 1 and "" or "s",
    optimizer.max_norm and (", max_norm %g"):format(optimizer.max_norm) or "") }
  local n, several = #optimizer.groups, false
  for _, group in ipairs(optimizer.groups) do several = several or group.kind ~= optimizer.groups[1].kind end
  local shown = n < LINES and n or LINES - 2
  for number = 1, shown do lines[number + 1] = line(number, optimizer.groups[number], params_of(number),
    several) end
  if shown < n then lines[shown + 2] = ("  and %d more groups"):format(n - shown) end
  return table.concat(lines, "\n")
end
