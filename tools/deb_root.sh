#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Tries packages of tools/deb.sh in a bare Debian root (as root; needs mmdebstrap and a Debian mirror):
#   tools/deb_root.sh PACKAGE.deb... [ROOT.tar]
# ROOT.tar: a root that mmdebstrap made before. apt installs the packages and only the packages that they depend on.
# They replace an older psluajit, which has a file that the new one lacks. psluajit then trains new projects, in one
# process and on two ranks, and a user without rights runs examples; manual pages, completions and the HTML are read.
# psluajit-cuda has to name the first thing that this root lacks. At the end the packages are installed again and
# removed, and their folders and the program must be gone.
set -eu
work=$(mktemp -d)
root=$work/root
cleanup() {
  umount "$root/proc" "$root/dev" 2>/dev/null || true
  rm -rf --one-file-system "$work"
}
trap cleanup EXIT
mkdir "$root"
packages=
base=
for file in "$@"; do
  case $file in
    *.deb) packages="$packages $(realpath "$file")" ;;
    *) base=$file ;;
  esac
done
if [ -n "$base" ]; then tar -C "$root" -xf "$base" --exclude='./dev/*'
else mmdebstrap --variant=minbase bookworm "$root"
fi
mkdir "$root/tmp/packages"
cp $packages "$root/tmp/packages/"
for file in "$root"/tmp/packages/psluajit_*.deb; do
  dpkg-deb -R "$file" "$work/older"
  sed -i 's/^Version: .*/Version: 0.0.1/' "$work/older/DEBIAN/control"
  echo 'error "stale"' >"$work/older/usr/share/psluajit/lua/stale.lua"
  mkdir "$root/tmp/older"
  dpkg-deb -Zgzip --root-owner-group --build "$work/older" "$root/tmp/older/psluajit.deb" >/dev/null
done
cp /etc/resolv.conf "$root/etc/resolv.conf"
for file in /etc/apt/apt.conf.d/*proxy*; do [ ! -e "$file" ] || cp "$file" "$root/etc/apt/apt.conf.d/"; done
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 OMP_NUM_THREADS=1 \
  DEBIAN_FRONTEND=noninteractive ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} \
  sh -eux <<'END'
apt-get -q update
apt-get -qy --no-install-recommends install /tmp/older/psluajit.deb
[ -e /usr/share/psluajit/lua/stale.lua ]
apt-get -qy --no-install-recommends install /tmp/packages/*.deb
[ ! -e /usr/share/psluajit/lua/stale.lua ]
cd /root
psluajit --version
psluajit tools | grep -q '^chat  '
psluajit examples | grep -q '^train_gpt2  '
psluajit new text text
(cd text && psluajit train.lua && psluajit sample.lua "A model")
psluajit new classifier classifier
(cd classifier && psluajit train.lua)
psluajit new ranks ranks
(cd ranks && psluajit launch --nproc-per-node 2 train.lua)
psluajit definitions text
useradd -m visitor
cat /usr/share/psluajit/docs/*.md /usr/share/doc/psluajit/*.md >/home/visitor/my.txt 2>/dev/null || true
su - visitor -c 'set -eux; [ "$(wc -c <my.txt)" -gt 100000 ]
  psluajit train_char.lua --data my.txt --iters 20
  psluajit train_gpt2.lua --data my.txt --steps 10 --out run
  ! psluajit train_gpt2.lua --data my.txt --steps 10 --out run
  psluajit train_gpt2.lua --steps 12 --out run --resume
  psluajit train_chunked.lua --data my.txt --steps 3 --host 64MiB --disk .
  psluajit finetune_bert.lua --epochs 1 --out encoder
  psluajit gpt.lua --steps 5
  psluajit benchmark/train.lua --model 64/32/2/2 --batch 2 --steps 2 --device cpu --precision fp32
  psluajit prepare --help >/dev/null'
[ ! -d /usr/share/doc/psluajit/html ] || grep -q '<title>psluajit' /usr/share/doc/psluajit/html/index.html

apt-get -qy --no-install-recommends install man-db bash-completion zsh
man psluajit | grep -q 'psluajit \[options\]'
for page in /usr/share/man/man1/psluajit-*.1.gz; do
  man "$(basename "$page" .1.gz)" | grep -q 'SEE ALSO'
done
bash -c '. /usr/share/bash-completion/bash_completion; _completion_loader psluajit; COMP_WORDS=(psluajit gener)
  COMP_CWORD=1; _psluajit; [ "${COMPREPLY[*]}" = generate ]'
zsh -fc 'autoload -U compinit && compinit -u -d /tmp/zcompdump && [ "$_comps[psluajit]" = _psluajit ]'

if [ -e /usr/lib/psluajit/libps_cuda.so ]; then
  said=$(psluajit -e 'require("ps").device "cuda"' 2>&1) || true
  echo "$said"
  case $said in
    *'no NVIDIA driver on this machine'* | *'shows no device'*) ;;
    *) exit 1 ;;
  esac
fi

dpkg -i /tmp/packages/*.deb
dpkg --verify
apt-get -qy remove psluajit
[ ! -e /usr/share/psluajit ] && [ ! -e /usr/share/doc/psluajit ] && [ ! -e /usr/lib/psluajit ] && \
  [ ! -e /usr/bin/psluajit ]
END
echo "the packages work in a bare root"
