#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Runs a command on two hosts that this machine simulates: network namespaces "alpha" (10.77.0.1, where the command
# runs) and "beta" (10.77.0.2), joined by a veth pair. The command runs others on beta by `$ON_BETA COMMAND`, reads the
# bytes sent over the link in /proc/net/dev (ps0), and cuts the link by `ip link set ps0 down`. Nothing outside
# changes, and every process started here ends with this script, however it ends.
#   two_hosts.sh COMMAND...
# Needs iproute2 and util-linux, as root or if users may create namespaces. Exit code 77: this is not possible here,
# and standard error says why.
if [ "$1" != --inside ]; then
  for user in "" --map-root-user; do
    spaces="unshare $user --net --uts --pid --fork --mount-proc --kill-child"
    $spaces true 2>/dev/null && exec $spaces "$0" --inside "$@"
  done
  echo "this user can have no network namespaces: $($spaces true 2>&1)" >&2
  exit 77
fi
shift
unshare --net --uts sh -c 'hostname beta; exec sleep 1000' &
beta=$!
here=$(readlink /proc/self/ns/net)
for _ in $(seq 100); do
  there=$(readlink /proc/$beta/ns/net)
  [ -n "$there" ] && [ "$there" != "$here" ] && break
  sleep 0.05
done
hostname alpha
ON_BETA="nsenter --net --uts --target $beta"
ip link add ps0 type veth peer name ps1 && ip link set ps1 netns $beta && ip addr add 10.77.0.1/24 dev ps0 &&
  ip link set lo up && ip link set ps0 up && $ON_BETA ip addr add 10.77.0.2/24 dev ps1 &&
  $ON_BETA ip link set lo up && $ON_BETA ip link set ps1 up || exit 77
export ON_BETA
"$@"
