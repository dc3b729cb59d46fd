"""Dumps: groups of scored rollouts on disk, which anyone can read.

A dump is a folder with one folder a batch, named by its number from 1 in eight
digits. A batch is written aside and renamed, so it is whole or not there. Its
files are plain JSON and NumPy, without pickle:

`groups.jsonl`: a JSON object a line, one for each group, by uid:
  `uid`, `prompt` (text), `messages` before any template, where there are some
  that JSON can hold, `reference` as JSON, or where JSON cannot hold it
  `reference_repr`; `prompt_num_tokens` and `prompt_offset` into the arrays;
  `rollouts`, each with `uid`, `text`, `reward` (null when there is none),
  `parts` (numbers by name), `failure`, `finish` ("stop" or "length"),
  `temperature`, `num_tokens` and `offset` into the arrays; of a conversation
  with an environment `conversation` (text) and `turns`, see `types.Turn`; of
  one that began anew `segments`, each a place in its tokens, and the ids of the
  prompt that stands before those from there on.
`arrays.npz`: what the tokens have, end to end:
  `tokens` int32, `logprobs` float32 in nats, `versions` int32, all of the
  completions; `offsets` int64, where each completion begins, and their end;
  `prompt_tokens` int32 and `prompt_offsets` int64, likewise of the prompts.
`about.json`: `format`, and where the groups are from; what a run writes is in
  `docs/running.md`.
`manifest.json`: size and checksum of the other three; see `manifest`.
"""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post import types
from jaxrl_post.runtime import folder as folder_lib
from jaxrl_post.runtime import manifest as manifests

# In the folder of a run that was trained with debug.dump.
FOLDER = "dump"
FORMAT = 1
_GROUPS, _ARRAYS, _ABOUT = "groups.jsonl", "arrays.npz", "about.json"
_FILES = {_GROUPS, _ARRAYS, _ABOUT}
# What files that are whole, but of something else, may raise.
_FOREIGN = (KeyError, TypeError, ValueError, zipfile.BadZipFile)


@dataclasses.dataclass(frozen=True)
class Debug:
  """Batches on disk: written as they are trained, or trained once more.

  Attributes:
    dump: write every batch to the folder `dump` of the run, before it trains.
    replay: a dump to train on, instead of sampling; None samples.
  """

  dump: bool = False
  replay: str | None = None

  def __post_init__(self) -> None:
    if self.replay == "":
      raise types.InputError(
        "debug.replay: expected the folder of a dump, got an empty name. Name "
        "one, or leave it out."
      )
    if self.replay is not None and self.dump:
      raise types.InputError(
        "debug.dump: expected false with debug.replay, whose batches are on "
        "disk already, got true. Leave one of them out."
      )


def batch(folder: str | os.PathLike[str], number: int) -> pathlib.Path:
  """Returns the place of a batch of a dump, counted from 1."""
  return pathlib.Path(folder) / f"{number:08d}"


def batches(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
  """Lists the batches of a dump by number.

  Raises:
    InputError: there are none, or one is missing between others.
  """
  path = pathlib.Path(folder)
  found = _numbered(path)
  if not found:
    raise types.InputError(
      f"{path}: expected a dump, with batches 00000001 and so on, got none. "
      "Name the folder that has them."
    )
  gaps = {*range(min(found), max(found))} - found.keys()
  if gaps:
    raise types.InputError(
      f"{path}: expected batches {min(found)} to {max(found)}, got none of "
      f"{min(gaps)}. Put it back, or take the later ones away."
    )
  return [found[number] for number in sorted(found)]


def cut(folder: str | os.PathLike[str], number: int) -> None:
  """Deletes what a run that continues will write again.

  Args:
    folder: the dump; nothing happens if there is none.
    number: the last batch that stays; later ones, and what was half written,
      go.
  """
  path = pathlib.Path(folder)
  late = [p for n, p in _numbered(path).items() if n > number]
  for one in [*late, *path.glob(".[0-9]*")]:
    shutil.rmtree(one)


def write(
  path: str | os.PathLike[str],
  groups: Sequence[types.Group],
  about: Mapping[str, Any],
) -> None:
  """Writes a batch, on disk before this returns.

  Args:
    path: from `batch`; its parents are made.
    groups: with their rollouts.
    about: what JSON can hold; `format` is added.

  Raises:
    RunError: there is such a batch already, the disk refuses, or JSON cannot
      hold a number of it. Nothing is left of it then.
  """
  path = pathlib.Path(path)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.")
    try:
      _write(pathlib.Path(aside), groups, about)
      os.rename(aside, path)  # It refuses a folder with files.
    except BaseException:
      shutil.rmtree(aside)
      raise
    folder_lib.sync(path.parent)
  except (OSError, ValueError) as error:
    fault = str(error)
  else:
    return
  # Outside of the handler: the cause is in the line, and needs no traceback.
  raise types.RunError(
    f"{path}: expected to write a batch of a dump, got {fault}. Make room "
    "if that is it, or write elsewhere."
  )


def _write(
  path: pathlib.Path, groups: Sequence[types.Group], about: Mapping[str, Any]
) -> None:
  prompts = [group.prompt.tokens for group in groups]
  made = [r.completion for group in groups for r in group.rollouts]
  starts, offsets = _offsets(prompts), _offsets([c.tokens for c in made])
  begins = iter(offsets.tolist())
  lines = [
    json.dumps(_group(group, start, begins), allow_nan=False) + "\n"
    for group, start in zip(groups, starts.tolist(), strict=False)
  ]
  folder_lib.write(path / _GROUPS, "".join(lines))
  with (path / _ARRAYS).open("wb") as file:
    np.savez(
      file,
      prompt_tokens=_joined(prompts, np.int32),
      prompt_offsets=starts,
      tokens=_joined([c.tokens for c in made], np.int32),
      logprobs=_joined([c.logprobs for c in made], np.float32),
      versions=_joined([c.versions for c in made], np.int32),
      offsets=offsets,
    )
  text = json.dumps({"format": FORMAT, **about}, indent=2, allow_nan=False)
  folder_lib.write(path / _ABOUT, text + "\n")
  # mkdtemp makes the folder private; a run folder is read by others too.
  path.chmod(0o755)
  manifests.write(path, {})


def read(path: str | os.PathLike[str]) -> list[types.Group]:
  """Reads a batch.

  Args:
    path: one of `batches`.

  Returns:
    The groups that were written: uids, ids, versions, texts and rewards are
    the same, log-probabilities as float32 holds them. A reference comes back
    as JSON has it, or is its `repr`.

  Raises:
    InputError: it is damaged, or no batch of a dump.
  """
  path = pathlib.Path(path)
  about(path)
  try:
    with np.load(path / _ARRAYS, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    lines = (path / _GROUPS).read_text(encoding="utf-8").split("\n")[:-1]
    return [_read_group(json.loads(line), arrays) for line in lines]
  except _FOREIGN as error:
    raise _not_ours(path, f"{type(error).__name__}: {error}") from error


def about(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns where a batch is from, once it was found to be whole.

  Args:
    path: one of `batches`.

  Returns:
    What `write` was told, and `format`.

  Raises:
    InputError: it is damaged, of another format, or no batch of a dump.
  """
  path = pathlib.Path(path)
  fault = manifests.fault(path)
  if fault is not None:
    raise _not_ours(path, fault)
  others = manifests.read(path).files.keys() ^ _FILES
  if others:
    raise _not_ours(path, f"another set of files ({', '.join(sorted(others))})")
  try:
    found = dict(json.loads((path / _ABOUT).read_text(encoding="utf-8")))
  except _FOREIGN as error:
    raise _not_ours(path, f"no object in {_ABOUT}") from error
  if found.get("format") != FORMAT:
    raise _not_ours(path, f"format {found.get('format')!r}")
  return found


def read_all(
  folder: str | os.PathLike[str],
) -> Iterator[types.Group]:
  """Yields the groups of a dump, batch by batch.

  Raises:
    InputError: see `batches` and `read`.
  """
  for path in batches(folder):
    yield from read(path)


def _numbered(path: pathlib.Path) -> dict[int, pathlib.Path]:
  return {
    int(p.name): p
    for p in path.glob("[0-9]*")
    if p.name.isdecimal() and p.is_dir()
  }


def _not_ours(path: pathlib.Path, what: str) -> types.InputError:
  return types.InputError(
    f"{path}: expected a whole batch of a dump in format {FORMAT}, got {what}. "
    "Write the dump again."
  )


def _offsets(parts: Sequence[Sequence[int]]) -> np.ndarray:
  """Returns where each part begins when they are joined, and their end."""
  return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _joined(parts: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
  return np.array([value for part in parts for value in part], dtype)


def _group(
  group: types.Group, start: int, begins: Iterator[int]
) -> dict[str, Any]:
  prompt = group.prompt
  return {
    "uid": prompt.uid,
    "prompt": prompt.text,
    **_messages(prompt.messages),
    **_reference(prompt.reference),
    "prompt_num_tokens": len(prompt.tokens),
    "prompt_offset": start,
    "rollouts": [_rollout(r, next(begins)) for r in group.rollouts],
  }


def _messages(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  found = [dict(message) for message in messages]
  return {"messages": found} if found and _is_json(found) else {}


def _reference(reference: Any) -> dict[str, Any]:
  if not _is_json(reference):
    return {"reference_repr": repr(reference)}
  return {"reference": reference}


def _is_json(value: Any) -> bool:
  try:
    json.dumps(value, allow_nan=False)
  except (TypeError, ValueError):
    return False
  return True


def _rollout(rollout: types.Rollout, start: int) -> dict[str, Any]:
  reward, completion = rollout.reward, rollout.completion
  return {
    "uid": completion.uid,
    "text": rollout.text,
    "reward": None if math.isnan(reward) else float(reward),
    "parts": {name: float(part) for name, part in rollout.parts.items()},
    "failure": rollout.failure,
    "finish": completion.finish,
    "temperature": float(rollout.temperature),
    "num_tokens": len(completion.tokens),
    "offset": start,
    **_turns(rollout),
  }


def _turns(rollout: types.Rollout) -> dict[str, Any]:
  turns = [dataclasses.asdict(turn) for turn in rollout.completion.turns]
  if not turns:
    return {}
  begun = rollout.completion.segments
  return {
    "conversation": rollout.conversation,
    "turns": turns,
    **({"segments": begun} if begun else {}),
  }


def _read_group(
  line: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> types.Group:
  start, count = line["prompt_offset"], line["prompt_num_tokens"]
  repr_ = line.get("reference_repr")
  prompt = types.Prompt(
    uid=line["uid"],
    tokens=tuple(arrays["prompt_tokens"][start : start + count].tolist()),
    text=line["prompt"],
    reference=line["reference"] if repr_ is None else repr_,
    messages=tuple(line.get("messages", ())),
  )
  rollouts = [_read_rollout(one, prompt, arrays) for one in line["rollouts"]]
  return types.Group(prompt=prompt, rollouts=tuple(rollouts))


def _read_rollout(
  line: Mapping[str, Any],
  prompt: types.Prompt,
  arrays: Mapping[str, np.ndarray],
) -> types.Rollout:
  span = slice(line["offset"], line["offset"] + line["num_tokens"])
  completion = types.Completion(
    uid=line["uid"],
    tokens=tuple(arrays["tokens"][span].tolist()),
    logprobs=tuple(arrays["logprobs"][span].tolist()),
    versions=tuple(arrays["versions"][span].tolist()),
    finish=line["finish"],
    turns=tuple(types.Turn(**turn) for turn in line.get("turns", ())),
    segments=tuple(
      (begin, tuple(prompt)) for begin, prompt in line.get("segments", ())
    ),
  )
  reward = line["reward"]
  return types.Rollout(
    prompt=prompt,
    completion=completion,
    temperature=line["temperature"],
    text=line["text"],
    reward=math.nan if reward is None else reward,
    parts=line["parts"],
    failure=line["failure"],
    conversation=line.get("conversation", ""),
  )
