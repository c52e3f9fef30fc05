-- SPDX-License-Identifier: BSD-3-Clause
return require "ps.io.safetensors"
