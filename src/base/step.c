/* SPDX-License-Identifier: BSD-3-Clause
 * The step of a context without an engine. */
#include "base/step.h"

const ps_step ps_step_idle;
