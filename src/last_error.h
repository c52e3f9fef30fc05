/* SPDX-License-Identifier: BSD-3-Clause
 * Prints the error that ends the program, once per job and machine. */
#ifndef PS_LAST_ERROR_H
#define PS_LAST_ERROR_H

/* Prints "NAME: TEXT" on standard error. `name` can be NULL. Under psluajit's own launcher each line is marked, and
 * the launcher shows the error once. Under torchrun, Open MPI, MPICH and Slurm, a rank does not print a text that
 * another rank on the same machine has already printed on the same standard error. The rank waits at most one second
 * for the record of printed errors. If it cannot read the record, it prints the text. */
void last_error(const char *name, const char *text);
#endif
