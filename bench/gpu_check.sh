#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Checks and measures the device cuda on a machine with a GPU. The machine needs only a driver, the CUDA toolkit, and
# Python with PyTorch 2.x:
#   bench/gpu_check.sh pack       where psluajit was built: packs everything needed into one file in build/gpu
#   bench/gpu_check.sh correct    on the GPU machine, in a copy of the tree with build/gpu (or with a build of its own)
#   bench/gpu_check.sh speed
#   bench/gpu_check.sh offload
#   bench/gpu_check.sh largest
#   bench/gpu_check.sh kernels    the kernels of a training step with their times, by Nsight Compute
# Each part takes less than 8 minutes and ends with a table. Rows that would begin later are listed as skipped. If a
# row still runs at its limit, the script prints where its threads are and what the GPU does, ends the row, and uses
# its output so far. The exit code says whether a check failed. OUT (out/gpu) gets three files per part: PART.txt, the
# rows in order of completion and the tables; PART.log, all output; PART.tsv, the figures as JSON. BUILD is the build
# folder, PYTHON the Python that has PyTorch, ONLY=TEXT runs only rows with TEXT in their names, PART_S the seconds of
# a part (470). SMALL=1 uses toy sizes to test the script itself, with peers on PEER_DEVICE.
set -u
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build}
out=${OUT:-out/gpu}
python=${PYTHON:-python3}
pack=$build/gpu
part=${1:-}
machine_path=${LD_LIBRARY_PATH:-}
failed=0

say() {
  local line
  line=$(printf '%-44s %-8s %s' "$1" "$2" "$3")
  printf '%4d s  %s\n' $SECONDS "$line" | tee -a "$out/$part.txt"
}

# Packs the Lua modules and all libraries except those of the C library, which must be the target machine's own.
pack_up() {
  if ! [ -x "$build/psluajit" ] || ! [ -f "$build/libps_cuda.so" ]; then
    echo "build psluajit and libps_cuda.so first"
    exit 1
  fi
  rm -rf "$pack" && mkdir -p "$pack/bin/gen" "$pack/lib" "$pack/lua" || exit 1
  cp "$build/psluajit" "$build/libps_cuda.so" "$pack/bin/" && cp "$build/gen/ops.lua" "$pack/bin/gen/" || exit 1
  local dir module lib
  for dir in /usr/share/lua/5.1 /usr/local/share/lua/5.1; do [ -d "$dir" ] && cp -rL "$dir/." "$pack/lua/"; done
  for dir in /usr/lib/x86_64-linux-gnu/lua/5.1 /usr/local/lib/lua/5.1; do
    [ -d "$dir" ] && cp -rL "$dir/." "$pack/lua/"
  done
  { echo "$build/psluajit"; find "$pack/lua" -name '*.so'; } | while read -r module; do
    ldd "$module" | awk '$3 ~ /^\// { print $3 }' | while read -r lib; do
      case $(basename "$lib") in
        libc.so*|libm.so*|libdl.so*|libpthread.so*|librt.so*) ;;
        *) cp -nL "$lib" "$pack/lib/" ;;
      esac
    done
  done
  strip --strip-unneeded "$pack"/lib/*.so* 2>/dev/null
  strip -g "$pack/bin/psluajit" "$pack/bin/libps_cuda.so"
  tar -C "$build" -czf "$build/gpu.tar.gz" gpu && rm -r "$pack" && mkdir "$pack" &&
    mv "$build/gpu.tar.gz" "$pack/all.tar.gz" || exit 1
  du -sh "$pack"
}

# Prints the folder of an NVIDIA library with a given name, in the toolkit or in a Python package.
find_library() {
  local nvcc name=$1
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  { ldconfig -p 2>/dev/null | awk -v name="$name" '$1 == name { print $NF }'
    find -L "$(dirname "$nvcc")/../lib64" "$(dirname "$nvcc")/../targets" -name "$name" 2>/dev/null
    "$python" -c 'import sys; print("\n".join(sys.path))' 2>/dev/null | while read -r dir; do
      [ -d "$dir/nvidia" ] && find "$dir/nvidia" -name "$name" 2>/dev/null
    done
  } | head -n 1
}

# Selects the libraries of a packed psluajit. The compiler's libraries are omitted if the machine has them, since its
# versions are the same or newer, and other libraries can need them.
own_libraries() {
  local name
  for name in libstdc++.so.6 libgcc_s.so.1 libgomp.so.1; do
    [ -e "$pack/lib/$name" ] && ldconfig -p 2>/dev/null | grep -q "$name .*x86-64" && rm "$pack/lib/$name"
  done
  export LD_LIBRARY_PATH="$PWD/$pack/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  export LUA_PATH="$PWD/$pack/lua/?.lua;$PWD/$pack/lua/?/init.lua;;" LUA_CPATH="$PWD/$pack/lua/?.so;;"
}

set_up() {
  mkdir -p "$out" && work=$(mktemp -d) || exit 1
  trap 'rm -rf "$work"' EXIT
  trap 'end_session; table; exit 143' INT TERM HUP
  : >"$out/$part.txt" && : >"$out/$part.log" && : >"$out/$part.tsv"
  run=$build/psluajit
  if [ -f "$pack/all.tar.gz" ] && ! [ -x "$pack/bin/psluajit" ]; then
    tar -C "$build" -xzf "$pack/all.tar.gz" || exit 1
  fi
  if [ -x "$pack/bin/psluajit" ]; then
    run=$pack/bin/psluajit
    echo "$PWD" >"$pack/bin/psluajit.root"
    own_libraries
  fi
  local name library
  for name in $(ldd "$(dirname "$run")/libps_cuda.so" 2>/dev/null | awk '/libcublasLt/ { print $1 }') libnccl.so.2; do
    library=$(find_library "$name")
    [ -n "$library" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(dirname "$library")"
  done
  export LD_LIBRARY_PATH PYTHONUNBUFFERED=1 PS_SPEC_SLOW=0
  peer=(env "LD_LIBRARY_PATH=$machine_path" "$python")
  { date -u; uname -r; nproc; head -n 3 /proc/meminfo; nvidia-smi; echo "LD_LIBRARY_PATH=$LD_LIBRARY_PATH"; } \
    >>"$out/$part.log" 2>&1
  echo 'local ps = require "ps" print(ps.device("cuda").description)' >"$work/device.lua"
  if ! card=$("$run" "$work/device.lua" 2>&1); then
    { echo "$card"; ldd "$run" "$(dirname "$run")/libps_cuda.so"; } 2>&1 | tee -a "$out/$part.log"
    tail -n 40 "$out/$part.log"
    echo "nothing was checked"
    exit 1
  fi
  echo "$part, $card" | tee -a "$out/$part.txt"
  hopper=""
  case $card in *"compute capability 9.0"*) hopper=1 ;; esac
}

# Prints the process ids of a session. Process groups do not contain the processes that `timeout` and the launcher
# start.
in_session() {
  local stat
  for stat in /proc/[0-9]*/stat; do
    [ "$(sed 's/.*) //' "$stat" 2>/dev/null | cut -d' ' -f4)" = "$1" ] && basename "${stat%/stat}"
  done
}

# Prints the state of a session's processes and of the GPU. If the GPU is busy, a kernel does not end. If it is idle, a
# process waits for it forever.
look_at() {
  local pid task debugger tried=0
  debugger=$(command -v cuda-gdb || echo /usr/local/cuda/bin/cuda-gdb)
  echo "--- what ran at the limit"
  nvidia-smi --query-gpu=utilization.gpu,memory.used,clocks.sm,temperature.gpu --format=csv 2>&1
  for pid in $(in_session "$1"); do
    echo "process $pid: $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-200)"
    for task in "/proc/$pid"/task/*; do
      echo "  $(cat "$task/comm" 2>/dev/null): $(grep -h '^State' "$task/status" 2>/dev/null)," \
        "$(cat "$task/wchan" 2>/dev/null)"
    done | sort | uniq -c | sort -rn | head -n 12
    if [ -x "$debugger" ] && [ $tried -lt 2 ] && grep -qs psluajit "/proc/$pid/comm"; then
      tried=$((tried + 1))
      timeout -s KILL 25 "$debugger" -batch -p "$pid" -ex 'thread apply all bt 14' -ex 'info cuda kernels' </dev/null \
        2>&1 | grep -v '^\[New LWP' | tail -n 90
    fi
  done
}

session=""
end_session() {
  [ -n "$session" ] || return 0
  local i pids
  for i in 1 2 3 4 5 6 7 8 9 10; do
    pids=$(in_session "$session")
    [ -n "$pids" ] || break
    kill "$([ "$i" -gt 4 ] && echo -KILL || echo -TERM)" $pids 2>/dev/null     # ends only these processes, by their ids
    sleep 0.5
  done
  kill -KILL -- "-$session" 2>/dev/null                # used if /proc does not report sessions
  session=""
}

# Runs a command and returns its exit code. Arguments: LIMIT_S LOG COMMAND... If the command reaches its limit, the code
# is 124, and the log describes what the command was doing.
guarded() {
  local limit=$1 log=$2 rc=0 pid
  shift 2
  if [ "$(type -t "$1")" = function ]; then
    export -f "$1"
    export work
    set -- bash -c '"$@"' bash "$@"
  fi
  setsid "$@" >"$log" 2>&1 </dev/null &
  pid=$! session=$!
  limit=$((SECONDS + limit))
  while kill -0 $pid 2>/dev/null && [ $SECONDS -lt $limit ]; do sleep 0.1; done
  if kill -0 $pid 2>/dev/null; then
    look_at $pid >"$work/look" 2>&1
    end_session
    cat "$work/look" >>"$log"
    return 124
  fi
  wait $pid || rc=$?
  end_session                                          # ends processes that the command left running
  return $rc
}

# Prints the rows one after another, since they run at the same time.
keep_log() {
  exec 8>>"$out/$part.log"
  flock 8
  { printf '\n===== %s: exit code %s\n' "$1" "$2"; head -c 20000 "$3"
    [ "$(wc -c <"$3")" -gt 20000 ] && printf '\n...\n' && tail -c +20001 "$3" | tail -c 300000; } >&8
  exec 8>&-
}

# The seconds that a row can take: LIMIT_S, or the remaining time of the part. With 0 seconds, the row is listed as
# skipped.
part_s=${PART_S:-470}
allowed() {
  local left=$((part_s - SECONDS))
  [ $left -lt 5 ] && left=0
  [ $left -lt "$1" ] && echo $left || echo "$1"
}

wanted() { [[ "$1" == *"${ONLY:-}"* ]]; }

# Finds the op at which a run failed or hung. It runs the run again, prints each op before it begins, and waits for each
# op. This happens once per part, and not if memory ran out.
traced=""
trace() {
  local name=$1 rc=0 limit
  shift
  if [ -n "$traced" ] || grep -aqE 'iB of memory|does not fit|budget' "$work/log"; then return; fi
  traced=1
  limit=$(allowed 45)
  [ "$limit" = 0 ] && return
  guarded "$limit" "$work/trace" env PS_CUDA_SYNC=trace "$@" || rc=$?
  { printf '\n===== %s, each op waited for: exit code %s\n' "$name" "$rc"
    tail -n 60 "$work/trace"; } >>"$out/$part.log"
  say "  again, with PS_CUDA_SYNC=trace" "exit $rc" \
    "last op: $(grep -a '^cuda op' "$work/trace" | tail -n 1 | cut -c9-60)"
}

# Runs a check, which passes if the command succeeds. Arguments: NAME LIMIT_S COMMAND...
check() {
  local name=$1 limit log=$work/log begin=$SECONDS rc=0
  wanted "$name" || return 0
  limit=$(allowed "$2")
  shift 2
  if [ "$limit" = 0 ]; then say "$name" skipped "no time was left"; return; fi
  guarded "$limit" "$log" "$@" || rc=$?
  keep_log "$name" $rc "$log"
  if [ $rc = 0 ] && tail -n 1 "$log" | grep -q '^busted: 0 passed'; then
    say "$name" skipped "$(tail -n 1 "$log")"
    return
  fi
  if [ $rc = 0 ]; then
    say "$name" ok "$((SECONDS - begin)) s, $(tail -n 1 "$log" | cut -c1-70)"
    return
  fi
  if grep -q "Device not supported" "$log"; then
    say "$name" skipped "the tool does not work on this machine"
    return
  fi
  failed=$((failed + 1))
  say "$name" FAILED "exit $rc$([ $rc = 124 ] && echo " (at its limit of $limit s)"), see $part.log"
  { grep -E 'FAILED|Error:|Invalid|hazard|in kernel' "$log" | head -n 20; tail -n 25 "$log"; } | cut -c1-200
  [ "$1" = "$run" ] && [[ "$2" == bench/* || "$2" == "$work"/* ]] && trace "$name" "$@"
  return 0
}

# Runs a measurement. Arguments: NAME LIMIT_S COMMAND... Each JSON line of the output is used, even if the command fails
# later.
measure() {
  local name=$1 limit log=$work/log rc=0 lines
  wanted "$name" || return 0
  limit=$(allowed "$2")
  shift 2
  if [ "$limit" = 0 ]; then say "$name" skipped "no time was left"; return 0; fi
  guarded "$limit" "$log" "$@" || rc=$?
  keep_log "$name" $rc "$log"
  lines=$(grep -a '^{.*}$' "$log")
  [ -n "$lines" ] && while read -r line; do printf '%s\t%s\n' "$name" "$line"; done <<<"$lines" >>"$out/$part.tsv"
  if [ -n "$lines" ]; then
    printf '%s\n' "$lines" >"$work/lines"
    while read -r line; do say "$name" "" "$line"; done < <("$run" bench/gpu_table.lua --figures "$work/lines" 2>&1)
  fi
  if [ $rc != 0 ]; then
    say "$name" "$([ -n "$lines" ] && echo cut || echo none)" "exit $rc, see $part.log"
    grep -av '^{' "$log" | tail -n 12 | cut -c1-200
    [ -z "$lines" ] && [ "$1" = "$run" ] && trace "$name" "$@"
  fi
  [ -n "$lines" ]
}

smoke() {
  cat >"$work/smoke.lua" <<'END'
local ps, gpt2 = require "ps", require "models.gpt2"
for _, dtype in ipairs { "fp32", "bf16", "fp16" } do
  local a, b = ps.randn { 96, 160 }:to(dtype), ps.randn { 160, 72 }:to(dtype)
  local want, got = a:matmul(b):double(), a:to("cuda"):matmul(b:to("cuda")):to("cpu"):double()
  local off = (got - want):abs():max():item() / want:abs():max():item()
  print(dtype, "product", off)
  assert(off < (dtype == "fp32" and 2e-3 or 2e-2), "a product in " .. dtype .. " is off by " .. off)
end
local losses = {}
for _, device in ipairs { "cpu", "cuda" } do
  ps.manual_seed(1)
  local model = gpt2.new("tiny"):to(device)
  local optimizer = ps.optim.AdamW(model, { lr = 1e-3 })
  ps.manual_seed(2)
  local x = ps.randint(0, 256, { 4, 32 }, { dtype = "int32", device = "cpu" }):to(device):keep()
  for step = 1, 4 do
    local loss = model(x, x)
    optimizer:zero_grad()
    loss:backward()
    optimizer:step()
    losses[step] = losses[step] or loss:item()
    print(device, step, loss:item())
    if step == 4 then assert(math.abs(loss:item() / losses[4] - 1) < 1e-2, "losses differ from the cpu's") end
  end
end
print(require("cjson").encode(ps.device_rates "cuda"))
END
  check "opens, multiplies, and trains a toy model like the cpu" 60 "$run" "$work/smoke.lua"
}

# Starts a check in its own process with its own log, at the same time as others. Arguments: NAME LIMIT_S COMMAND... At
# most JOBS (10) checks run at a time. `join` waits for all of them and counts the failures.
jobs_at_once=${JOBS:-10}
job_pids=()
job() {
  wanted "$1" || return 0
  while [ "$(jobs -rp | wc -l)" -ge "$jobs_at_once" ]; do sleep 0.1; done
  (
    trap 'end_session; exit 143' INT TERM HUP
    work=$(mktemp -d "$work/job.XXXXXX") failed=0
    check "$@"
    exit $failed
  ) &
  job_pids+=($!)
}

join() {
  local pid
  for pid in "${job_pids[@]}"; do wait "$pid" || failed=$((failed + 1)); done
  job_pids=()
}

# Checks that two runs with the same seed have bit-identical losses.
same_twice() {
  local i
  for i in 1 2; do
    "$@" >"$work/same.$i" 2>&1 || { cat "$work/same.$i"; return 1; }
    grep -o '^step.*loss [0-9.a-z]*' "$work/same.$i" >"$work/losses.$i"
  done
  cat "$work/losses.1"
  test -s "$work/losses.1" && cmp "$work/losses.1" "$work/losses.2" && echo "same losses twice"
}

# Runs all correctness rows. The toy model runs first and alone, since its failure would make all other rows fail. Then
# the other rows run at the same time.
correct() {
  local model=gpt2 small=char rows=4 seq=512 parts=8 part_of dtype full=1 real="PS_CUDA_REAL=1" llama=llama-110m
  [ "${SMALL:-}" = 1 ] && model=tiny small=tiny rows=1 seq=32 full=0 parts=2 llama=tiny
  smoke
  # LuaJIT's compiler is off: its traces end by unwinding the stack, which aborts under the sanitizer.
  local step=("$run" -joff bench/train.lua --device cuda --model "$small" --batch 2 --seq 32 --steps 3 --gemm 0)
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  if [ -n "$hopper" ]; then
    job "attention by wgmma against ref and mma" 120 env $real "$run" spec/run.lua cuda_attention
  else
    say "attention by wgmma" skipped "it is for compute capability 9.0"
  fi
  for dtype in bf16 fp32 fp16; do
    for part_of in $(seq 1 $parts); do
      job "ops against ref, $dtype, part $part_of" 150 env PS_TEST_DEVICE=cuda PS_TEST_TYPES=$dtype \
        PS_TEST_PART="$part_of/$parts" "$run" spec/run.lua ops
    done
  done
  job "golden losses, chunks, epilogues, attention" 200 env $real PS_FULL=$full PS_CUDA_OPS=0 "$run" spec/run.lua cuda
  job "kernels by shape against ref" 120 env $real PS_FULL=$full "$run" spec/run.lua cuda_kernels
  job "streams: the same bits with copies as without" 120 env $real "$run" spec/run.lua cuda_streams
  job "examples, and state moved between cpu and cuda" 120 env $real "$run" spec/run.lua cuda_use
  job "trains $model twice to the same losses" 120 same_twice "$run" bench/train.lua --device cuda --model $model \
    --batch $rows --seq $seq --steps 6 --gemm 0
  job "trains $llama twice to the same losses" 120 same_twice "$run" bench/train.lua --device cuda --family llama \
    --model $llama --batch $rows --seq $seq --steps 6 --gemm 0
  local gpus
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || gpus=1
  [ -n "${CUDA_VISIBLE_DEVICES:-}" ] && gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
  job "NCCL, $gpus ranks, against sums in host memory" 60 "$run" tools/launch.lua --nproc-per-node "$gpus" \
    bench/gpu_ranks.lua --mib 64
  if [ -x "$sanitizer" ]; then
    job "compute-sanitizer memcheck" 150 "$sanitizer" --error-exitcode 9 "${step[@]}"
    [ -n "$hopper" ] && job "compute-sanitizer memcheck, attention by wgmma" 100 env PS_CUDA_ATTENTION=wgmma \
      "$sanitizer" --error-exitcode 9 "$run" -joff bench/gpu_speed.lua --part attention --small
    job "compute-sanitizer synccheck" 100 "$sanitizer" --tool synccheck --error-exitcode 9 "${step[@]}"
    job "compute-sanitizer racecheck" 150 "$sanitizer" --tool racecheck --error-exitcode 9 "${step[@]}"
  else
    say "compute-sanitizer" skipped "it is not installed"
  fi
  join
}

# Prints the memory of the first GPU in GB, or 80 if there is no GPU.
card_gib() {
  local mib
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0 2>/dev/null) || mib=81920
  echo $((mib / 1024))
}

# Measures speed. psluajit's figures are first, each with a profile of its step unless PROFILE=0. PEERS=0 skips
# PyTorch's rows, and PEERS=1 runs only these. HOW=blocks compiles PyTorch's models only block by block, which takes a
# third of the time.
speed() {
  local small="" models="gpt2 gpt2-xl llama-3.2-1b" seq=1024 gemm=8192 device=${PEER_DEVICE:-cuda}
  [ "${SMALL:-}" = 1 ] && small=--small models=tiny seq=32 gemm=64
  local model batch half limit family
  if [ "${PEERS:-}" != 1 ]; then
    measure "products" 40 "$run" bench/gpu_speed.lua --part matmul $small
    measure "attention" 40 "$run" bench/gpu_speed.lua --part attention $small
    [ -n "$hopper" ] && measure "attention by mma" 40 env PS_CUDA_ATTENTION=mma "$run" bench/gpu_speed.lua \
      --part attention $small
    for model in $models; do
      sizes_of "$model"
      for half in $batch $((batch / 2)) $((batch / 4)); do
        measure "$model" 80 "$run" bench/train.lua --device cuda --family "$family" --model "$model" --batch "$half" \
          --seq $seq --steps 10 --gemm $gemm && break
      done
      [ "${PROFILE:-}" = 0 ] || check "$model, time by op" 60 "$run" bench/train.lua --device cuda \
        --family "$family" --model "$model" --batch "$half" --seq $seq --steps 5 --gemm 0 --profile
      measure "$model, cheap outputs kept" 60 "$run" bench/train.lua --device cuda --family "$family" \
        --model "$model" --batch "$half" --seq $seq --steps 10 --gemm 0 --keep
    done
    measure "copies, pageable" 40 "$run" bench/gpu_speed.lua --part copies $small
  fi
  [ "${PEERS:-}" = 0 ] && return
  measure "products, PyTorch" 60 "${peer[@]}" bench/peers/gpu_torch.py matmul --device "$device" $small
  measure "attention, PyTorch" 60 "${peer[@]}" bench/peers/gpu_torch.py attention --device "$device" $small
  for model in $models; do
    sizes_of "$model"
    limit=$([ "$model" = gpt2-xl ] && echo 210 || echo 110)
    measure "$model, PyTorch" "$limit" "${peer[@]}" bench/peers/gpu_torch.py train \
     --device "$device" --model "$model" --batch "$batch" --seq $seq --steps 10 --how "${HOW:-blocks,whole}"
  done
  measure "copies, PyTorch" 40 "${peer[@]}" bench/peers/gpu_torch.py copies --device "$device" $small
}

# Prints a model's family, and a batch size for the card's memory.
sizes_of() {
  family=gpt2 batch=16
  case $1 in
    gpt2) batch=64 ;;
    llama*) family=llama ;;
  esac
  [ "$(card_gib)" -lt 100 ] && batch=$((batch / 2))
  [ "${SMALL:-}" = 1 ] && batch=2
}

# Prints model sizes for the card. At width 4096, a layer has 0.2014 B parameters of 14 bytes each. 8 GiB of the card
# are reserved for everything else.
sizes() {
  gib=$(($(card_gib) * 92 / 100))
  size=(--width 4096 --heads 32) layers=25 memory=24GiB host=100GiB resident=${gib}GiB batch=4 seq=1024
  [ "$gib" -lt 90 ] && layers=20 memory=19GiB
  most=$(((gib + 100 - 8) * 10737 / 14 / 2014 - 1))
  if [ "${SMALL:-}" = 1 ]; then
    size=(--model tiny) layers=4 memory=1MiB host=4MiB resident=64MiB most=40 batch=1 seq=32
  fi
}

# Measures offloading with a state of three times the budget: 5.3 B parameters, 69 GiB, or 4.3 B parameters, 56 GiB, on
# a card with 80 GB.
offload() {
  local size layers memory host resident batch seq most gib device=${PEER_DEVICE:-cuda}
  sizes
  measure "copies, PyTorch" 40 "${peer[@]}" bench/peers/gpu_torch.py copies --device "$device"
  measure "state 3 x the device's budget" 200 "$run" bench/gpu_offload.lua "${size[@]}" --layers $layers \
    --device-memory $memory --host $host --resident "$resident" --batch $batch --seq $seq --recompute
  measure "the same, PyTorch FSDP2 offloaded" 150 "${peer[@]}" bench/peers/gpu_torch.py train --device "$device" \
    "${size[@]}" --layers $layers --batch $batch --seq $seq --steps 6 --offload ||
    measure "the same, PyTorch FSDP2 offloaded, half the layers" 100 "${peer[@]}" bench/peers/gpu_torch.py train \
      --device "$device" "${size[@]}" --layers $((layers / 2)) --batch $batch --seq $seq --steps 6 --offload
}

# Searches the largest number of parameters that card and host can hold together. A smaller number runs first, so that
# there is a figure even if the search takes too long.
largest() {
  local size layers memory host resident batch seq most gib share
  sizes
  for share in 85 100; do
    measure "the largest that trains with $host, from $share %" 230 "$run" bench/gpu_offload.lua "${size[@]}" \
      --layers $((most * share / 100)) --largest --device-memory "$resident" --host $host --batch 1 --seq $seq \
      --steps 3 --recompute
  done
}

# Prints the kernels of MODEL's third and later steps by name: calls, milliseconds and fraction of the time. Nsight
# Compute times each kernel alone, so the sums contain neither gaps nor overlap.
kernels_of() {
  local model=$1 launches=$2 ncu
  ncu=$(command -v ncu || find /opt/nvidia /usr/local/cuda* -name ncu -type f 2>/dev/null | head -n 1)
  sizes_of "$model"
  "$ncu" --clock-control none --metrics gpu__time_duration.sum --csv --print-units base \
    --launch-skip "$((2 * launches))" --launch-count "$launches" "$run" bench/train.lua --device cuda \
    --family "$family" --model "$model" \
    --batch "$batch" --seq 1024 --steps 5 --gemm 0 >"$work/ncu.csv" 2>"$work/ncu.err" || tail -n 5 "$work/ncu.err"
  "$run" bench/gpu_table.lua --kernels "$work/ncu.csv"
}

kernels() {
  local model
  export -f sizes_of card_gib
  export run
  for model in ${MODELS:-gpt2 llama-3.2-1b}; do check "$model, kernels" 120 kernels_of "$model" 500; done
  cat "$out/$part.log"
}

table() { "$run" bench/gpu_table.lua --part "$part" "$out/$part.tsv" 2>&1 | tee -a "$out/$part.txt"; }

case $part in
  pack) pack_up; exit ;;
  correct|speed|offload|largest|kernels) set_up; "$part" ;;
  *) sed -n '3,20s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
printf '\n%s, %s, %d s\n' "$part" "$card" $SECONDS
cut -c9- "$out/$part.txt" | tail -n +2
table
[ "$failed" -eq 0 ]
