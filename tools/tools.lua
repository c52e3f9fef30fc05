-- SPDX-License-Identifier: BSD-3-Clause
-- Lists psluajit's tools.
require("ps.prompt.scripts").print "tools"
