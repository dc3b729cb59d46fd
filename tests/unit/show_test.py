"""What --mode=inspect shows: prompts as the model sees them, and rollouts."""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys

import pytest
import rich.console

from jaxrl_post import config, prepare, show, types
from jaxrl_post.data import (
  curriculum,
  dataset,
  difficulty,
  mixture,
  sources,
)
from jaxrl_post.envs import multi_turn
from jaxrl_post.runtime import log
from tests.e2e import runs
from tests.reference import tiny_folder

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory) -> str:
  folder = tmp_path_factory.mktemp("model") / "model"
  tiny_folder.write(folder, "qwen3")
  return str(folder)


def asked(index: int) -> types.Example:
  """Makes questions of two messages; every fifth is long."""
  words = f"Add {index} and {index}." + " Please!" * (20 * (index % 5 == 4))
  user = {"role": "user", "content": words}
  return types.Example(prompt=(SYSTEM, user), reference=str(2 * index))


def chat(folder: str, **data) -> config.Run:
  """A run of chat prompts of the tiny model."""
  run = runs.configured()
  defaults = {
    "train": sources.Generated(asked, 10),
    "held_out": sources.Generated(asked, 3, start=8),
    "max_prompt": 150,
  }
  return dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, config=None, path=folder),
    data=dataset.Data(**(defaults | data)),
  )


def test_a_prompt_is_shown_as_the_model_sees_it(folder):
  text = show.prompts(chat(folder))
  lines = text.split("\n")
  assert max(map(len, lines)) <= 80
  assert "\x1b" not in text  # No terminal, no colour.
  at = next(i for i, line in enumerate(lines) if line.startswith("draw 0: "))
  item = prepare.prepare(chat(folder)).data.train[0]
  body = lines[at + 1 : at + 1 + item.text.count("\n")]
  assert [line.strip() for line in body] == item.text.rstrip("\n").split("\n")
  assert body[0].strip() == "<|im_start|>system"
  ids = " ".join(lines[at:]).partition("context, mask 0:")[2]
  found = re.findall(r"(\d+):(\S+)", ids.partition("then up to")[0])
  assert [int(i) for i, _ in found[:40]] == list(item.tokens[:40])
  assert found[0] == ("1", "<|im_start|>")
  assert "sampled tokens, mask 1, to 2:<|im_end|> or 0:<|endoftext|>" in text
  assert f"  {item.reference!r}" in lines


def test_lengths_copies_leaks_and_what_was_dropped_are_counted(folder):
  text = show.prompts(chat(folder))
  assert (
    "training: 8 prompts\n  2 dropped, longer than data.max_prompt=150; "
    in text
  )
  assert "held-out: 2 prompts" in text  # Example 9 is too long.
  assert "in both: 1 of the held-out prompts" in text
  assert re.search(r"dropped: example 4, \d+ tokens, begins", text)
  twice = mixture.Mixture((sources.Generated(asked, 4),) * 2, (3, 1))
  text = show.prompts(chat(folder, train=twice))
  assert "4 are copies of another" in text
  assert "source 0, Generated: 4 prompts, 75.0% of the draws" in text
  assert "source 1, Generated: 4 prompts, 25.0% of the draws" in text


def test_the_prompts_of_a_curriculum_are_shown_by_level(folder):
  run = chat(folder, train=curriculum.Tasks((Halves(),)))
  climb = curriculum.Curriculum()
  run = dataclasses.replace(
    run, data=dataclasses.replace(run.data, curriculum=climb)
  )
  text = show.prompts(run)
  assert "of them: those of the level that a task has by then\n" in text
  assert "  asked, level 0: 3 prompts\n  asked, level 1: 1 prompts" in text
  assert re.search(r"draw 1: example 3, \d+ tokens, asked, level 1 ", text)
  run = config.override(run, ["stream.filter_zero_signal=true"])
  with pytest.raises(types.InputError, match="expected false with data.curr"):
    show.prompts(run)


@dataclasses.dataclass(frozen=True)
class Halves:
  """Two levels of the same examples."""

  name = "asked"

  def levels(self):
    made = [asked(i) for i in range(4)]
    return made[:3], made[3:]


@dataclasses.dataclass(frozen=True)
class Searches:
  """Has a tool, of which the prompts of a run speak."""

  schemas = (
    {
      "type": "function",
      "function": {
        "name": "search",
        "description": "Finds.",
        "parameters": {"type": "object", "properties": {}},
      },
    },
  )

  def reset(self, prompt):
    pass

  def step(self, state, text):
    return multi_turn.Step()

  def failed(self, state, reason):
    return multi_turn.Step()


def test_with_an_environment_tools_and_masks_are_told(tmp_path):
  folder = str(tmp_path / "model")
  shown = "{% if tools %}{{ tools | tojson }}{% endif %}"
  tiny_folder.write(
    tmp_path / "model", "qwen3", template=shown + tiny_folder.CHATML
  )
  talk = multi_turn.Conversation(environment=Searches, max_turns=3)
  run = dataclasses.replace(chat(folder, max_prompt=500), env=talk)
  prompt = asked(4).prompt
  told, _ = prepare.prepare(run).data.prompt_ids(prompt)
  plain, _ = prepare.prepare(chat(folder)).data.prompt_ids(prompt)
  assert len(told) > len(plain)
  most = len(told) - 1
  run = dataclasses.replace(chat(folder, max_prompt=most), env=talk)
  text = " ".join(show.prompts(run).split())
  assert f"dropped: example 4, {len(told)} tokens, begins" in text
  assert "in up to 3 turns sampled ones, mask 1, each turn to 2:" in text
  assert "; between turns those of the environment, mask 0" in text
  assert "sampled tokens, mask 1" not in text


def test_roles_and_special_tokens_have_colours_on_a_terminal(
  folder, monkeypatch
):
  made = rich.console.Console

  def terminal(**options):
    return made(**options, force_terminal=True, color_system="standard")

  monkeypatch.setattr(rich.console, "Console", terminal)
  text = show.prompts(chat(folder))
  assert "\x1b[33mBe brief.\x1b[0m" in text  # The system's words are yellow.
  assert re.search(r"\x1b\[36mAdd \d and \d\.", text)  # The user's are cyan.
  assert "\x1b[1;35m<|im_start|>\x1b[0m" in text


def test_text_cannot_steer_the_terminal_or_pass_for_markup(folder):
  def evil(index: int) -> types.Example:
    return types.Example(
      prompt=f"\x1b[31m[bold]x[/bold] \x9b\u202e\t{index}", reference="\x1b[2J"
    )

  text = show.prompts(
    chat(folder, train=sources.Generated(evil, 4), held_out=None)
  )
  assert not set("\x1b\x9b\u202e\t") & set(text)
  assert "\u241b[31m[bold]x[/bold] " in text


@pytest.mark.parametrize(
  ("values", "first", "last"),
  [
    ([5, 5, 5], "5 to 5 ", "5 to 5 "),
    ([1, 2, 3], "1 to 1 ", "3 to 3 "),
    (list(range(100)) * 7, "  0 to  12 ", " 91 to 103 "),
    ([0, 1000], "   0 to  125 ", " 882 to 1007 "),
  ],
)
def test_a_histogram_counts_everything_once(values, first, last):
  lines = show.histogram(values)
  assert 1 <= len(lines) <= 8
  assert sum(int(line.split()[-1]) for line in lines) == len(values)
  assert lines[0].startswith(first) and lines[-1].startswith(last)
  assert "█" * 40 in "".join(lines)


def test_held_out_prompts_that_are_trained_on_are_warned_of(folder, caplog):
  with caplog.at_level(logging.WARNING):
    prepare.prepare(chat(folder))
  assert "1 of 2 held-out prompts are training prompts, too" in caplog.text
  caplog.clear()
  apart = sources.Generated(asked, 3, start=20)
  with caplog.at_level(logging.WARNING):
    prepare.prepare(chat(folder, held_out=apart))
    prepare.prepare(chat(folder, held_out=None))
  assert "training prompts, too" not in caplog.text


# ------------------------------------------------------------------- a run


def test_the_first_and_last_rollouts_of_a_run_are_shown(tmp_path):
  prompt = types.Prompt(uid=3, tokens=(1, 2), text="Why?", reference="")
  rollout = types.Rollout(
    prompt=prompt,
    completion=types.Completion(
      uid=6, tokens=(1,), logprobs=(-1.0,), versions=(0,), finish="stop"
    ),
    temperature=1.0,
    text="Because [red]I[/red] say so. " * 9,
    reward=0.5,
  )
  written = log.Log(tmp_path)
  for step in (1, 2, 3):
    group = types.Group(prompt=prompt, rollouts=(rollout, rollout))
    written.rollouts(step, [group], 1)
  written.close()
  text = show.rollouts([tmp_path])
  assert "Step 1 prompt 3" in text and "Step 3 prompt 3" in text
  assert "Step 2" not in text
  assert text.count("  * uid 6, reward 0.5, 1 tokens, stop") == 4
  assert text.count("[red]I[/red]") == 36
  assert max(map(len, text.split("\n"))) <= 80


def test_a_folder_without_rollouts_is_refused(tmp_path):
  with pytest.raises(types.InputError, match="got none. Name the folder"):
    show.rollouts([tmp_path])


# --------------------------------------------------------------- by command


def test_inspect_by_command_starts_no_device_and_writes_nothing(tmp_path):
  end = subprocess.run(
    [
      sys.executable,
      "-m",
      "jaxrl_post.main",
      runs.experiment(),
      "--mode=inspect",
    ],
    cwd=tmp_path,
    env={
      **os.environ,
      "PYTHONPATH": str(runs.ROOT / "src"),
      "JAX_PLATFORMS": "no_such_device",
    },
    capture_output=True,
    check=False,
    text=True,
    timeout=120,
  )
  assert end.returncode == 0, end.stderr
  assert "draw 2: example " in end.stdout and "reference:" in end.stdout
  assert list(tmp_path.iterdir()) == []


def test_inspect_by_command_takes_an_experiment_or_a_run(tmp_path):
  end = runs.run(tmp_path, "--mode=inspect", runs.experiment(), "run")
  assert end.code == 2
  assert "--exp: expected none with --mode=inspect, got " in end.err


def test_a_pool_is_a_group_of_settings_that_begins_with_its_defaults():
  run = runs.configured("data.pool.results=3")
  assert run.data.pool == difficulty.Pool(results=3)
  assert runs.configured("data.pool.rest=2", "data.pool.results=1").data.pool
  assert json.dumps(config.to_json(runs.configured())["data"]["pool"]) == "null"
