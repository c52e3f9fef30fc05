-- SPDX-License-Identifier: BSD-3-Clause
-- Several files of weights as one state for load_state_dict: tensors stay in the files, and are read one at a time.
local ps = require "ps"
local tree = require "ps.merge.tree"

local state_of = {}

--- Open files as one state for load_state_dict, their tensors under the names that own_name gives; nil leaves one out.
--- Close it when it was read.
---@param paths string[]
---@param own_name fun(name: string): string?
---@return table state
function state_of.open(paths, own_name)
  local home, files, state = {}, {}, {}                    -- home: our name -> {file, its name}
  function state.close() for _, file in ipairs(files) do file:close() end end
  local ok, problem = pcall(function()
    for i, path in ipairs(paths) do
      files[i] = ps.load(path, { lazy = true })
      for _, name in ipairs(files[i]:names()) do
        local own = own_name(name)
        if own and home[own] then
          error(("tensor '%s' is in %s and in %s"):format(own, home[own][1].path, path), 0)
        end
        if own then home[own] = { files[i], name } end
      end
    end
  end)
  if not ok then
    state.close()
    error(problem, 0)
  end
  function state.names()
    local names = {}
    for name in pairs(home) do names[#names + 1] = name end
    return names
  end
  function state.has(_, name) return home[name] ~= nil end
  --- The file that a tensor is in, and its name there.
  function state.origin(_, name) return home[name][1].path, home[name][2] end
  --- Gives a tensor another name, or leaves it out.
  function state.rename(_, from, to)
    local found = home[from]
    home[from] = nil
    if to then home[to] = found end
  end
  --- Whether two tensors have the same type, shape and bytes. A piece of them is in memory at a time.
  function state.same(_, a, b)
    local nodes, opened, same = {}, {}, nil
    local done, why = pcall(function()
      for i, name in ipairs { a, b } do
        opened[i] = tree.open(home[name][1].path)
        nodes[i] = opened[i].root.entries[tree.KIND.STRING .. ":" .. home[name][2]].value
      end
      same = tree.shape_text(nodes[1]) == tree.shape_text(nodes[2]) and tree.same(nodes[1], nodes[2], a)
    end)
    for _, file in ipairs(opened) do tree.close(file) end
    if not done then error(why, 0) end
    return same
  end
  for _, method in ipairs { "shape", "check", "read_into", "tensor" } do
    state[method] = function(_, name, ...)
      local file = home[name][1]
      return file[method](file, home[name][2], ...)
    end
  end
  return state
end

return state_of
