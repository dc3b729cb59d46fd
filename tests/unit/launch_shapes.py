"""What the APIs behind the recipes take: their fields, by hand.

From the Go types of JobSet v1alpha2, batch/v1, core/v1 and ray.io/v1 and from
the schema of SkyPilot 0.14, as far as a recipe may want them: what is missing
here counts as misspelt. A shape is a mapping (a field ending in "!" is
required), a list of one shape, a type, a pattern, or a set of values.
"""

import re
from typing import Any

# The name of a Kubernetes object; a number with a unit, as text.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]*(Mi|Gi|Ti)?")
_TEXTS = re.compile(r".+", re.DOTALL)

_POD = {
  "metadata": {"labels": {}, "annotations": {}},
  "spec!": {
    "restartPolicy": {"Never"},  # all that a podFailurePolicy goes with
    "nodeSelector": {},
    "tolerations": [{}],
    "terminationGracePeriodSeconds": int,
    "containers!": [
      {
        "name!": _NAME,
        "image!": str,
        "workingDir": re.compile("/.*"),
        "command": [str],
        "args": [str],
        "env": [{"name!": str, "value!": str}],
        "resources!": {
          "limits!": {
            "cpu!": _QUANTITY,
            "memory!": _QUANTITY,
            "nvidia.com/gpu": _QUANTITY,
            "google.com/tpu": _QUANTITY,
          }
        },
        "volumeMounts": [{"name!": _NAME, "mountPath!": re.compile("/.*")}],
      }
    ],
    "volumes": [
      {
        "name!": _NAME,
        "persistentVolumeClaim": {"claimName!": _NAME},
        "emptyDir": {"medium": {"Memory"}, "sizeLimit": _QUANTITY},
      }
    ],
  },
}

_JOB = {
  "completionMode!": {"Indexed"},
  "completions!": int,
  "parallelism!": int,
  "backoffLimit!": int,
  "podFailurePolicy": {
    "rules!": [
      {
        "action!": {"FailJob", "Ignore", "Count"},
        "onExitCodes!": {
          "containerName": _NAME,
          "operator!": {"In", "NotIn"},
          "values!": [int],
        },
      }
    ]
  },
  "template!": _POD,
}

JOBSET = {
  "apiVersion!": {"jobset.x-k8s.io/v1alpha2"},
  "kind!": {"JobSet"},
  "metadata!": {"name!": _NAME, "labels": {}, "annotations": {}},
  "spec!": {
    "network!": {
      "enableDNSHostnames!": bool,
      "subdomain!": _NAME,
      "publishNotReadyAddresses": bool,
    },
    "failurePolicy!": {
      "maxRestarts!": int,
      "restartStrategy": {"Recreate", "BlockingRecreate"},
      "rules": [
        {
          "name!": re.compile("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"),
          "action!": {"FailJobSet", "RestartJobSet"},
          "onJobFailureReasons": [
            {"BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"}
          ],
          "targetReplicatedJobs": [_NAME],
        }
      ],
    },
    "ttlSecondsAfterFinished": int,
    "replicatedJobs!": [
      {"name!": _NAME, "replicas": int, "template!": {"spec!": _JOB}}
    ],
  },
}

# Always written: KubeRay before 1.3 wants it, be it empty.
_RAY_START = {"num-cpus": str, "num-gpus": str, "resources": str}

RAYJOB = {
  "apiVersion!": {"ray.io/v1"},
  "kind!": {"RayJob"},
  "metadata!": {"name": _NAME, "generateName": re.compile("[a-z][-a-z0-9]*")},
  "spec!": {
    "entrypoint!": str,
    "entrypointNumCpus": int,
    "entrypointNumGpus": int,
    "entrypointResources": str,
    "runtimeEnvYAML": str,
    "backoffLimit": int,
    "submissionMode": {"K8sJobMode", "HTTPMode"},
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "rayClusterSpec!": {
      "rayVersion": re.compile(r"\d+\.\d+\.\d+"),
      "headGroupSpec!": {"rayStartParams!": _RAY_START, "template!": _POD},
      "workerGroupSpecs!": [
        {
          "groupName!": _NAME,
          "replicas!": int,
          "minReplicas!": int,
          "maxReplicas!": int,
          "numOfHosts": int,
          "rayStartParams!": _RAY_START,
          "template!": _POD,
        }
      ],
    },
  },
}

SKYPILOT = {
  "name": _NAME,
  "num_nodes!": int,
  "workdir": str,
  "resources!": {
    "infra": str,
    "accelerators!": re.compile(r"[A-Za-z0-9-]+:[1-9][0-9]*"),
    "image_id": str,
    "use_spot": bool,
    "job_recovery": {"strategy": str, "max_restarts_on_errors": int},
  },
  "volumes": {"/shared": _NAME},
  "envs": {"EXP": str, "NAME": str},
  "setup!": _TEXTS,
  "run!": _TEXTS,
}


def problems(value: Any, shape: Any, place: str = "") -> list[str]:
  """Compares a document with a shape.

  Args:
    value: as YAML gives it.
    shape: see above; an empty mapping stands for any mapping.
    place: of the value in the document.

  Returns:
    A line for each difference, with its place; none if it fits.
  """
  if isinstance(shape, dict):
    return _fields(value, shape, place)
  if isinstance(shape, list):
    if not isinstance(value, list) or not value:
      return [f"{place}: expected a list, got {value!r}"]
    each = enumerate(value)
    return [p for i, x in each for p in problems(x, shape[0], f"{place}[{i}]")]
  if isinstance(shape, re.Pattern):
    fits = isinstance(value, str) and shape.fullmatch(value)
  elif isinstance(shape, set):
    fits = value in shape
  else:
    fits = type(value) is shape
  return [] if fits else [f"{place}: expected {shape}, got {value!r}"]


def _fields(value: Any, shape: dict[str, Any], place: str) -> list[str]:
  if not isinstance(value, dict):
    return [f"{place}: expected fields, got {value!r}"]
  fields = {name.rstrip("!"): inner for name, inner in shape.items()}
  required = {name[:-1] for name in shape if name.endswith("!")}
  found = [f"{place}.{name}: missing" for name in sorted(required - set(value))]
  for name, inner in value.items():
    if name in fields:
      found += problems(inner, fields[name], f"{place}.{name}")
    elif shape:
      found.append(f"{place}.{name}: no such field")
  return found
