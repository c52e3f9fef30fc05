# SPDX-License-Identifier: BSD-3-Clause
"""Runs parts of the oracle, several at a time:
each.py --psluajit PATH --seed N [--cases N] [--jobs N] [--limit S] PART...

Each part runs in a process that is forked from this one, after this one has imported PyTorch and transformers. The
imports take longer than most parts. The lines of a part are printed together when it ends. The last line is
"oracle: PART ended well" or "oracle: PART failed".
"""
import argparse
import os
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa
import transformers  # noqa
from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM  # noqa

FOLDER = os.path.dirname(os.path.abspath(__file__))


def run(part, words, output):
    """Runs a part in this process, which ends with it. All output goes to the file."""
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    path = os.path.join(FOLDER, part + "_oracle.py")
    sys.argv = [path] + words
    status = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def finish(part, output, status, why):
    output.seek(0)
    said = output.read().decode(errors="replace")
    output.close()
    if not re.search(r"^oracle %s: [0-9]+ cases, [0-9]+ off" % part, said, re.M):
        said += "oracle %s did not run to its end%s\n" % (part, why)
        status = 1
    sys.stdout.write("%soracle: %s %s\n" % (said, part, "failed" if status else "ended well"))
    sys.stdout.flush()
    return status


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--psluajit", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--cases")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1800)
    parser.add_argument("parts", nargs="+")
    options = parser.parse_args()
    words = ["--psluajit", options.psluajit, "--seed", options.seed]
    words += ["--cases", options.cases] if options.cases else []
    running = {}                                  # by process id: the part, its output, and when it began
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        sys.exit(run_all(options, words, running) != 0)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)


def run_all(options, words, running):
    waiting, failed = list(options.parts), 0
    while waiting or running:
        while waiting and len(running) < options.jobs:
            part, output = waiting.pop(0), tempfile.TemporaryFile()
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                run(part, words, output)
            running[pid] = (part, output, time.monotonic())
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            part, output, _ = running.pop(pid)
            failed += finish(part, output, status, "") != 0
            continue
        for pid, (part, output, began) in list(running.items()):
            if time.monotonic() - began > options.limit:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del running[pid]
                failed += finish(part, output, 1, " in %g s" % options.limit) != 0
        time.sleep(0.05)
    return failed


main()
