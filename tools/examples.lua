-- SPDX-License-Identifier: BSD-3-Clause
-- Lists psluajit's examples.
require("ps.prompt.scripts").print "examples"
