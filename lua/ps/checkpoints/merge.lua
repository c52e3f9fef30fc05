-- SPDX-License-Identifier: BSD-3-Clause
-- Merges the shards of a checkpoint into one file (tools/merge.lua). A shard is a file that one rank wrote with its
-- part of the state. The shards' tables are merged in the order of ranks:
--   tables    are joined key by key, at every depth. This applies to dicts, and to lists as the Lua tables 1 .. n
--   tensors   that are in several shards must have the same dtype and shape. If their values differ, the last value is
--             used, and the difference is noted
--   values    are numbers and strings. If they differ, the last value is used, and the difference is noted. None counts
--             as absent
--   metadata  of safetensors files is merged like values, if the result is a safetensors file, too. If a shard has
--             checksums, the result has its own checksums
-- Tensors whose pieces are in several shards (ps.tensor.shard) are assembled. This requires that the places of the
-- pieces are known, as in a checkpoint's folder and in a folder of save_parallelized. Files without places are refused.
--
-- The folder of a checkpoint (ps.checkpoints of several processes) becomes the file that a single process would have
-- written. If several names share a tensor or a table in their shard, they also share it in a .pt result. If the
-- elements of a view share bytes (expand), the result has such a view, too. Merging needs a few hundred bytes of memory
-- per tensor, and a buffer for one piece of a tensor. The result appears only when it is complete.
local native = require "ps.core.ffi"
local shard_note = require "ps.io.shard_note"
local caller = require "ps.core.caller"
local ffi = require "ffi"
local encode = require "ps.core.encode"
local rank_files = require "ps.checkpoints.rank_files"
local rectangles = require "ps.core.rectangles"
local restore = require "ps.checkpoints.restore"
local tree = require "ps.checkpoints.merge_tree"
local C, check = native.C, native.check
local KIND, class, inside, shape_text = tree.KIND, tree.class, tree.inside, tree.shape_text
local error = caller.error

local merge = {}

local value_out = ffi.new("ps_pt_value")
local CHECKSUMS = "xxh3_64"                                -- key of the checksums in a safetensors file's metadata

-- -- merging --------------------------------------------------------------------------------------------------------
local function what(node) return node.kind == KIND.TENSOR and "a tensor " .. shape_text(node) or class(node) end

local join

-- Joins two tables into a new table, because the old tables may be shared.
local function join_lists(a, b, label, state)
  local both = { kind = b.kind, file = b.file, items = {} }
  for i = 1, math.max(#a.items, #b.items) do
    local one, other = a.items[i], b.items[i]
    both.items[i] = one and other and join(one, other, ("%s[%d]"):format(label, i - 1), state) or one or other
  end
  return both
end

local function join_dicts(a, b, label, state)
  local both = { kind = KIND.DICT, file = b.file, keys = {}, entries = {} }
  for i, token in ipairs(a.keys) do both.keys[i], both.entries[token] = token, a.entries[token] end
  for _, token in ipairs(b.keys) do
    local old, new = both.entries[token], b.entries[token]
    if old then
      new = { key = old.key, text = old.text, value = join(old.value, new.value, inside(label, new.text), state) }
    else
      both.keys[#both.keys + 1] = token
    end
    both.entries[token] = new
  end
  return both
end

local function is_empty(node) return #(node.keys or node.items) == 0 end

local function joined(a, b, label, state)
  if b.kind == KIND.NONE then return a end
  if a.kind == KIND.NONE then return b end
  local tables = (a.keys or a.items) and (b.keys or b.items)
  if tables and class(a) ~= class(b) and (is_empty(a) or is_empty(b)) then return is_empty(b) and a or b end
  if tables and a.items and b.items then return join_lists(a, b, label, state) end
  if tables then return join_dicts(tree.as_dict(a), tree.as_dict(b), label, state) end
  if class(a) ~= class(b) or a.kind == KIND.TENSOR and shape_text(a) ~= shape_text(b) then
    error(("'%s' is %s in %s, but %s in %s: these are not shards of one checkpoint"):format(label, what(a),
      a.file.path, what(b), b.file.path), 0)
  end
  if not tree.same(a, b, label) then state.differ(label, class(a), a.file.path, b.file.path) end
  return b
end

-- Merges `b` into `a`. Calls state.differ if `a` and `b` differ. state.known[a][b] is the result for a pair of nodes,
-- because the same pair may occur at many paths.
function join(a, b, label, state)
  local known = state.known[a] or {}
  state.known[a] = known
  known[b] = known[b] or joined(a, b, label, state)
  return known[b]
end

-- -- writing --------------------------------------------------------------------------------------------------------

local function put_key(writer, key)
  if key.text then
    local v = ffi.new("ps_pt_value", { kind = KIND.STRING, integer = #key.text })
    v.text = key.text
    return check(C.ps_ptw_put(writer, v))
  elseif key.number then
    return check(C.ps_ptw_put(writer, ffi.new("ps_pt_value", { kind = KIND.INT, integer = key.number })))
  end
  check(C.ps_pt_get(key.file.pt, key.id, value_out))
  check(C.ps_ptw_put(writer, value_out))
end

local function declare_tensor(state, node, label)
  local known = state.storages[node.file] or {}
  state.storages[node.file] = known
  if not known[node.identity] then
    known[node.identity] = check(C.ps_ptw_storage(state.writer, node.dtype, node.span or node.numel))
    state.tensors[#state.tensors + 1] = { node = node, label = label, storage = known[node.identity] }
  end
  local t = ffi.new("ps_pt_tensor", { ndim = #node.shape, storage = known[node.identity] })
  local stride = 1
  for d = #node.shape - 1, 0, -1 do
    t.shape[d], t.stride[d] = node.shape[d + 1], node.span and node.tensor.stride[d] or stride
    stride = stride * math.max(1, node.shape[d + 1])
  end
  check(C.ps_ptw_tensor(state.writer, t))
end

local function declare(state, node, label)
  local writer = state.writer
  local function container(kind, count)
    state.numbers[node] = check(C.ps_ptw_put(writer, ffi.new("ps_pt_value", { kind = kind, count = count })))
  end
  if state.numbers[node] then
    check(C.ps_ptw_again(writer, state.numbers[node]))
  elseif node.kind == KIND.TENSOR then
    declare_tensor(state, node, label)
  elseif node.kind == KIND.DICT then
    container(KIND.DICT, 2 * #node.keys)
    for _, token in ipairs(node.keys) do
      local entry = node.entries[token]
      put_key(writer, entry.key)
      declare(state, entry.value, inside(label, entry.text))
    end
  elseif node.items then
    container(node.kind == KIND.SET and KIND.LIST or node.kind, #node.items)
    for i, item in ipairs(node.items) do declare(state, item, ("%s[%d]"):format(label, i - 1)) end
  else
    check(C.ps_pt_get(node.file.pt, node.id, value_out))
    if value_out.kind == KIND.NAME then value_out.kind = KIND.STRING end
    check(C.ps_ptw_put(writer, value_out))
  end
end

local function write_pt(writer, root, path)
  local state = { writer = writer, storages = {}, tensors = {}, numbers = {} }
  declare(state, root, "")
  check(C.ps_ptw_begin(writer))
  for _, tensor in ipairs(state.tensors) do
    local storage = tensor.storage
    tree.copy(tensor.node, tensor.label, path, function(at, n) return C.ps_ptw_write(writer, storage, at, n) end)
  end
  check(C.ps_ptw_commit(writer))
end

local function check_flat(root, path)
  for _, token in ipairs(root.keys) do
    local entry = root.entries[token]
    local node, key = entry.value, entry.key
    if node.kind ~= KIND.TENSOR or key.kind ~= KIND.STRING then
      error(("%s: a safetensors file holds only tensors by name, but '%s' of %s is %s%s; merge to a .pt "
        .. "file"):format(path,
        entry.text, node.file.path, class(node), key.kind ~= KIND.STRING and " with a key that is not a string"
          or ""), 0)
    elseif node.span then
      error(("%s: '%s' of %s is a view that repeats elements, which a safetensors file cannot "
        .. "hold; merge to a .pt file, or save it in PyTorch as .contiguous()"):format(path, entry.text,
        node.file.path), 0)
    end
  end
end

local function write_st(writer, root, path, metadata)
  check_flat(root, path)
  if metadata[CHECKSUMS] then check(C.ps_stw_checksums(writer)) end
  local keys = {}
  for key in pairs(metadata) do if key ~= CHECKSUMS then keys[#keys + 1] = key end end
  table.sort(keys)
  for _, key in ipairs(keys) do check(C.ps_stw_meta(writer, key, metadata[key])) end
  local shape = ffi.new("int64_t[8]")
  for _, token in ipairs(root.keys) do
    local entry = root.entries[token]
    for d, size in ipairs(entry.value.shape) do shape[d - 1] = size end
    check(C.ps_stw_add(writer, entry.text, entry.value.dtype, #entry.value.shape, shape))
  end
  check(C.ps_stw_begin(writer))
  for _, token in ipairs(root.keys) do
    local name = root.entries[token].text
    tree.copy(root.entries[token].value, name, path, function(at, n) return C.ps_stw_append(writer, name, at, n) end)
  end
  check(C.ps_stw_commit(writer))
end

local WRITERS = { pt = { new = C.ps_ptw_new, free = C.ps_ptw_free, ctype = "ps_ptw *[1]", write = write_pt },
  safetensors = { new = C.ps_stw_new, free = C.ps_stw_free, ctype = "ps_stw *[1]", write = write_st } }
WRITERS.pth, WRITERS.bin, WRITERS.ckpt = WRITERS.pt, WRITERS.pt, WRITERS.pt

local function write(format, root, path, metadata)
  local out = ffi.new(format.ctype)
  check(format.new(path, out))
  local writer = ffi.gc(out[0], format.free)
  local ok, problem = pcall(format.write, writer, root, path, metadata)
  format.free(ffi.gc(writer, nil))                         -- freed immediately, because this removes the temporary file
  if not ok then error(problem, 0) end
end

-- Returns the number of tensors and their total size in bytes. Each tensor is counted once.
local function count(node, seen, total)
  if seen[node] then return total end
  seen[node] = true
  if node.kind == KIND.TENSOR then
    local known = seen[node.file] or {}
    seen[node.file] = known
    if not known[node.identity] then
      known[node.identity] = true
      total.tensors, total.nbytes = total.tensors + 1, total.nbytes + tree.kept_nbytes(node)
    end
  end
  for _, token in ipairs(node.keys or {}) do count(node.entries[token].value, seen, total) end
  for _, item in ipairs(node.items or {}) do count(item, seen, total) end
  return total
end

-- Removes a tensor from the shards' dicts. Returns the removed entries, by the path of their shard.
local function take_out(shards, name)
  local token, found = KIND.STRING .. ":" .. name, {}
  for _, file in ipairs(shards) do
    local root = file.root
    if root.entries[token] then
      found[file.path], root.entries[token] = root.entries[token], nil
      for i, other in ipairs(root.keys) do
        if other == token then table.remove(root.keys, i) break end
      end
    end
  end
  return found
end

-- Assembles tensors from pieces. Removes the pieces from the shards' dicts, and adds the whole tensors to the first
-- shard.
local function put_together(shards, pieced)
  local names, whole = {}, {}
  for name in pairs(pieced) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do
    local entry, parts, key = pieced[name], {}, nil
    local found = take_out(shards, name)
    for k, piece in ipairs(entry.pieces) do
      local at = found[piece.path]
      if not at then error(("%s has no tensor '%s', although a piece of it should be "
        .. "there"):format(piece.path, name), 0) end
      key = key or at
      parts[k] = { node = at.value, offset = piece.offset, shape = piece.shape,
        at = piece.at or rectangles.zeros(piece.shape) }
    end
    whole[i] = { key = key.key, text = name, value = tree.pieced(name, entry, parts) }
  end
  for i, name in ipairs(names) do
    local root, token = shards[1].root, KIND.STRING .. ":" .. name
    root.keys[#root.keys + 1], root.entries[token] = token, whole[i]
  end
end

-- Raises an error if each of the files has only a part of the same layers, because a merge would result in a wrong
-- model.
local function refuse_parts(paths, shards)
  local ranks = {}
  for i, path in ipairs(paths) do
    local pieces = rank_files.pieces_in(shards[i].metadata)
    if pieces then
      error(("%s has pieces of tensors ('%s'), not whole ones; its folder's index.json has their places: merge the "
        .. "folder"
        ):format(path, pieces[1]), 0)
    end
    local name = #paths > 1 and next(shard_note.entries(shards[i].metadata.psluajit_shards))
    if name then
      error(("%s has a part of '%s', which ranks of tensor parallelism share; merge a folder of ps.checkpoints.save or "
        .. "of save_parallelized, which has the places of the parts"):format(path, tostring(name)), 0)
    end
    local tp = path:match "pytorch_model_tp_(%d+)_pp_%d+%.bin$"
    if tp then ranks[#ranks + 1] = tp end
    if tp and tp ~= ranks[1] then
      error(("%s belongs to a rank with parts of layers (tensor parallelism), and so does %s; without the "
        .. "placement.json "
        .. "of their folder the places of the parts are unknown, so they cannot be merged"):format(path, paths[1]), 0)
    end
  end
end

local function merged(shards, paths, options)
  local function differ(label, kind, from, to)
    local text = ("'%s', %s, differs between %s and %s"):format(label, kind, from, to)
    if options.strict then error(text, 0) end
    if options.note then options.note(text .. "; the latter is used") end
  end
  local root, metadata = nil, {}
  for i, path in ipairs(paths) do shards[i] = tree.open(path) end
  if options.pieces then put_together(shards, options.pieces) else refuse_parts(paths, shards) end
  for i, path in ipairs(paths) do
    root = root and join(root, shards[i].root, "", { differ = differ, known = {} }) or shards[i].root
    for key, value in pairs(shards[i].metadata) do
      if metadata[key] and metadata[key].value ~= value and key ~= CHECKSUMS and not options.metadata then
        differ(key, "metadata", metadata[key].path, path)
      end
      metadata[key] = { value = value, path = path }
    end
  end
  local total = count(root, {}, { tensors = 0, nbytes = 0 })
  if total.tensors == 0 then
    error(("%s: there is no tensor in %s"):format(options.out, table.concat(paths, ", ")), 0)
  end
  local texts = {}
  for key, entry in pairs(metadata) do texts[key] = entry.value end
  texts = options.metadata or texts
  write(WRITERS[merge.format(options.out)], root, options.out, texts)
  return total
end

--- Returns the format that a file name's extension denotes, or nil.
---@param path string
---@return string?
function merge.format(path)
  caller.typed(path, "string", "merge.format: the path")
  local extension = (path:match("%.(%w+)$") or ""):lower()
  return WRITERS[extension] and extension
end

local OPTIONS = { out = "string", strict = "boolean", note = "callable", metadata = "table", pieces = "table" }

--- Merges files, in the order of ranks, into options.out. If there is an older file, it is replaced only when the new
--- file is complete on disk.
---@param paths string[] .pt or safetensors files; a file's contents show its format
---@param options { out: string, strict: boolean?, note: fun(text: string)?, metadata: table<string, string>?, pieces:
---  table<string, table>? } strict: if true, a difference raises an error; otherwise `note` is called with a text about
---  it. metadata: metadata of a safetensors result, instead of the shards' metadata. pieces: the tensors of which the
---  files contain rectangles, by name: { dtype, shape, pieces = { { path, offset, shape, at } } }
---@return { tensors: integer, nbytes: integer } total
function merge.run(paths, options)
  caller.typed(paths, "table", "merge.run: the list of files")
  for _, path in ipairs(paths) do caller.typed(path, "string", "merge.run: a file") end
  if #paths == 0 then caller.error("merge.run: the list of files is empty") end
  caller.typed(caller.options(options, "merge.run", OPTIONS).out, "string", "merge.run: out")
  if not merge.format(options.out) then
    error(("the name '%s' has no known format; end it in .pt (PyTorch) or .safetensors"):format(options.out))
  end
  local shards = {}
  local ok, result = pcall(merged, shards, paths, options)
  for _, file in pairs(shards) do tree.close(file) end
  if not ok then error(result, 0) end
  return result
end

--- Merges a checkpoint's folder into one file. ps.checkpoints.load accepts the file in place of the folder.
---@param path string the checkpoint's own folder
---@param out string a .safetensors file
---@return { tensors: integer, nbytes: integer } total
---@return integer files
function merge.folder(path, out)
  caller.typed(path, "string", "merge.folder: the checkpoint's folder")
  caller.typed(out, "string", "merge.folder: the file to write")
  if merge.format(out) ~= "safetensors" then
    error(("a checkpoint's folder can be merged only to a .safetensors file, not to %s"):format(out))
  end
  local opened = restore.open_folder(path)
  opened.tensors:close()
  local paths = {}
  for i, file in ipairs(opened.tensors.files) do paths[i] = file.path end
  opened.state.rng = opened.rng[1]
  local pieces = opened.tensors:divided()
  return merge.run(paths, { out = out, strict = true, pieces = next(pieces) and pieces or nil,
    metadata = { format = "pt", [CHECKSUMS] = "", psluajit = encode(opened.state) } }), #paths
end

return merge
