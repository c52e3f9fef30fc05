-- SPDX-License-Identifier: BSD-3-Clause
-- Defects that spec/faults/plant.lua plants in a copy of the source, one at a time, to see that seeds of
-- tools/faults.lua find them. Each replaces one text of a file, which occurs there once (seeds_spec.lua checks that).
-- None changes a run without faults, except those of what a checkpoint restores.
return {
  { name = "a missing fsync of a checkpoint's file", file = "src/io/file.c",
    from = "do rc = should_fail() ? -1 : fsync(f->fd); while (rc < 0 && errno == EINTR);",
    to = "rc = 0;" },
  { name = "an fsync whose error is ignored", file = "src/io/file.c",
    from = [[if (rc < 0) return ps_fail(PS_EIO, "cannot write %s to its disk: %s", f->path, strerror(errno));]],
    to = "" },
  { name = "a missing fsync of the folder", file = "src/io/file.c",
    from = "do rc = should_fail() ? -1 : fsync(folder); while (rc < 0 && errno == EINTR);",
    to = "rc = 0; (void)folder;" },
  { name = "a missing fsync of the folder in which a folder is made", file = "lua/ps/checkpoints/folder.lua",
    from = "native.check(C.ps_file_fsync_dir(above))", to = "" },
  { name = "an index that is not synced", file = "lua/ps/checkpoints/rank_files.lua",
    from = "native.check(C.ps_file_write_atomic(folder .. INDEX, text, #text))", to = [[
local f = assert(io.open(folder .. INDEX, "wb"))
  assert(f:write(text))
  assert(f:close())]] },
  { name = "an error of a write of the disk tier that is ignored", file = "src/chunk/disk.c",
    from = "    } else if (!idle_try || p->tries > MOST_TRIES)",
    to = "    } else if (job->way == WRITE && res < 0 && res != -EINTR) p->left = 0;\n"
      .. "    else if (!idle_try || p->tries > MOST_TRIES)" },
  { name = "random numbers that are not restored", file = "lua/ps/checkpoints/restore.lua",
    from = "random_state.set(own_rng(opened, group))", to = "own_rng(opened, group)" },
  { name = "a schedule that is not restored", file = "lua/ps/checkpoints/restore.lua",
    from = "if with.sched then load_schedule(opened, with.sched) end", to = "" },
  { name = "exit status 0 after an error", file = "src/main.c",
    from = "return status || p.status ? EXIT_FAILURE : EXIT_SUCCESS;",
    to = "return status ? EXIT_FAILURE : EXIT_SUCCESS;" },
  { name = "older checkpoints that are not removed", file = "lua/ps/checkpoints/folder.lua",
    from = "goes = kept > keep", to = "goes = kept < 0 and kept > keep" },
  { name = "a leftover of a save that is not removed", file = "lua/ps/checkpoints/folder.lua",
    from = 'return name:match("^step%-%d+%.tmp%-") or', to = "return" },
  { name = "`latest` is written before its checkpoint has its name", file = "lua/ps/checkpoints/init.lua",
    from = [[
    if native.check(native.C.ps_file_swap_folder(job.temp, job.final)) == 1 then folder.remove(job.temp) end
  end
  if job.folder then]], to = [[
    if job.folder then folder.set_latest(job.folder, job.name, job.run) end
    if native.check(native.C.ps_file_swap_folder(job.temp, job.final)) == 1 then folder.remove(job.temp) end
  elseif job.folder then]] },
  { name = "a wait that does not look at its condition again", file = "src/chunk/disk.c",
    from = "while (!have && !d->stop) {", to = "if (!have && !d->stop) {" },
  { name = "a checksum of the disk tier that is not compared", file = "src/chunk/disk.c",
    from = "return s->nbytes != p->nbytes || s->sum == ps_xxh3(memory_of(p), p->nbytes);",
    to = "(void)s; return true;" },
  { name = "a checksum of a checkpoint that is not compared", file = "src/io/st_sum.c",
    from = "if (!t || !t->blocks) return 0;", to = "if (!t || !t->blocks || nbytes > 0) return 0;" },
  { name = "a short write of a checkpoint that is not checked", file = "src/io/file.c",
    from = "        from += n, offset += n, nbytes -= n;\n    }\n    return 0;",
    to = "        from += piece, offset += (int64_t)piece, nbytes -= (int64_t)piece;\n    }\n    return 0;" },
  { name = "a short read of a checkpoint that is not checked", file = "src/io/file.c",
    from = "        to += n, at += n, nbytes -= n;\n", to = "        break;\n",
    also = { file = "src/io/st_sum.c", from = "if (!t || !t->blocks) return 0;",
      to = "if (!t || !t->blocks || nbytes > 0) return 0;" } },
  { name = "a short transfer of the disk tier that is not checked", file = "src/chunk/disk.c",
    from = "int64_t whole = res > 0 ? res / PS_DIRECT_ALIGN * PS_DIRECT_ALIGN : 0;",
    to = "int64_t whole = res > 0 ? p->left : 0;", also = {
      from = "return s->nbytes != p->nbytes || s->sum == ps_xxh3(memory_of(p), p->nbytes);",
      to = "(void)s; return true;" } },
  { name = "an EINTR that ends a read", file = "src/io/file.c",
    from = [[
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return ps_fail(PS_EIO, "cannot read]], to = [[
        if (n < 0)
            return ps_fail(PS_EIO, "cannot read]] },
  { name = "an error of a save in the background that is dropped", file = "lua/ps/checkpoints/background.lua",
    from = "native.check(C.ps_saver_wait(saver, seconds_out))", to = "C.ps_saver_wait(saver, seconds_out)" },
  { name = "a rename before the fsync", file = "src/io/file.c",
    from = [[
    do rc = should_fail() ? -1 : fsync(f->fd); while (rc < 0 && errno == EINTR);
    if (rc < 0) return ps_fail(PS_EIO, "cannot write %s to its disk: %s", f->path, strerror(errno));
]], to = "    (void)rc;\n", also = { from = [[
    folder_of(f->path, folder);
    return sync_folder(f->folder, folder);]], to = [[
    folder_of(f->path, folder);
    PS_TRY(sync_folder(f->folder, folder));
    do rc = fsync(f->fd); while (rc < 0 && errno == EINTR);
    return rc < 0 ? ps_fail(PS_EIO, "cannot write %s to its disk: %s", f->path, strerror(errno)) : 0;]] } },
  { name = "a lost wake-up", file = "src/chunk/disk.c",
    from = [[
        while (!have && !d->stop) {
            pthread_cond_wait(&d->work, &d->lock);]], to = [[
        while (!have && !d->stop) {
            pthread_mutex_unlock(&d->lock);
            pthread_mutex_lock(&d->lock);
            pthread_cond_wait(&d->work, &d->lock);]] },
}
