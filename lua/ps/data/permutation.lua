-- SPDX-License-Identifier: BSD-3-Clause
-- Random permutations of n numbers that need no memory: each position is computed when it is needed. A Feistel network
-- permutes all numbers of 2 * k bits, where k is the smallest number with 4^k >= n. If the result is n or more, it is
-- permuted again until it is less than n. This method is called cycle walking (Black and Rogaway, "Ciphers with
-- arbitrary finite domains", 2002).
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local bit = require "bit"
local C = native.C
local word_array = array "uint64_t"

local permutation = {}

local ROUNDS = 6

--- Returns a function that maps each i in 1 .. n to a different number in 1 .. n. The mapping depends only on n and the
--- seed.
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
