#!/usr/bin/env bash
# examples/slurm.sbatch on a real Slurm: two nodes on this machine, a tiny model, no GPU. Runs are stopped, killed, cut off
# and requeued; each must end as docs/en/parallel.md says, go on, and come to the checkpoint of an unbroken run, bit for
# bit.
#
#   bash scripts/clusters/slurm_trial.sh                     # all trials, a quarter of an hour
#   bash scripts/clusters/slurm_trial.sh stop requeue        # the unbroken run, and trials by name
#   NPROC_PER_NODE=1 bash scripts/clusters/slurm_trial.sh    # with less work, on a busy machine
#
# Needs Linux, root, iproute2, Debian's slurm-wlm (seen with 22.05.8), and an environment with swiftlite on PATH. Everything
# runs in namespaces of its own and ends with this script; nothing is written outside a temporary directory, which is kept
# when a trial fails. Each node has a host name and a network of its own, so that Slurm and the ranks talk as between
# machines, and a cable can be pulled.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
TRIALS="stop cancel limit rank node network requeue"

die() {
    printf '%s\n    %s\n' "$1" "$2" >&2
    exit 1
}

if [ -z "${SLURM_TRIAL_DIR:-}" ]; then
    [ "$(id -u)" = 0 ] || die "this makes network namespaces, which only root may" "run it as root, on a machine to spare"
    for program in slurmctld slurmd munged ip; do
        command -v $program >/dev/null || die "$program is not installed" "apt install slurm-wlm iproute2"
    done
    command -v swiftlite >/dev/null || die "swiftlite is not on PATH" "activate its environment first"
    SLURM_TRIAL_DIR=$(mktemp -d)
    export SLURM_TRIAL_DIR
    chmod 755 "$SLURM_TRIAL_DIR"
    unshare --mount --net --uts --pid --fork --kill-child --mount-proc bash "$0" "$@" ||
        die "not all trials went as they should" "logs and runs are in $SLURM_TRIAL_DIR"
    rm -rf "$SLURM_TRIAL_DIR"
    exit
fi

work=$SLURM_TRIAL_DIR
cores=$(nproc --all)
processes=${NPROC_PER_NODE:-2}

# ---- the cluster

make_network() {
    mount -t tmpfs none /run # of this script alone
    mkdir /run/netns
    printf '127.0.0.1 localhost\n10.77.0.1 controller\n10.77.0.11 node1\n10.77.0.12 node2\n' >"$work/hosts"
    mount --bind "$work/hosts" /etc/hosts
    hostname controller
    ip link set lo up
    ip link add bridge type bridge
    ip address add 10.77.0.1/24 dev bridge
    ip link set bridge up
    local node
    for node in node1 node2; do
        ip netns add $node
        ip link add $node type veth peer name eth0 netns $node
        ip link set $node master bridge up
        ip -n $node address add "10.77.0.1${node#node}/24" dev eth0
        ip -n $node link set eth0 up
        ip -n $node link set lo up
    done
}

write_slurm_conf() {
    export SLURM_CONF=$work/slurm.conf
    # CpuBind: as on many clusters, a task has only the cores that it asks for.
    # SlurmdTimeout: after so long a silence a node is down (300 is the default); cred_expire: wait before a requeued job.
    cat >"$SLURM_CONF" <<CONF
ClusterName=trial
SlurmctldHost=controller
SlurmUser=root
AuthInfo=socket=$work/munge/socket,cred_expire=10
SlurmctldPidFile=$work/slurmctld.pid
SlurmctldLogFile=$work/slurmctld.log
StateSaveLocation=$work/state
SlurmdPidFile=$work/%n.pid
SlurmdLogFile=$work/%n.log
SlurmdSpoolDir=$work/spool/%n
SlurmdTimeout=30
ReturnToService=2
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName=node[1-2] CPUs=$cores CpuBind=cores
PartitionName=main Nodes=node[1-2] Default=YES
CONF
    echo CgroupPlugin=cgroup/v1 >"$work/cgroup.conf" # not used; unnamed, slurmd would look which there is
}

start_munged() {
    mkdir -p -m 700 "$work/keys"
    mkdir -p -m 755 "$work/munge"
    (umask 077 && head -c 128 /dev/urandom >"$work/keys/key")
    # --force: it runs as root, out of a temporary directory.
    munged --force --socket="$work/munge/socket" --key-file="$work/keys/key" --seed-file="$work/keys/seed" \
        --log-file="$work/keys/log" --pid-file="$work/munge/pid"
}

start_node() {
    mkdir -p "$work/spool/$1"
    # shellcheck disable=SC2016
    ip netns exec "$1" unshare --uts bash -c 'hostname "$1"; exec slurmd' slurmd "$1"
}

kill_node() {
    ip netns pids "$1" | xargs kill -9
}

start_cluster() {
    make_network
    write_slurm_conf
    start_munged
    mkdir -p "$work/state"
    slurmctld
    start_node node1
    start_node node2
    until [ "$(sinfo --noheader --states=idle --format=%D)" = 2 ]; do
        sleep 1
    done
}

# ---- jobs

# submit RUN [OPTION OF SBATCH...]: the example, without GPUs; prints the number of the job.
submit() {
    local run=$1
    shift
    MODEL=$work/model TRAIN=$work/train.jsonl OUT=$work/$run NPROC_PER_NODE=$processes \
        sbatch --parsable --gpus-per-node=0 --cpus-per-task="$cores" --output="$work/$run-%j.out" "$@" \
        "$root/examples/slurm.sbatch" --tensor_model_parallel_size "$processes" --sequence_parallel false \
        --pipeline_model_parallel_size 2 --global_batch_size 4 --max_length 64 \
        --train_iters "${STEPS:-40}" --save_steps 10 --acceptance_samples 0
}

# field JOB NAME: what Slurm says of a job, such as JobState.
field() {
    scontrol show job "$1" --oneliner | grep -oP "\b$2=\K\S+"
}

# wait_until SECONDS COMMAND...
wait_until() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $deadline ] || return 1
        sleep 0.2
    done
}

is_in_state() {
    [ "$(field "$1" JobState)" = "$2" ]
}

is_over() {
    [[ "$(field "$1" JobState)" =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)$ ]]
}

last_step() {
    tail -n 1 "$work/$1/metrics.jsonl" | grep -oP '"step": \K\d+'
}

is_past_step() {
    [ -s "$work/$1/metrics.jsonl" ] && [ "$(last_step "$1")" -gt "$2" ]
}

newest_step() {
    find "$work/$1" -maxdepth 1 -name 'checkpoint-*' | sed 's/.*checkpoint-//' | sort -n | tail -n 1
}

# ---- what must hold; `check` ends a trial (each runs in a subshell) with what was wrong

check() {
    local what=$1
    shift
    "$@" || {
        echo "$what"
        exit 1
    }
}

# under_way RUN JOB: it has saved a checkpoint and is in the middle of its steps.
under_way() {
    check "the run took no 15 steps in 5 minutes" wait_until 300 is_past_step "$1" 15
}

# ends JOB SECONDS STATE CODE: the job ends so, in time.
ends() {
    check "job $1 is $(field "$1" JobState) after $2 s" wait_until "$2" is_over "$1"
    local end
    end="$(field "$1" JobState) $(field "$1" ExitCode)"
    check "job $1 ended with $end, not $3 $4" [ "$end" = "$3 $4" ]
}

log_says() {
    check "no \"$2\" in the log of $1" grep -q -- "$2" "$work/$1"-*.out
}

# saved_its_last_step RUN: nothing that it computed is lost.
saved_its_last_step() {
    check "its last step was $(last_step "$1"), its newest checkpoint is $(newest_step "$1")" \
        [ "$(newest_step "$1")" = "$(last_step "$1")" ]
}

# is_the_unbroken_run RUN: weights, optimizer and all; .metadata alone has the path of its checkpoint in it.
is_the_unbroken_run() {
    check "the last checkpoint is not that of the unbroken run" \
        diff <(digests unbroken) <(digests "$1")
}

digests() {
    grep -v ' \.metadata$' "$work/$1/checkpoint-40/SHA256SUMS"
}

# goes_on RUN: the very same command comes to the same end.
goes_on() {
    local job
    job=$(submit "$1")
    ends "$job" 300 COMPLETED 0:0
    log_says "$1" "resuming from"
    is_the_unbroken_run "$1"
}

has_all_cores() {
    local launcher
    launcher=$(pgrep --oldest --full swiftlite.launch.elastic)
    [ "$(grep Cpus_allowed: "/proc/$launcher/status")" = "$(grep Cpus_allowed: /proc/self/status)" ]
}

# goes_on_by_itself RUN JOB: the job that was requeued comes to the same end.
goes_on_by_itself() {
    ends "$2" 300 COMPLETED 0:0
    log_says "$1" "resuming from"
    is_the_unbroken_run "$1"
}

# ---- trials

trial_unbroken() {
    local job
    job=$(submit unbroken)
    under_way unbroken
    check "a node's processes have not all of its cores" has_all_cores
    ends "$job" 300 COMPLETED 0:0
    log_says unbroken "has no checkpoint yet; the run starts from its first step"
}

trial_stop() {
    local job
    job=$(submit stop)
    under_way stop
    scancel --signal=TERM "$job"
    ends "$job" 120 FAILED 143:0
    saved_its_last_step stop
    goes_on stop
}

trial_cancel() {
    local job
    job=$(submit cancel)
    under_way cancel
    scancel "$job"
    ends "$job" 60 CANCELLED 0:15
    saved_its_last_step cancel
    goes_on cancel
}

trial_limit() {
    local first second
    export STEPS=100000
    first=$(submit limit --time=3 --signal=TERM@60)
    second=$(submit limit --dependency=singleton)
    ends "$first" 180 FAILED 143:0
    saved_its_last_step limit
    check "the next in the queue did not go on" wait_until 300 is_past_step limit $(($(newest_step limit) + 5))
    log_says limit "resuming from .*limit/checkpoint-"
    scancel --signal=TERM "$second"
    ends "$second" 60 FAILED 143:0
}

trial_rank() {
    local job pid
    job=$(submit rank)
    under_way rank
    pid=$(first_rank_on node2)
    kill -9 "$pid"
    ends "$job" 60 FAILED 137:0
    log_says rank "failed first, with signal SIGKILL; the others were stopped"
    log_says rank "on node2 failed first, with signal SIGKILL; the ranks on this node were stopped"
    goes_on rank
}

first_rank_on() {
    local pid
    for pid in $(ip netns pids "$1"); do
        if grep -qz '^RANK=' "/proc/$pid/environ"; then
            echo "$pid"
            return
        fi
    done
}

trial_node() {
    local job
    job=$(submit node)
    under_way node
    kill_node node2
    is_requeued "$job"
    start_node node2
    goes_on_by_itself node "$job"
}

trial_network() {
    local job
    job=$(submit network)
    under_way network
    ip link set node2 down
    is_requeued "$job"
    ip link set node2 up
    goes_on_by_itself network "$job"
}

# is_requeued JOB: when its node has been silent for SlurmdTimeout.
is_requeued() {
    check "Slurm did not requeue it" wait_until 180 is_in_state "$1" PENDING
}

trial_requeue() {
    local job
    job=$(submit requeue)
    under_way requeue
    scontrol requeue "$job"
    goes_on_by_itself requeue "$job"
}

run_trial() {
    local wrong began=$SECONDS
    if wrong=$("trial_$1" 2>&1); then
        printf '%-10s OK (%d s)\n' "$1" $((SECONDS - began))
    else
        printf '%-10s %s\n' "$1" "$wrong"
        return 1
    fi
}

start_cluster
python - "$root" "$work" <<'PYTHON'
import json
import sys
from pathlib import Path

root, work = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(root))
from tests.tiny import make_tiny_hf

make_tiny_hf(work / "model", num_hidden_layers=4, num_key_value_heads=2, with_tokenizer=True)
with (work / "train.jsonl").open("w") as file:
    for number in range(64):
        turns = [{"role": "user", "content": f"what is {number}?"}, {"role": "assistant", "content": f"it is {number}"}]
        print(json.dumps({"messages": turns}), file=file)
PYTHON

status=0
run_trial unbroken || exit 1
for trial in ${*:-$TRIALS}; do
    run_trial "$trial" || status=1
done
exit $status
