"""The recipes in launch/ start what there is, as far as that shows offline.

Scripts and the commands of documents run against stand-ins that note how they
are called; documents are compared with the fields of their API.
"""

import ast
import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from jaxrl_post import config, prepare, types
from tests.house import source
from tests.unit import launch_shapes as shapes

LAUNCH = source.ROOT / "launch"
EXPERIMENTS = source.ROOT / "experiments"
SCALING = source.ROOT / "docs" / "scaling.md"
SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sh"))
DOCUMENTS = {
  "jobset.yaml": shapes.JOBSET,
  "kuberay.yaml": shapes.RAYJOB,
  "skypilot.yaml": shapes.SKYPILOT,
}
IN_IMAGE = "/opt/jaxrl_post/"

# Notes its name, its arguments and its GPUs. As srun it may ring the alarm
# clock of the script that called it, and ends as it is told.
STAND_IN = r"""#!/usr/bin/env bash
printf '%s\0' "${0##*/}" "$@" "${JAX_LOCAL_DEVICE_IDS-unset}" >> "$CALLS"
echo >> "$CALLS"
[[ ${0##*/} == srun ]] || exit 0
if [[ -n ${ALARM-} ]]; then
  kill -USR1 "$PPID"
  exec sleep 3 > /dev/null 2>&1
fi
exit "${STATUS-0}"
"""
NAMES = ("python", "scontrol", "srun", "xpk", ".venv/bin/python")


@dataclasses.dataclass(frozen=True)
class Ran:
  """A command that has run: its end, and what it called with which GPUs."""

  code: int
  error: str
  calls: list[list[str]]
  gpus: list[str]


def ran(folder: pathlib.Path, command: Sequence[str], **env: str) -> Ran:
  """Runs a command in a folder where launchers are stand-ins."""
  for name in NAMES:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STAND_IN)
    path.chmod(0o755)
  calls = folder / "calls"
  calls.touch()
  path = f"{folder}:{os.environ['PATH']}"
  done = subprocess.run(
    command,
    cwd=folder,
    env={"PATH": path, "CALLS": str(calls), **env},
    capture_output=True,
    check=False,
    text=True,
    timeout=30,
  )
  lines = [line.split("\0")[:-1] for line in calls.read_text().splitlines()]
  return Ran(
    code=done.returncode,
    error=done.stderr,
    calls=[line[:-1] for line in lines],
    gpus=[line[-1] for line in lines],
  )


def our_flags() -> set[str]:
  """Returns the flags that main.py defines."""
  return {
    ast.literal_eval(node.args[0])
    for node in ast.walk(source.parse(source.PACKAGE / "main.py"))
    if isinstance(node, ast.Call)
    and ast.unparse(node.func).startswith("flags.DEFINE_")
  }


def read(words: Sequence[str]) -> tuple[dict[str, str], config.Run]:
  """Reads a command of ours as main.py would.

  Args:
    words: from `-m` on.

  Returns:
    Its flags but --set, and its configuration.

  Raises:
    AssertionError: a flag is not main.py's, or has no value.
    InputError: there is no such experiment or setting.
  """
  assert list(words[:2]) == ["-m", "jaxrl_post.main"]
  flags, settings, rest = {}, [], iter(words[2:])
  for word in rest:
    match = re.fullmatch(r"--(\w+)=(.+)", word)
    if word == "--set":
      settings.append(next(rest))
    else:
      assert match, word
      flags[match[1]] = match[2]
  assert not flags.keys() - our_flags() and {"exp", "workdir"} <= flags.keys()
  exp = flags["exp"].replace(IN_IMAGE, f"{source.ROOT}/")
  run = config.load(exp, EXPERIMENTS)
  return flags, config.override(run, settings)


def document(name: str) -> Any:
  return yaml.safe_load((LAUNCH / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tiny() -> prepare.Parts:
  """Prompts and a model that stand in for what only a user has."""
  run = config.load("tiny", EXPERIMENTS)
  return prepare.prepare(config.override(run, ["data.train.size=256"]))


def test_the_checks_find_what_is_wrong():
  shape = {"a!": int, "b": [{"c!": {"x", "y"}}], "d": {}}
  assert (
    shapes.problems({"a": 1, "b": [{"c": "x"}], "d": {"any": 1}}, shape) == []
  )
  wrong = {"a": True, "b": [{"c": "z"}, {}], "e": 1}
  assert [line.partition(":")[0] for line in shapes.problems(wrong, shape)] == [
    ".a",
    ".b[0].c",
    ".b[1].c",
    ".e",
  ]
  assert shapes.problems({"b": []}, shape)[0] == ".a: missing"
  command = ["-m", "jaxrl_post.main", "--exp=tiny", "--workdir=w"]
  assert read(command)[0] == {"exp": "tiny", "workdir": "w"}
  for bad in (["--color=red"], ["--num_processes="], ["more"]):
    with pytest.raises(AssertionError):
      read([*command, *bad])
  with pytest.raises(types.InputError, match="no field 'mood'"):
    read([*command, "--set", "placement.mood=split"])


def test_every_recipe_is_explained_and_every_explained_one_is_there():
  named = set(re.findall(r"launch/[\w.]+", SCALING.read_text(encoding="utf-8")))
  assert named == {f"launch/{path.name}" for path in LAUNCH.iterdir()}
  assert {*SCRIPTS, *DOCUMENTS} == {path.name for path in LAUNCH.iterdir()}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("linter", ["bash -n", "shellcheck"])
def test_a_script_is_well_formed(name: str, linter: str):
  command = [*linter.split(), str(LAUNCH / name)]
  if linter == "shellcheck":  # Installed beside the interpreter.
    command[0] = str(pathlib.Path(sys.executable).with_name(linter))
  done = subprocess.run(command, capture_output=True, check=False, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  assert os.access(LAUNCH / name, os.X_OK)


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda p: p.name)
def test_a_recipe_names_no_registry_and_holds_no_secret(path: pathlib.Path):
  text = path.read_text(encoding="utf-8")
  assert not re.search(r"\b(docker|gcr|ghcr|quay|pkg)\.(io|dev|com)\b", text)
  assert not re.search(r"(?i)token|password|secret|api_key", text)
  images = re.findall(r"\bimage: *(\S+)", text)
  assert set(images) <= {"${IMAGE}"}


# ------------------------------------------------------------------- scripts

SLURM = {
  "WORKDIR": "/shared/runs/a b",
  "SLURM_JOB_ID": "7",
  "SLURM_NTASKS_PER_NODE": "1",
  "SLURM_GPUS_ON_NODE": "8",
  "SLURM_CPUS_PER_TASK": "32",
}
SRUN = ["srun", "--kill-on-bad-exit=0", "--wait=120", "--cpus-per-task=32"]
PROGRAM = ["-m", "jaxrl_post.main", "--exp=gsm8k_qwen3"]


def slurm(folder: pathlib.Path, *words: str, **env: str) -> Ran:
  return ran(folder, ["bash", str(LAUNCH / "slurm.sh"), *words], **SLURM | env)


def directives() -> dict[str, str]:
  """Returns what Slurm reads: the lines before the first command."""
  text = (LAUNCH / "slurm.sh").read_text(encoding="utf-8")
  head = re.match(r"(#.*\n)+", text)
  assert head and text.count("\n#SBATCH") == head[0].count("\n#SBATCH")
  found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", head[0], re.MULTILINE)
  assert len(found) == head[0].count("\n#SBATCH")
  return dict(found)


def test_slurm_may_put_the_job_back_and_rings_before_the_time_limit():
  found = directives()
  assert found["requeue"] == "" and found["open-mode"] == "append"
  assert re.fullmatch(r"B:USR1@\d+", found["signal"])
  wanted = {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"}
  assert wanted <= found.keys() and found["ntasks-per-node"] == "1"


def test_slurm_starts_one_task_a_node_that_owns_all_its_gpus(
  tmp_path: pathlib.Path,
):
  got = slurm(tmp_path, "--set", "num_steps=5")
  workdir = "--workdir=/shared/runs/a b"
  more = ["--set", "num_steps=5"]
  assert got.calls == [[*SRUN, "python", *PROGRAM, workdir, *more]]
  assert got.gpus == ["0,1,2,3,4,5,6,7"] and got.code == 0
  assert read(got.calls[0][5:])[1].num_steps == 5


def test_slurm_leaves_the_gpu_to_jax_with_one_task_a_gpu(
  tmp_path: pathlib.Path,
):
  assert slurm(tmp_path, SLURM_NTASKS_PER_NODE="8").gpus == ["unset"]


@pytest.mark.parametrize(
  ("status", "restarts", "again"),
  [("0", "0", False), ("1", "2", True), ("1", "3", False), ("2", "0", False)],
)
def test_slurm_puts_back_a_failed_run_but_not_wrong_input(
  status: str, restarts: str, again: bool, tmp_path: pathlib.Path
):
  got = slurm(tmp_path, STATUS=status, SLURM_RESTART_COUNT=restarts)
  assert got.code == int(status)
  assert got.calls[1:] == ([["scontrol", "requeue", "7"]] if again else [])


def test_slurm_puts_the_job_back_before_the_time_limit(tmp_path: pathlib.Path):
  got = slurm(tmp_path, ALARM="1")
  assert got.calls[1:] == [["scontrol", "requeue", "7"]] and got.code == 1
  assert "time limit" in got.error


XPK = {
  "CLUSTER": "mine",
  "IMAGE": "HOST/PROJECT/jaxrl_post",
  "STORAGE": "shared",
  "WORKDIR": "/shared/runs/a b",
}


def xpk(folder: pathlib.Path, *words: str, **env: str) -> Ran:
  return ran(folder, ["bash", str(LAUNCH / "gke_xpk.sh"), *words], **XPK | env)


def test_xpk_makes_a_workload_that_restarts_after_a_failed_run_only(
  tmp_path: pathlib.Path,
):
  got = xpk(tmp_path, NAME="gsm8k")
  assert got.code == 0 and len(got.calls) == 1
  assert got.calls[0][:3] == ["xpk", "workload", "create"]
  assert got.calls[0][3:-1] == [
    "--cluster=mine",
    "--workload=gsm8k",
    "--tpu-type=v6e-16",
    "--num-slices=1",
    "--docker-image=HOST/PROJECT/jaxrl_post",
    "--storage=shared",
    "--max-restarts=3",
    "--restart-on-exit-codes=1",
  ]


def xpk_command(got: Ran) -> list[str]:
  name, _, command = got.calls[0][-1].partition("=")
  assert name == "--command" and "\n" not in command
  return shlex.split(command)


def test_xpk_starts_our_command_in_the_repository(tmp_path: pathlib.Path):
  got = xpk_command(xpk(tmp_path, "--set", "data.system=Think, then say it."))
  assert got[:4] == ["cd", "/opt/jaxrl_post", "&&", "python"]
  flags, run = read(got[4:])
  assert flags == {"exp": "gsm8k_qwen3", "workdir": "/shared/runs/a b"}
  assert run.placement.mode == "colocated"
  assert run.data.system == "Think, then say it."


@pytest.mark.parametrize(
  ("script", "name"), [("slurm", "WORKDIR"), *(("gke_xpk", n) for n in XPK)]
)
def test_a_script_asks_for_what_it_cannot_know_and_starts_nothing(
  script: str, name: str, tmp_path: pathlib.Path
):
  env = {**SLURM, **XPK, name: ""}
  got = ran(tmp_path, ["bash", str(LAUNCH / f"{script}.sh")], **env)
  assert got.code != 0 and got.calls == []
  assert re.search(rf"{name}: expected ", got.error)


# ----------------------------------------------------------------- documents


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_the_fields_of_its_api(name: str):
  assert shapes.problems(document(name), DOCUMENTS[name]) == []


def pods(name: str) -> list[dict[str, Any]]:
  """Returns the pods a document describes, wherever they are in it."""

  def find(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
      return [pod for inner in node for pod in find(inner)]
    if not isinstance(node, dict):
      return []
    return [node] if "containers" in node else find(list(node.values()))

  return find(document(name))


@pytest.mark.parametrize("name", ["jobset.yaml", "kuberay.yaml"])
def test_what_is_mounted_is_there(name: str):
  assert pods(name)
  for pod in pods(name):
    mounts = [m for c in pod["containers"] for m in c.get("volumeMounts", [])]
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    assert {mount["name"] for mount in mounts} == volumes


@pytest.mark.parametrize("name", ["jobset.yaml", "kuberay.yaml"])
def test_only_the_image_is_left_to_fill_in(name: str):
  text = (LAUNCH / name).read_text(encoding="utf-8")
  assert f"envsubst '$IMAGE' < launch/{name}" in text
  assert set(re.findall(r"\$\{\w+\}", text)) == {"${IMAGE}"}


def worker() -> dict[str, Any]:
  """Returns the Job that the JobSet makes."""
  (job,) = document("jobset.yaml")["spec"]["replicatedJobs"]
  assert job["replicas"] == 1
  return job["template"]["spec"]


def jobset_command(folder: pathlib.Path, index: int) -> list[str]:
  (container,) = worker()["template"]["spec"]["containers"]
  command = [*container["command"], *container["args"]]
  got = ran(folder, command, JOB_COMPLETION_INDEX=str(index))
  assert got.code == 0 and len(got.calls) == 1
  assert got.calls[0][0] == "python"
  return got.calls[0][1:]


def test_a_jobset_starts_each_process_with_its_number(tmp_path: pathlib.Path):
  flags, _ = read(jobset_command(tmp_path, 1))
  whole, job = document("jobset.yaml"), worker()
  assert job["completions"] == job["parallelism"] == int(flags["num_processes"])
  assert flags["process_id"] == "1"
  (name,) = [j["name"] for j in whole["spec"]["replicatedJobs"]]
  network = whole["spec"]["network"]
  host, _, port = flags["coordinator"].partition(":")
  assert (
    host == f"{whole['metadata']['name']}-{name}-0-0.{network['subdomain']}"
  )
  assert network["enableDNSHostnames"] and port.isdecimal()


def test_a_jobset_restarts_as_a_whole_but_not_after_wrong_input():
  policy = document("jobset.yaml")["spec"]["failurePolicy"]
  assert policy["maxRestarts"] > 0 and worker()["backoffLimit"] == 0
  assert policy["restartStrategy"] == "BlockingRecreate"
  (rule,), (job_rule,) = policy["rules"], worker()["podFailurePolicy"]["rules"]
  assert rule["action"] == "FailJobSet"
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
  assert job_rule["action"] == "FailJob"
  assert job_rule["onExitCodes"]["values"] == [2]
  pod = worker()["template"]["spec"]
  assert pod["restartPolicy"] == "Never"
  (container,) = pod["containers"]
  assert job_rule["onExitCodes"]["containerName"] == container["name"]


def ray_command() -> list[str]:
  entrypoint = document("kuberay.yaml")["spec"]["entrypoint"]
  # KubeRay pastes it into a command of its own.
  assert re.fullmatch(r"[\w=./ -]+", entrypoint)
  words = shlex.split(entrypoint)
  assert words[0] == "python"
  return words[1:]


def gpus_of(group: dict[str, Any]) -> tuple[int, int]:
  """Returns pods of a group, and GPUs of each."""
  (container,) = group["template"]["spec"]["containers"]
  assert group["minReplicas"] == group["maxReplicas"] == group["replicas"]
  return group["replicas"], int(
    container["resources"]["limits"]["nvidia.com/gpu"]
  )


def test_ray_has_a_gpu_for_each_trainer_and_replica():
  _, run = read(ray_command())
  spec = document("kuberay.yaml")["spec"]
  groups = {
    g["groupName"]: g for g in spec["rayClusterSpec"]["workerGroupSpecs"]
  }
  roles = run.placement.roles
  assert run.placement.mode == "roles" and roles.replica_resource == "GPU"
  assert gpus_of(groups["train"]) == (
    roles.training_processes,
    spec["entrypointNumGpus"],
  )
  count, each = gpus_of(groups["generate"])
  assert count * each == roles.generation_replicas * roles.replica_devices
  assert each % roles.replica_devices == 0
  # Else Ray might put the driver there.
  assert each < spec["entrypointNumGpus"]
  head = spec["rayClusterSpec"]["headGroupSpec"]
  assert head["rayStartParams"]["num-cpus"] == "0"


SKYPILOT = {
  "SKYPILOT_NUM_NODES": "2",
  "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}


def skypilot_command(folder: pathlib.Path, rank: int) -> list[str]:
  whole = document("skypilot.yaml")
  env = {**SKYPILOT, **whole["envs"], "SKYPILOT_NODE_RANK": str(rank)}
  got = ran(folder, ["bash", "-c", whole["run"]], **env)
  assert got.code == 0 and len(got.calls) == 1
  return got.calls[0][1:]


def test_skypilot_starts_each_node_with_its_rank(tmp_path: pathlib.Path):
  flags, _ = read(skypilot_command(tmp_path, 1))
  assert flags["coordinator"] == "10.0.0.1:8476"
  assert (flags["num_processes"], flags["process_id"]) == ("2", "1")
  assert flags["workdir"] == "/shared/runs/gsm8k"


def test_skypilot_prepares_the_python_that_it_starts():
  whole = document("skypilot.yaml")
  done = subprocess.run(["bash", "-n", "-c", whole["setup"]], check=False)
  assert done.returncode == 0
  assert ".venv/bin/python" in whole["setup"]
  assert ".venv/bin/python" in whole["run"]


# --------------------------------------------------------------------- sizes


def test_the_batch_of_every_recipe_divides_over_its_devices(
  tiny: prepare.Parts, tmp_path: pathlib.Path
):
  gpus = int(directives()["gpus-per-node"])
  nodes = int(directives()["nodes"])
  (container,) = worker()["template"]["spec"]["containers"]
  pod_gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
  sky = document("skypilot.yaml")
  node_gpus = int(sky["resources"]["accelerators"].partition(":")[2])
  a_gpu = ["placement.mode=colocated", "optim.microbatches=32"]
  words = [w for setting in a_gpu for w in ("--set", setting)]
  text = (LAUNCH / "slurm.sh").read_text(encoding="utf-8")
  assert " ".join(words) in text
  ray = document("kuberay.yaml")["spec"]["entrypointNumGpus"]
  # Command, devices, processes. A v6e-16 is four hosts of four chips.
  cases = [
    ([*PROGRAM, "--workdir=w"], nodes * gpus, nodes),
    ([*PROGRAM, "--workdir=w", *words], nodes * gpus, nodes * gpus),
    (xpk_command(xpk(tmp_path / "x"))[4:], 16, 4),
    (jobset_command(tmp_path / "j", 0), worker()["completions"] * pod_gpus, 2),
    (skypilot_command(tmp_path / "s", 0), sky["num_nodes"] * node_gpus, 2),
    (ray_command(), ray, 1),
  ]
  for command, devices, processes in cases:
    _, run = read(command)
    said = prepare.plan(run, tiny, devices, processes)
    assert "idle" not in said, said


def test_the_examples_of_the_page_are_commands_of_ours():
  command = r"^(?:ray job submit .* -- )?python (-m .*?)(?: &)?$"
  lines = re.findall(command, SCALING.read_text(encoding="utf-8"), re.MULTILINE)
  assert len(lines) == 4
  for line in lines:
    read(shlex.split(line))
