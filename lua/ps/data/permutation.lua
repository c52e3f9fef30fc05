-- SPDX-License-Identifier: BSD-3-Clause
-- Permutations that are computed and not stored. A Feistel network permutes the numbers that fit into 2 * k bits, where
-- k is the smallest number with 4^k >= n. A result of n or more is permuted again until it is less than n. This method
-- is called cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local bit = require "bit"
local C = native.C
local word_array = array "uint64_t"

local permutation = {}

local ROUNDS = 6

--- Returns a function that maps i, from 1 to n, to its position in an order. The order depends only on n and the seed.
---@param n integer
---@param seed integer
---@return fun(i: integer): integer
function permutation.new(n, seed)
  local half = 1
  while 4 ^ half < n do half = half + 1 end
  local mask, shift, word = 2 ^ half - 1, 2 ^ half, word_array(3)
  local function mixed(round, right)
    word[0], word[1], word[2] = seed, round, right
    return tonumber(bit.band(C.ps_xxh3(word, 24), mask))
  end
  return function(i)
    local x = i - 1
    repeat
      local left, right = math.floor(x / shift), x % shift
      for round = 1, ROUNDS do left, right = right, bit.bxor(left, mixed(round, right)) end
      x = left * shift + right
    until x < n
    return x + 1
  end
end

return permutation
