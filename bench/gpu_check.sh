#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Checks and measures the device cuda on a machine with a GPU, whose software may be a driver, the CUDA toolkit and
# Python with PyTorch 2.x, and nothing else:
#   bench/gpu_check.sh pack       where psluajit was built: puts all it needs into build/gpu, as one file
#   bench/gpu_check.sh correct    on the GPU machine, in a copy of the tree with build/gpu (or with a build of its own)
#   bench/gpu_check.sh speed
#   bench/gpu_check.sh offload
# Each part takes less than 8 minutes and ends with one table: what would begin later is listed as skipped, what still
# runs is ended. Its exit code says whether a check failed. Full output goes to OUT (out/gpu), one file a step. BUILD is
# the build folder, PYTHON the Python that has PyTorch. SMALL=1 takes toy sizes, to try the script itself.
set -u
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build}
out=${OUT:-out/gpu}
python=${PYTHON:-python3}
pack=$build/gpu
table=() failed=0

say() { table+=("$(printf '%-44s %-8s %s' "$1" "$2" "$3")"); printf '%s: %s %s\n' "$1" "$2" "$3"; }

# Libraries other than the C library's own, which must be the machine's; Lua modules; golden values.
pack_up() {
  if ! [ -x "$build/psluajit" ] || ! [ -f "$build/libps_cuda.so" ]; then
    echo "build psluajit and libps_cuda.so first"
    exit 1
  fi
  rm -rf "$pack" && mkdir -p "$pack/bin/gen" "$pack/lib" "$pack/lua" "$pack/golden" || exit 1
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
  [ -d "${PS_SHARED:-../shared}/golden" ] && cp -r "${PS_SHARED:-../shared}/golden/." "$pack/golden/"
  tar -C "$build" -czf "$build/gpu.tar.gz" gpu && rm -r "$pack" && mkdir "$pack" &&
    mv "$build/gpu.tar.gz" "$pack/all.tar.gz" || exit 1
  du -sh "$pack"
}

# Where a library of NVIDIA's may lie: the toolkit's folder, or a Python package's.
find_library() {
  local nvcc name=$1
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  { ldconfig -p 2>/dev/null | awk -v name="$name" 'index($1, name) { print $NF }'
    find -L "$(dirname "$nvcc")/../lib64" "$(dirname "$nvcc")/../targets" -name "$name.*" 2>/dev/null
    "$python" -c 'import sys; print("\n".join(sys.path))' 2>/dev/null | while read -r dir; do
      [ -d "$dir/nvidia" ] && find "$dir/nvidia" -name "$name.*" 2>/dev/null
    done
  } | head -n 1
}

set_up() {
  run=$build/psluajit
  if [ -f "$pack/all.tar.gz" ] && ! [ -x "$pack/bin/psluajit" ]; then
    tar -C "$build" -xzf "$pack/all.tar.gz" || exit 1
  fi
  if [ -x "$pack/bin/psluajit" ]; then
    run=$pack/bin/psluajit
    echo "$PWD" >"$pack/bin/psluajit.root"
    export LD_LIBRARY_PATH="$PWD/$pack/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export LUA_PATH="$PWD/$pack/lua/?.lua;$PWD/$pack/lua/?/init.lua;;" LUA_CPATH="$PWD/$pack/lua/?.so;;"
    [ -d "$pack/golden" ] && export PS_SHARED="$PWD/$pack"
  fi
  local name library
  for name in libcublasLt.so libnccl.so; do
    library=$(find_library $name)
    [ -n "$library" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(dirname "$library")"
  done
  export LD_LIBRARY_PATH
  mkdir -p "$out"
  echo 'local ps = require "ps" print(ps.device("cuda").description)' >"$out/device.lua"
  if ! card=$("$run" "$out/device.lua" 2>&1); then
    echo "$card"
    echo "nothing was checked"
    exit 1
  fi
  echo "$card"
  hopper=""
  case $card in *"compute capability 9.0"*) hopper=1 ;; esac
}

# Seconds that a step may take: LIMIT_S, or what the part has left; 0: it is listed as skipped.
part_s=470
allowed() {
  local left=$((part_s - SECONDS))
  [ $left -lt 5 ] && left=0
  [ $left -lt "$1" ] && echo $left || echo "$1"
}

# A check: NAME LIMIT_S COMMAND...; passes when the command does.
check() {
  local name=$1 limit log=$out/${1//[^a-zA-Z0-9]/_}.log
  limit=$(allowed "$2")
  shift 2
  if [ "$limit" = 0 ]; then say "$name" skipped "no time was left"; return; fi
  local begin=$SECONDS rc=0
  timeout "$limit" "$@" >"$log" 2>&1 || rc=$?
  if [ $rc = 0 ]; then
    say "$name" ok "$((SECONDS - begin)) s, $(tail -n 1 "$log" | cut -c1-70)"
  else
    failed=$((failed + 1))
    say "$name" FAILED "exit $rc, see $log"
    tail -n 15 "$log"
  fi
}

# A measurement: NAME LIMIT_S FIGURES COMMAND...; of every JSON line of its output those figures go into the table.
measure() {
  local name=$1 limit figures=$3 log=$out/${1//[^a-zA-Z0-9]/_}.log
  limit=$(allowed "$2")
  shift 3
  if [ "$limit" = 0 ]; then say "$name" skipped "no time was left"; return; fi
  local line rc=0
  timeout "$limit" "$@" >"$log" 2>&1 || rc=$?
  if [ $rc != 0 ]; then
    say "$name" none "exit $rc, see $log"
    tail -n 5 "$log"
    return
  fi
  while read -r line; do say "$name" "" "$line"; done < <(grep '^{' "$log" | "$python" -c '
import json, sys
for line in sys.stdin:
    d = json.loads(line)
    keys = [k for k in sys.argv[1].split() if d.get(k) is not None]
    print("  ".join("%s %s" % (k, "%.4g" % d[k] if isinstance(d[k], float) else d[k]) for k in keys))
' "$figures")
}

correct() {
  check "kernels and training against ref and golden" 420 env PS_CUDA_REAL=1 PS_FULL=1 "$run" spec/run.lua cuda \
    cuda_kernels cuda_streams
  local model=gpt2 small=char rows=4 seq=512
  [ "${SMALL:-}" = 1 ] && model=tiny small=tiny rows=1 seq=32
  for i in 1 2; do
    timeout 120 "$run" bench/train.lua --device cuda --model $model --batch $rows --seq $seq --steps 6 --gemm 0 2>&1 |
      grep -o '^step.*loss [0-9.a-z]*' >"$out/losses_$i"
  done
  check "the same losses twice, bit for bit" 10 bash -c "test -s '$out/losses_1' && cmp '$out/losses_1' '$out/losses_2'"
  local gpus
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || gpus=1
  [ -n "${CUDA_VISIBLE_DEVICES:-}" ] && gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
  check "NCCL, $gpus ranks, against sums in host memory" 100 "$run" tools/launch.lua --nproc-per-node "$gpus" \
    bench/gpu_ranks.lua --mib 64
  if [ -n "$hopper" ]; then
    check "attention by wgmma against ref and mma" 100 env PS_CUDA_REAL=1 "$run" spec/run.lua cuda_attention
  else
    say "attention by wgmma" skipped "it is for compute capability 9.0"
  fi
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  if [ -x "$sanitizer" ]; then
    local step=("$run" bench/train.lua --device cuda --model "$small" --batch 2 --seq 32 --steps 2 --gemm 0)
    check "compute-sanitizer memcheck" 150 "$sanitizer" --error-exitcode 9 "${step[@]}"
    check "compute-sanitizer racecheck" 150 "$sanitizer" --tool racecheck --error-exitcode 9 "${step[@]}"
    [ -n "$hopper" ] && check "compute-sanitizer memcheck, attention by wgmma" 100 env PS_CUDA_ATTENTION=wgmma \
      "$sanitizer" --error-exitcode 9 "$run" bench/gpu_speed.lua --part attention --small
  else
    say "compute-sanitizer" skipped "it is not installed"
  fi
}

# Memory of the first GPU; 80 where none is to be seen.
card_gib() {
  local mib
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0 2>/dev/null) || mib=81920
  echo $((mib / 1024))
}

speed() {
  local figures="n tflops head forward_ms both_ms forward_tflops both_tflops way gb_per_s"
  local trained="batch seq tokens_per_s step_s mfu engine_peak_mib peak_mib"
  local small="" models="gpt2 gpt2-xl" seq=1024 gemm=8192
  [ "${SMALL:-}" = 1 ] && small=--small models=tiny seq=32 gemm=64
  measure "products" 60 "$figures" "$run" bench/gpu_speed.lua --part matmul $small
  measure "products, PyTorch" 60 "$figures" "$python" bench/peers/gpu_torch.py matmul $small
  measure "attention" 60 "$figures" "$run" bench/gpu_speed.lua --part attention $small
  [ -n "$hopper" ] && measure "attention by wgmma" 60 "$figures" env PS_CUDA_ATTENTION=wgmma \
    "$run" bench/gpu_speed.lua --part attention $small
  measure "attention, PyTorch" 60 "$figures" "$python" bench/peers/gpu_torch.py attention $small
  measure "copies, pageable" 60 "$figures" "$run" bench/gpu_speed.lua --part copies $small
  local model batch
  for model in $models; do
    batch=$([ "$model" = gpt2 ] && echo 64 || echo 16)
    [ "$(card_gib)" -lt 100 ] && batch=$((batch / 2))
    [ "${SMALL:-}" = 1 ] && batch=2
    measure "$model" 120 "$trained" "$run" bench/train.lua --device cuda --model "$model" --batch "$batch" \
      --seq $seq --steps 8 --gemm $gemm
    measure "$model, PyTorch" 150 "$trained" "$python" bench/peers/gpu_torch.py train --model "$model" \
      --batch "$batch" --seq $seq
  done
}

offload() {
  local ours="parameters device_memory step_s tokens_per_s compute_s over_bound link_share gb_up gb_down same_losses"
  local theirs="parameters step_s tokens_per_s peak_mib host_bytes_a_parameter"
  # State three times the budget: 5.3 B parameters, 69 GiB, or on a card of 80 GB 4.3 B, 56 GiB. And as many as card and
  # host hold together: 4096 wide, a layer has 0.2014 B parameters, of 14 bytes each; 8 GiB are for the rest.
  local gib=$(($(card_gib) * 92 / 100))
  local size=(--width 4096 --heads 32) layers=25 memory=24GiB host=100GiB resident=${gib}GiB batch=4 seq=1024
  [ "$gib" -lt 90 ] && layers=20 memory=19GiB
  local most=$(((gib + 100 - 8) * 10737 / 14 / 2014 - 1))
  if [ "${SMALL:-}" = 1 ]; then
    size=(--model tiny) layers=4 memory=1MiB host=4MiB resident=64MiB most=40 batch=1 seq=32
  fi
  measure "state 3 x the device's budget" 180 "$ours" "$run" bench/gpu_offload.lua "${size[@]}" --layers $layers \
    --device-memory $memory --host $host --resident $resident --batch $batch --seq $seq --recompute
  measure "the same, PyTorch FSDP2 offloaded" 150 "$theirs" "$python" bench/peers/gpu_torch.py train "${size[@]}" \
    --layers $layers --batch $batch --seq $seq --steps 5 --offload
  measure "the largest that trains with $host" 240 "$ours" "$run" bench/gpu_offload.lua "${size[@]}" --layers $most \
    --largest --device-memory $resident --host $host --batch 1 --seq $seq --steps 3 --recompute
}

case ${1:-} in
  pack) pack_up; exit ;;
  correct|speed|offload) set_up; "$1" ;;
  *) sed -n '3,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
printf '\n%s, %s\n' "$1" "$card"
printf '%s\n' "${table[@]}"
[ "$failed" -eq 0 ]
