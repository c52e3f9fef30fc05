#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Tries a package of tools/deb.sh in a bare Debian root (as root; needs mmdebstrap and a Debian mirror):
#   tools/deb_root.sh PACKAGE.deb [ROOT.tar]
# ROOT.tar: a root that mmdebstrap made before. apt installs the package and only the packages that it depends on. Then
# psluajit trains new projects, in one process and on two ranks. At the end the package is installed again and removed,
# and its folder and program must be gone.
set -eu
package=$(realpath "$1")
work=$(mktemp -d)
root=$work/root
cleanup() {
  umount "$root/proc" "$root/dev" 2>/dev/null || true
  rm -rf --one-file-system "$work"
}
trap cleanup EXIT
mkdir "$root"
if [ $# -gt 1 ]; then tar -C "$root" -xf "$2" --exclude='./dev/*'
else mmdebstrap --variant=minbase bookworm "$root"
fi
cp "$package" "$root/tmp/psluajit.deb"
cp /etc/resolv.conf "$root/etc/resolv.conf"
for file in /etc/apt/apt.conf.d/*proxy*; do [ ! -e "$file" ] || cp "$file" "$root/etc/apt/apt.conf.d/"; done
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 OMP_NUM_THREADS=1 \
  ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} sh -eux <<'END'
apt-get -q update
DEBIAN_FRONTEND=noninteractive apt-get -qy --no-install-recommends install /tmp/psluajit.deb
cd /root
psluajit --version
psluajit new text text
(cd text && psluajit train.lua && psluajit sample.lua "A model")
psluajit new ranks ranks
(cd ranks && psluajit launch --nproc-per-node 2 train.lua)
dpkg -i /tmp/psluajit.deb
dpkg --verify psluajit
apt-get -qy remove psluajit
[ ! -e /usr/share/psluajit ] && [ ! -e /usr/bin/psluajit ]
END
echo "the package works in a bare root"
