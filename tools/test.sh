#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Runs every test of a build folder: the C tests, then the specs, and with PS_CLUSTER=1 the specs of spec/cluster. If no
# specs are named, the specs of spec/computing.txt run again on each instruction set below this machine's;
# PS_TEST_ISA=all runs all specs again, PS_TEST_ISA=none runs none. The last line is `N passed, N failed`. A test that
# hangs is ended: PS_TEST_LIMIT_S (1800) is the limit of a file of specs in seconds, for slower builds. Tests run two at
# a time. At the same time, those that mostly wait run one by one (spec/waits.txt, spec/c/waits.txt). PS_TEST_JOBS=n: n
# at a time. The lines before the last one repeat the failures and list the skipped tests with the reasons. PS_ORACLE=1
# runs the comparisons with PyTorch, too (tools/oracle.sh run), each part as one test. PS_SANITIZERS=1 runs the C tests
# of build-asan and build-tsan, too, which `make c-tests-sanitized` builds. With CI=true a skipped test counts as
# failed.
#   tools/test.sh [BUILD] [SPEC | test_NAME ...]    test_NAME: a C test
#   tools/test.sh --one TEST        one C test: prints one line with its result, and its output if it failed
root=${0%/*}/..
log=$(mktemp) || exit 1
list=$(mktemp) || exit 1
skips=$(mktemp) || exit 1                     # the reasons, one line per skipped test
failures=$(mktemp) || exit 1                  # the first lines of each failure
trap 'rm -f "$log" "$list" "$skips" "$failures"' EXIT
# Whether a list of C tests in spec/c names a test.
named_in() { grep -qx "$(basename "$2")" "$root/spec/c/$1.txt"; }
# Whether the test starts a thread itself or by a library other than OpenMP's, as the dynamic linker reports it.
starts_threads() {
  grep -h "\`pthread_create'" "$log".bindings.* | grep -qv 'binding file [^ ]*libgomp'
}
if [ "${1:-}" = --one ]; then
  threads=
  case $2 in
    *asan/* | *tsan/*) ;;                      # a sanitizer's own library starts threads
    *) if named_in one_thread "$2"; then threads=none; export LD_DEBUG=bindings LD_DEBUG_OUTPUT="$log.bindings"; fi ;;
  esac
  timeout 600 "$2" >"$log" 2>&1
  code=$?
  unset LD_DEBUG
  if [ $code != 0 ]; then
    printf 'FAIL %s\n%s\n' "$(basename "$2")" "$(tail -n 30 "$log")"
  elif [ -n "$threads" ] && starts_threads; then
    echo "FAIL $(basename "$2"): it starts a thread; delete it from spec/c/one_thread.txt"
  else
    echo "ok   $(basename "$2"): $(tail -n 1 "$log")"
  fi
  rm -f "$log".bindings.*
  exit
fi
build=${1:-build}
[ $# -gt 0 ] && shift
# Waiting threads sleep, since spinning threads would use cores that other tests need.
export OMP_WAIT_POLICY=passive PS_TEST_LIMIT_S="${PS_TEST_LIMIT_S:-1800}"
# Tests that select no device use the cpu. spec/backend/cuda_spec.lua looks for a GPU itself if it is selected.
export CUDA_VISIBLE_DEVICES=
passed=0 failed=0 skipped=0

# Suppresses sanitizer reports about other libraries. ThreadSanitizer does not see libgomp's barriers, so ops run on one
# thread. Only one set of kernels is built for it (CMakeLists.txt).
sanitizer_options() {
  case $1 in
    *asan) export LSAN_OPTIONS="suppressions=$(realpath "$root")/spec/lsan.supp:print_suppressions=0"
           export UBSAN_OPTIONS=print_stacktrace=1 ;;
    *tsan) export TSAN_OPTIONS="suppressions=$(realpath "$root")/spec/tsan.supp:die_after_fork=0"
           export OMP_NUM_THREADS=1 PS_CPU_ISA=sse2 ;;
  esac
}
sanitizer_options "$build"

# Runs the C tests of a list, N at a time.
each() { xargs -d '\n' -r -n 1 -P "$1" "$0" --one; }
# Runs C tests two at a time. The tests in spec/c/waits.txt run one at a time, at the same time as the others.
run_c_tests() {
  for t in "$@"; do
    case $t in *tsan/*) named_in one_thread "$t" && continue ;; esac
    if [ -x "$t" ] && [ -f "$t" ]; then echo "$t"; fi
  done >"$list"
  {
    while read -r t; do if named_in waits "$t"; then echo "$t"; fi; done <"$list" | each 1 &
    while read -r t; do if ! named_in waits "$t"; then echo "$t"; fi; done <"$list" | each "${PS_TEST_JOBS:-2}"
    wait
  } | tee "$log"
  keep_failures
  ran=$(grep -c '^ok   test_' "$log"); all=$(wc -l <"$list")
  passed=$((passed + ran)); failed=$((failed + all - ran))
}
# Keeps the failures in $log for the end of the run: of a spec or a C test the first 20 lines, and of a comparison with
# PyTorch the last 20.
keep_failures() {
  awk '/^(FAILED|ERROR): / || /^FAIL / { left = 20; print; next }
    /^(ok   |busted: |slow: |skipped: |[^ ]+_spec\.lua )/ { left = 0 }
    left-- > 0
    { last[NR % 20] = $0 }
    /^oracle: [a-z0-9_]+ failed$/ { for (i = NR + 1; i <= NR + 20; i++) if (last[i % 20] != "") print last[i % 20] }
    /^oracle: [a-z0-9_]+ ended well$/ { delete last }' "$log" >>"$failures"
}
named=
for name in "$@"; do
  shift
  case $name in
    test_*) named="$named $build/$name"
            [ -x "$build/$name" ] ||
              { echo "FAIL $name: it is not built" | tee -a "$failures"; failed=$((failed + 1)); } ;;
    *) set -- "$@" "$name" ;;
  esac
done
if [ -n "$named" ]; then run_c_tests $named
elif [ $# -eq 0 ]; then run_c_tests "$build"/test_*; fi

run_specs() {
  "$build/psluajit" spec/run.lua --jobs "${PS_TEST_JOBS:-2}" "$@" 2>&1 | tee "$log"
  awk '/^skipped: / { getline; sub(/^ +/, ""); sub(/^[^ ]+:[0-9]+: /, ""); print }' "$log" >>"$skips"
  keep_failures
  line=$(grep -E '^busted: [0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
  if [ -n "$line" ]; then
    set -- $(echo "$line" | tr -cd '0-9 ')
    passed=$((passed + $1)); failed=$((failed + $2)); skipped=$((skipped + ${3:-0}))
  else
    echo "the specs did not finish"; failed=$((failed + 1))
  fi
}
run_oracle() {
  "$root/tools/oracle.sh" run "$build" 2>&1 | tee "$log"
  keep_failures
  line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
  if [ -n "$line" ]; then
    set -- $(echo "$line" | tr -cd '0-9 ')
    passed=$((passed + $1)); failed=$((failed + $2))
  else
    echo "the comparisons with PyTorch did not finish"; failed=$((failed + 1))
  fi
}
# Instruction sets below this machine's, best first: for our kernels, for oneDNN's kernels, and the number of threads.
# On all but the first, half types are multiplied as fp32.
lower_sets() {
  case $("$build/psluajit" -e 'io.write(require("ps").device("cpu").description)') in
    *AMX*) [ "$PS_TEST_ISA" != all ] || echo avx512:AVX512_CORE_BF16:2
           echo avx512:AVX512_CORE:2 avx2:AVX2:7 sse2:SSE41:1 ;;
    *"AVX-512 bf16"*) echo avx512:AVX512_CORE:2 avx2:AVX2:7 sse2:SSE41:1 ;;
    *AVX-512*) echo avx2:AVX2:7 sse2:SSE41:1 ;;
    *AVX*) echo sse2:SSE41:1 ;;
  esac
}

# Runs all specs, or the specs of computing.txt for this instruction set.
run_on_lower_sets() {
  for set in $(lower_sets); do
    IFS=: read -r ours dnnl threads <<EOF
$set
EOF
    echo "-- PS_CPU_ISA=$ours DNNL_MAX_CPU_ISA=$dnnl OMP_NUM_THREADS=$threads"
    export PS_CPU_ISA="$ours" DNNL_MAX_CPU_ISA="$dnnl" OMP_NUM_THREADS="$threads"
    if [ "$1" = computing ]; then
      run_specs $(awk -v ours="$ours" '!/^#/ && (ours == "sse2" || $2 != "far") { print $1 }' \
        "$root/spec/computing.txt")
    else
      run_specs
    fi
  done
}

[ $# -gt 0 ] || [ -z "$named" ] || set -- none                 # only C tests were selected
if [ $# -eq 0 ] && [ -n "$PS_CLUSTER" ]; then
  run_specs $("$build/psluajit" spec/run.lua --list) spec/cluster/cluster_spec.lua
elif [ "$1" != none ]; then
  run_specs "$@"
fi
if [ $# -eq 0 ] && [ -n "$PS_ORACLE" ]; then run_oracle; fi
if [ $# -eq 0 ] && [ -n "$PS_SANITIZERS" ]; then
  for sanitized in build-asan build-tsan; do
    echo "-- $sanitized"
    sanitizer_options "$sanitized"
    run_c_tests "$root/$sanitized"/test_*
  done
  unset OMP_NUM_THREADS PS_CPU_ISA
fi
if [ $# -eq 0 ]; then
  case $PS_TEST_ISA in
    none) ;;
    all) run_on_lower_sets all ;;
    *) run_on_lower_sets computing ;;
  esac
fi
if [ -s "$failures" ]; then
  echo "-- failures:"
  cut -c 1-500 "$failures"
fi
if [ "$skipped" -gt 0 ]; then
  echo "$skipped skipped:"
  sort "$skips" | uniq -c | sort -rn
  if [ "$CI" = true ]; then
    echo "CI=true: skipped tests count as failed"; failed=$((failed + skipped))
  fi
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
