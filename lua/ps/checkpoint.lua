-- SPDX-License-Identifier: BSD-3-Clause
-- ps.checkpoint is an old name that had two meanings. ps.checkpoint(...) and require "ps.checkpoint" both raise this
-- error.
package.loaded[...] = nil                -- otherwise, the next require would report a loop
require("ps.core.caller").error("ps.checkpoint has two names: ps.recompute(fn, ...) computes a function's "
  .. "activations again in backward, and ps.checkpoints (require \"ps.checkpoints\") saves and loads files")
