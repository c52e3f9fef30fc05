#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Builds Debian packages from a build folder:
#   tools/deb.sh BUILD OUT
# psluajit_VERSION_ARCH.deb has the files that `cmake --install` installs: the program, the Lua tree, manual pages,
# completions, and the site if BUILD/site has it (`make deb` writes it there). If BUILD has the CUDA plug-in, it is in
# psluajit-cuda_VERSION_ARCH.deb, which depends on psluajit alone: the program itself names a missing CUDA library.
set -eu
build=$1
out=$2
source=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$("$build/psluajit" -v | sed 's/^psluajit \([^ ]*\).*/\1/')
arch=$(dpkg --print-architecture)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$source" log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

# Prints the libraries that a program links, as Debian packages.
libraries() {
  mkdir -p "$work/shlibs/debian"
  printf 'Source: psluajit\n\nPackage: psluajit\nArchitecture: any\n' >"$work/shlibs/debian/control"
  (cd "$work/shlibs" && dpkg-shlibdeps -O -e"$1" 2>"$work/shlibs.log" || { cat "$work/shlibs.log" >&2; exit 1; }) |
    sed -n 's/^shlibs:Depends=//p'
}

# Writes DEBIAN/control and packs a tree. Arguments: NAME TREE FIELDS.
pack() {
  mkdir -p "$2/DEBIAN" "$2/usr/share/doc/$1"
  cp "$source/LICENSE" "$2/usr/share/doc/$1/copyright"
  gzip -9n <"$source/CHANGELOG.md" >"$2/usr/share/doc/$1/changelog.gz"
  {
    printf 'Package: %s\nVersion: %s\nArchitecture: %s\nSection: science\nPriority: optional\n' "$1" "$version" "$arch"
    printf 'Maintainer: psluajit maintainers <maintainers@psluajit.invalid>\nInstalled-Size: %s\n' \
      "$(du -sk "$2" | cut -f1)"
    printf '%s\n' "$3"
  } >"$2/DEBIAN/control"
  (cd "$2" && find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum >DEBIAN/md5sums)
  find "$2" -newermt "@$SOURCE_DATE_EPOCH" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
  dpkg-deb --root-owner-group -Z"${DEB_COMPRESSION:-xz}" --build "$2" "$out/$1_${version}_$arch.deb" >/dev/null
  echo "$out/$1_${version}_$arch.deb"
}

mkdir -p "$out"
DESTDIR=$work/psluajit cmake --install "$build" --prefix /usr --strip >"$work/install.log" ||
  { cat "$work/install.log" >&2; exit 1; }
chmod -R u+w,go-w,a+rX "$work/psluajit"
gzip -9n "$work"/psluajit/usr/share/man/man1/*.1
sed -i 's,^\(share/man/man1/.*\.1\)$,\1.gz,' "$work/psluajit/usr/share/psluajit/installed.txt"

plugin=$(find "$work/psluajit" -name libps_cuda.so)
if [ -n "$plugin" ]; then
  path=${plugin#"$work/psluajit/"}
  mkdir -p "$work/cuda/$(dirname "$path")"
  mv "$plugin" "$work/cuda/$path"
  sed -i '/libps_cuda\.so$/d' "$work/psluajit/usr/share/psluajit/installed.txt"
  pack psluajit-cuda "$work/cuda" "Depends: psluajit (= $version)
Description: NVIDIA GPUs for psluajit
 The plug-in by which psluajit computes on NVIDIA GPUs. Debian has neither the driver nor the libraries that it needs:
 they are loaded at run time, wherever they were installed from, and psluajit names what is missing."
  rmdir -p --ignore-fail-on-non-empty "$work/psluajit/$(dirname "$path")"
fi

pack psluajit "$work/psluajit" "Depends: $(libraries "$work/psluajit/usr/bin/psluajit"), lua-argparse, lua-cjson, \
lua-filesystem, lua-posix
Recommends: gnuplot-nox, lua-http
Suggests: fortunes
Description: training engine for transformers, scripted in Lua
 psluajit trains and fine-tunes transformers (GPT-2, BERT, RoBERTa, Llama, Mistral, Qwen2, Qwen3, and models of one's
 own) on CPUs, in one process or many. A model may be several times larger than memory: parameters, gradients and
 optimizer state move between memory and a disk by a plan. The package has the program, its Lua library, models,
 examples, tools and guides."
