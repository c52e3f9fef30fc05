-- SPDX-License-Identifier: BSD-3-Clause
-- The old name of two things. ps.checkpoint(...) and require "ps.checkpoint" both end here.
package.loaded[...] = nil                -- or Lua would call the next require a loop
require("ps.core.caller").error("ps.checkpoint has two names: ps.recompute(fn, ...) computes a function's "
  .. "activations again in backward, and ps.checkpoints (require \"ps.checkpoints\") saves and loads files")
