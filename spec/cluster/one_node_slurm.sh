#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Starts a Slurm with this machine as its only node and its own munge, runs a command under it, and stops both. All
# files are in a temporary folder; an existing Slurm or munge is not touched.
#   one_node_slurm.sh srun -n 2 COMMAND...
# Needs slurm-wlm and munge; tested as root. Exit code 77: Slurm did not start, and standard error says why.
dir=$(mktemp -d) || exit 1
host=$(hostname -s)
stop() {
  for name in slurmd slurmctld munged; do
    pid=$(cat "$dir/$name.pid" 2>/dev/null) && kill "$pid" 2>/dev/null
  done
  for _ in 1 2 3 4 5 6 7 8 9 10; do                       # lets them write their state and remove their pid files
    [ -e "$dir/slurmd.pid" ] || [ -e "$dir/slurmctld.pid" ] || [ -e "$dir/munged.pid" ] || break
    sleep 0.3
  done
  rm -rf "$dir"
}
trap stop EXIT
trap 'exit 143' TERM INT HUP
give_up() {
  echo "Slurm does not run here: $*" >&2
  tail -n 5 "$dir"/*.log >&2 2>/dev/null
  exit 77
}

chmod 755 "$dir"                                          # munge requires that its socket is reachable
mkdir "$dir/state" "$dir/spool"
dd if=/dev/urandom of="$dir/munge.key" bs=128 count=1 2>/dev/null
chmod 400 "$dir/munge.key"
munged --force --socket="$dir/munge.socket" --key-file="$dir/munge.key" --pid-file="$dir/munged.pid" \
  --log-file="$dir/munged.log" --seed-file="$dir/munge.seed" 2>"$dir/start.log" || give_up "munged failed"

base=$((20000 + $$ % 10000))
cat >"$dir/slurm.conf" <<CONF
ClusterName=ps
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base
SlurmdPort=$((base + 1))
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
SlurmdSpoolDir=$dir/spool
StateSaveLocation=$dir/state
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SelectType=select/cons_tres
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
CONF
export SLURM_CONF="$dir/slurm.conf"
slurmctld 2>>"$dir/start.log" || give_up "slurmctld failed"
slurmd 2>>"$dir/start.log" || give_up "slurmd failed"
for _ in $(seq 100); do
  sinfo -h -o %T 2>/dev/null | grep -q idle && break
  sleep 0.2
done
sinfo -h -o %T 2>/dev/null | grep -q idle || give_up "the node is not idle after 20 s"
"$@"
