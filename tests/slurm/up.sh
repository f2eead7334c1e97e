#!/usr/bin/env bash
# A Slurm of two nodes, n1 and n2, on this one machine, to test with: no cluster is needed, root is.
#
#     apt-get install --no-install-recommends slurm-wlm slurmdbd munge mariadb-server     (Debian 12, Slurm 22.05)
#     export SLURM_CONF=DIR/slurm.conf; tests/slurm/up.sh DIR up; ...; tests/slurm/up.sh DIR down
#
# All its files are in DIR; /etc/hosts gets a line for the nodes' names. It keeps accounts, because submitit asks sacct for
# the state of a job, and without them a job that was ended from outside would be waited for without end.
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
  [ -d "$dir/database" ] || mariadb-install-db --user=root --datadir="$dir/database" \
    --auth-root-authentication-method=normal > "$dir/database.log" 2>&1
  setsid -f mariadbd --user=root --datadir="$dir/database" --socket="$dir/database.socket" --pid-file="$dir/database.pid" \
    --bind-address=127.0.0.1 --port=16821 >> "$dir/database.log" 2>&1
  until_it_is sql 'select 1'
  sql "create database if not exists accounts; grant all on accounts.* to 'slurm'@'127.0.0.1' identified by 'slurm'"
  slurmdbd
  until_it_is sacctmgr --noheader list cluster
  sacctmgr --immediate --quiet add cluster tests > /dev/null 2>&1 || true  # it is there from the last time
  slurmctld
  until_it_is scontrol ping
  slurmd -N n1
  slurmd -N n2
  until_it_is all_idle
  sinfo
}

down() {
  for part in slurmd.n1 slurmd.n2 slurmctld slurmdbd database; do
    [ -f "$dir/$part.pid" ] && kill "$(cat "$dir/$part.pid")" 2> /dev/null || true
  done
}

sql() { mariadb --socket="$dir/database.socket" --user=root --execute="$1"; }
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
  (umask 077; cat > "$dir/slurmdbd.conf" << EOF)
AuthType=auth/munge
DbdHost=$host
DbdPort=16818
LogFile=$dir/slurmdbd.log
PidFile=$dir/slurmdbd.pid
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=16821
StorageLoc=accounts
StorageUser=slurm
StoragePass=slurm
EOF
  cat > "$SLURM_CONF" << EOF
ClusterName=tests
SlurmctldHost=$host
SlurmctldPort=16817
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
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$host
AccountingStoragePort=16818
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[16819-16820] CPUs=2 RealMemory=4000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE
EOF
  mkdir -p "$dir/state"
}

case "${2:?$usage}" in
  up) up ;;
  down) down ;;
  *) echo "$usage" >&2; exit 2 ;;
esac
