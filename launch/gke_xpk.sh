#!/usr/bin/env bash
# A TPU slice (or several) on GKE by xpk. From anywhere:
#
#   CLUSTER=mine IMAGE=HOST/PROJECT/jaxrl_post STORAGE=shared \
#     WORKDIR=/shared/runs/gsm8k launch/gke_xpk.sh \
#     --set model.path=/shared/models/Qwen3-0.6B
#
# What follows the script's name goes to the run (--set NAME=VALUE). xpk makes a
# JobSet: one process a host, and JAX finds the others by what GKE sets
# (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES; between slices MEGASCALE_*). STORAGE is
# what `xpk storage attach` or `create` was told; its mount point holds WORKDIR
# and must be a file system with renames (Filestore), not a bucket.
# Arguments of xpk 1.16.
set -euo pipefail

: "${CLUSTER:?expected the name of a cluster}"
: "${IMAGE:?expected an image with the package and the repository}"
: "${WORKDIR:?expected a run folder that all hosts see}"
: "${STORAGE:?expected the name of a storage of the cluster}"
: "${EXP:=gsm8k_qwen3}"
: "${NAME:=jaxrl}"
: "${TPU_TYPE:=v6e-16}"
: "${NUM_SLICES:=1}"
: "${DIR:=/opt/jaxrl_post}" # the repository in the image
: "${MAX_RESTARTS:=3}"

# Colocated: a split would cut every host's chips in two, and neither half of a
# slice be a rectangle. To give generation hosts of its own: launch/kuberay.yaml.
# A microbatch needs a row for each chip: 512 / 32 for 16 of them. Your own --set
# comes later, and the last one wins.
command="cd $(printf %q "$DIR") && python -m jaxrl_post.main \
--exp=$(printf %q "$EXP") --workdir=$(printf %q "$WORKDIR") \
--set placement.mode=colocated --set optim.microbatches=32"
for word in "$@"; do
  command+=" $(printf %q "$word")"
done

# Of its own accord xpk restarts after 42 and signals only. Our 1 is a failed
# run, where the same command continues; 2 is a mistake in the input.
exec xpk workload create --cluster="$CLUSTER" --workload="$NAME" \
  --tpu-type="$TPU_TYPE" --num-slices="$NUM_SLICES" --docker-image="$IMAGE" \
  --storage="$STORAGE" --max-restarts="$MAX_RESTARTS" \
  --restart-on-exit-codes=1 --command="$command"
