#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Writes the site as HTML:
#   tools/site.sh BUILD OUT
# tools/site.lua writes the pages, Sphinx makes HTML of them, and tools/site.lua --check checks it. A warning of Sphinx
# is an error. An older site in OUT is replaced.
set -eu
build=$1
out=$2
source=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$("$build/psluajit" -v | sed 's/^psluajit \([^ ]*\).*/\1/')
"$build/psluajit" "$source/tools/site.lua" "$work/pages" >"$work/log" || { cat "$work/log" >&2; exit 1; }
sphinx-build -q -W --keep-going -b html -c "$source/tools/site" -D release="$version" -D version="$version" \
  -D source_root="$source" -D html_static_path="$work/pages/_static" -d "$work/doctrees" "$work/pages" "$work/html"
rm -f "$work/html/.buildinfo"
"$build/psluajit" "$source/tools/site.lua" --check "$work/html"
mkdir -p "$(dirname "$out")"
rm -rf "$out"
mv "$work/html" "$out"
echo "wrote the site; its first page is $out/index.html"
