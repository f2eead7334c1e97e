#!/usr/bin/env bash
# A Slurm of two nodes, n1 and n2, on this one machine, to test with: no cluster is needed, root is.
#
#     apt-get install --no-install-recommends slurm-wlm munge     (Debian 12, Slurm 22.05)
#     export SLURM_CONF=DIR/slurm.conf; tests/slurm/up.sh DIR up; ...; tests/slurm/up.sh DIR down
#
# All its files are in DIR; /etc/hosts gets a line for the nodes' names. It keeps no accounts.
set -euo pipefail
usage="usage: up.sh DIR up|down"
mkdir -p "${1:?$usage}"
dir=$(cd "$1" && pwd)
export SLURM_CONF="$dir/slurm.conf"
host=$(hostname -s)

up() {
  grep -q ' n1 n2$' /etc/hosts || echo '127.0.0.1 n1 n2' >> /etc/hosts
  configure
  munge -n > /dev/null 2>&1 || { install -d -o munge -g munge /run/munge; su -s /bin/sh munge -c '/usr/sbin/munged --force'; }
  slurmctld
  until_it_is scontrol ping
  slurmd -N n1
  slurmd -N n2
  until_it_is all_idle
  sinfo
}

down() {
  for part in slurmd.n1 slurmd.n2 slurmctld; do
    pid=$(cat "$dir/$part.pid" 2> /dev/null) || continue
    kill "$pid" 2> /dev/null || continue
    for _ in $(seq 100); do kill -0 "$pid" 2> /dev/null || break; sleep 0.1; done
  done
}

all_idle() { [ "$(sinfo --noheader --Node --states=idle | wc -l)" = 2 ]; }

# Once a second, for at most 60.
until_it_is() {
  for _ in $(seq 60); do
    if "$@" > /dev/null 2>&1; then return; fi
    sleep 1
  done
  echo "$dir: after 60 s still not there: $*. Read the logs there." >&2
  exit 1
}

configure() {
  cat > "$SLURM_CONF" << EOF
ClusterName=tests
SlurmctldHost=$host
SlurmctldPort=7817
SlurmctldLogFile=$dir/slurmctld.log
SlurmctldPidFile=$dir/slurmctld.pid
StateSaveLocation=$dir/state
SlurmdLogFile=$dir/slurmd.%n.log
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmdSpoolDir=$dir/spool.%n
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is put back waits for so many seconds; 120 by default.
AuthInfo=cred_expire=10
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[7819-7820] CPUs=2 RealMemory=4000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE
EOF
  mkdir -p "$dir/state"
}

case "${2:?$usage}" in
  up) up ;;
  down) down ;;
  *) echo "$usage" >&2; exit 2 ;;
esac
