#!/usr/bin/env bash
# Several GPU nodes under Slurm. From the root of the repository:
#
#   EXP=gsm8k_qwen3 WORKDIR=/shared/runs/gsm8k sbatch launch/slurm.sh
#
# What follows the script's name goes to the run (--set NAME=VALUE). One process
# a node is the default. One a GPU is for colocated only, a split needs two
# devices in each process, and two nodes of eight need a row for each of 16:
#
#   sbatch --ntasks-per-node=8 --cpus-per-task=4 launch/slurm.sh \
#     --set placement.mode=colocated --set optim.microbatches=32
#
# Written by the manual pages of Slurm 22.05.
#SBATCH --job-name=jaxrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -euo pipefail

: "${EXP:=gsm8k_qwen3}"
: "${WORKDIR:?expected a run folder that all nodes see}"
: "${PYTHON:=python}"
: "${MAX_RESTARTS:=3}"

# The same command goes on from the newest checkpoint. SIGTERM saves one more
# after the batch in training, if that ends before SIGKILL; what came after the
# newest is done again, so mind checkpoint.every.
again() {
  if ((${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)); then
    echo "back to the queue after: $1" >&2
    scontrol requeue "$SLURM_JOB_ID"
  fi
}
# Two minutes before the time limit. Preemption and a dead node need nothing
# here: --requeue lets Slurm put the job back by itself.
trap 'again "the time limit"; exit 1' USR1

# JAX takes a Slurm task for the owner of one GPU, the one of its local number.
# A single task on a node owns all of them. (With several, do not add
# --gpus-per-task: each has to see all GPUs of its node.)
if [[ $SLURM_NTASKS_PER_NODE == 1 ]]; then
  JAX_LOCAL_DEVICE_IDS=$(seq -s , 0 $((SLURM_GPUS_ON_NODE - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi

# When one task fails the others say whom they lost and end by themselves;
# --wait is for one that does not. `wait` lets the trap run meanwhile.
srun --kill-on-bad-exit=0 --wait=120 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  "$PYTHON" -m jaxrl_post.main --exp="$EXP" --workdir="$WORKDIR" "$@" &
status=0
wait $! || status=$?

# 2 is a mistake in the input: the next try would make it again.
if ((status != 0 && status != 2)); then
  again "exit code $status"
fi
exit "$status"
