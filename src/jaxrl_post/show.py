"""What a person looks at before a run, and after it: prompts and rollouts.

In 80 columns; with colours on a terminal. Starts no device.
"""

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
import rich.padding
import rich.text

from jaxrl_post import config, prepare, types
from jaxrl_post.data import dataset, mixture, tokenizer
from jaxrl_post.data import prompts as prompt_sets
from jaxrl_post.runtime import log, samples

_WIDTH = 80
# Prompts and dropped examples that are shown, and ids of each at either end.
_PROMPTS, _DROPPED, _IDS = 3, 2, 40
_BINS, _BAR = 8, 40
_MOST_CHARS = 400  # of a reference

_ROLES = {
  "system": "yellow",
  "user": "cyan",
  "assistant": "green",
  "tool": "blue",
}
_SPECIAL, _CONTEXT, _TITLE, _QUIET = "bold magenta", "cyan", "bold", "dim"
# Pictures of what has none: blanks and breaks between ids, and controls.
_PICTURES = {i: chr(0x2400 + i) for i in range(0x20)} | {0x7F: "\u2421"}
_BREAK, _BLANK, _NO_PICTURE = "\u21b5", "\u00b7", "\ufffd"


def prompts(cfg: config.Run) -> str:
  """Shows the prompts of a run as the model will see them.

  Args:
    cfg: the run.

  Returns:
    Lines of at most 80 columns: of training and held-out prompts how many, how
    long and what was dropped; then the first draws, each with its text, special
    tokens visible, its ids and what of them trains, and its reference.

  Raises:
    InputError: as `prepare.prepare` does.
  """
  parts = prepare.prepare(cfg)
  data = parts.data
  console = _console()
  with console.capture() as capture:
    _set(console, "training", data.train, cfg.data)
    _shares(console, cfg, data.train)
    for name, asked in data.held_out.items():
      _set(console, f"held-out {name}".strip(), asked, cfg.data)
    if data.held_out:
      console.print(
        f"in both: {dataset.leaked(data)} of the held-out prompts\n"
      )
    examples = cfg.data.train.load()  # Prompts do not keep their messages.
    _dropped(console, examples, data, cfg.data)
    for uid in range(min(_PROMPTS, len(data.train))):
      _prompt(console, cfg, data, examples, uid)
  return _trimmed(capture.get())


def rollouts(folders: Sequence[pathlib.Path]) -> str:
  """Shows what a run sampled, first and last.

  Args:
    folders: that of the run.

  Returns:
    The first group of the first and of the last step in its rollouts.txt.

  Raises:
    InputError: there are none.
  """
  (folder,) = folders
  found = samples.rollouts(folder)
  if not found:
    raise types.InputError(
      f"{folder}: expected a run folder with rollouts in {log.ROLLOUTS_FILE}, "
      "got none. Name the folder of a run that trained a batch, or --exp to "
      "see its prompts."
    )
  console = _console()
  with console.capture() as capture:
    for sample in found:
      console.rule(_plain(sample.title, _TITLE), align="left")
      for line in sample.text.split("\n"):
        style = _TITLE if line.startswith("  * ") else ""
        console.print(_plain(line, style), overflow="fold")
      console.print()
  return _trimmed(capture.get())


def _console() -> rich.console.Console:
  """Returns one that takes text as it is, in colours if stdout shows them."""
  return rich.console.Console(
    width=_WIDTH, highlight=False, markup=False, emoji=False
  )


def _trimmed(text: str) -> str:
  """Takes away the blanks behind lines, and breaks at the end."""
  return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


# ------------------------------------------------------------------ all of them


def _set(
  console: rich.console.Console,
  name: str,
  found: prompt_sets.Prompts,
  cfg: dataset.Data,
) -> None:
  """Shows how many prompts there are, and how long."""
  lengths = np.asarray([len(item.tokens) for item in found.items])
  texts = collections.Counter(item.tokens for item in found.items)
  console.print(_plain(f"{name}: {found.size} prompts", _TITLE))
  console.print(
    f"  {found.dropped} dropped, longer than data.max_prompt={cfg.max_prompt}; "
    f"{found.size - len(texts)} are copies of another"
  )
  median, late = np.percentile(lengths, (50, 90), method="inverted_cdf")
  console.print(
    f"  tokens: least {lengths.min()}, median {median}, mean "
    f"{lengths.mean():.1f}, 90 % at most {late}, most {lengths.max()}"
  )
  for line in histogram(lengths.tolist()):
    console.print(f"  {line}")
  console.print()


def histogram(values: Sequence[int]) -> list[str]:
  """Draws how often whole numbers come, in up to 8 ranges of equal width.

  Returns:
    A line a range: its ends, both of them included, a bar, and how many. The
    numbers of all lines add up to `len(values)`.
  """
  low, high = min(values), max(values)
  width = (high - low) // _BINS + 1
  counts = collections.Counter((value - low) // width for value in values)
  most = max(counts.values())
  bins = (high - low) // width + 1
  digits = len(str(low + bins * width - 1))
  lines = []
  for i in range(bins):
    start = low + i * width
    bar = "█" * -(-_BAR * counts[i] // most)
    ends = f"{start:>{digits}} to {start + width - 1:>{digits}}"
    lines.append(f"{ends} {bar:<{_BAR}} {counts[i]}".rstrip())
  return lines


def _shares(
  console: rich.console.Console, cfg: config.Run, train: prompt_sets.Prompts
) -> None:
  """Shows how often a run asks its prompts; of a mixture each source's.

  Of tasks with levels it shows the prompts of each: what is asked is theirs.
  """
  draws = min(cfg.num_steps * cfg.groups_per_step, len(train))
  often = f"{draws / train.size:.2f} epochs, if none is left out"
  if train.ladder is not None:
    often = "those of the level that a task has by then"
  console.print(f"the run asks {draws} of them: {often}")
  source = cfg.data.train
  if isinstance(source, mixture.Mixture):
    weights = source.weights or train.sizes
    for i, (size, weight) in enumerate(zip(train.sizes, weights, strict=True)):
      share = weight / sum(weights)
      kind = type(source.sources[i]).__name__
      console.print(
        f"  source {i}, {kind}: {size} prompts, {share:.1%} of the draws, "
        f"{draws * share / size:.2f} epochs"
      )
  if train.ladder is not None:
    for (task, level), size in zip(
      train.ladder.parts, train.sizes, strict=True
    ):
      console.print(f"  {task}, level {level}: {size} prompts")
  console.print()


def _dropped(
  console: rich.console.Console,
  examples: Sequence[types.Example],
  data: dataset.Dataset,
  cfg: dataset.Data,
) -> None:
  """Shows the first examples that were too long."""
  kept = {item.uid for item in data.train.items}
  gone = [i for i in range(len(examples)) if i not in kept]
  for i in gone[:_DROPPED]:
    messages = prompt_sets.with_system(examples[i].prompt, i, cfg.system)
    ids, text = data.prompt_ids(messages)
    console.print(f"dropped: example {i}, {len(ids)} tokens, begins")
    _indented(console, _plain(text[:160], _QUIET))
    console.print()


# ------------------------------------------------------------------ one of them


def _prompt(
  console: rich.console.Console,
  cfg: config.Run,
  data: dataset.Dataset,
  examples: Sequence[types.Example],
  uid: int,
) -> None:
  """Shows a draw."""
  item = data.train.items[data.train.place(uid)]
  title = f"draw {uid}: example {item.uid}, {len(item.tokens)} tokens"
  if data.train.ladder is not None:
    title += ", {}, level {}".format(*data.train.ladder.at(uid))
  console.rule(_plain(title, _TITLE), align="left")
  given = prompt_sets.with_system(
    examples[item.uid].prompt, item.uid, cfg.data.system
  )
  special = _special(data.tokenizer)
  _indented(console, _rendered(item.text, given, special))
  console.print(_plain("context, mask 0:", _QUIET))
  _indented(console, _ids(item.tokens, data.tokenizer, special))
  ends = [_cell(i, special, data.tokenizer) for i in data.tokenizer.eos_ids]
  kinds = "sampled tokens, mask 1, to"
  if cfg.env is not None:
    kinds = (
      f"tokens: in up to {cfg.env.max_turns} turns sampled ones, mask 1, each "
      "turn to"
    )
  text = f"then up to {cfg.sampling.max_tokens} {kinds} {' or '.join(ends)}"
  if cfg.env is not None:
    text += "; between turns those of the environment, mask 0"
    if cfg.env.most_rows > 1:
      text += f"; in up to {cfg.env.most_rows} rows, each with its own prompt"
  console.print(_plain(text, "green"))
  console.print(_plain("reference:", _QUIET))
  reference = repr(item.reference)
  if len(reference) > _MOST_CHARS:
    reference = f"{reference[:_MOST_CHARS]}... ({len(reference)} characters)"
  _indented(console, _plain(reference))
  console.print()


def _rendered(
  text: str,
  given: str | Sequence[Mapping[str, Any]],
  special: Mapping[int, str],
) -> rich.text.Text:
  """Returns a prompt's text, with the words of each role in its colour."""
  shown = _plain(text)
  at = 0
  for message in () if isinstance(given, str) else given:
    # Templates may trim what they are given, or leave it out.
    words = str(message["content"]).strip()
    start = text.find(words, at)
    if words and start >= 0:
      at = start + len(words)
      shown.stylize(_ROLES.get(message["role"], _CONTEXT), start, at)
  shown.highlight_words([name for name in special.values() if name], _SPECIAL)
  return shown


def _ids(
  tokens: Sequence[int],
  encoder: tokenizer.Tokenizer,
  special: Mapping[int, str],
) -> rich.text.Text:
  """Returns ids with the text of each; of many those at both ends."""
  shown = rich.text.Text(overflow="fold")
  places = list(range(len(tokens)))
  gap = len(tokens) - 2 * _IDS
  if gap > 0:
    places[_IDS:-_IDS] = [-1]
  for place in places:
    if place < 0:
      shown.append(f"... {gap} more ... ", _QUIET)
      continue
    token = tokens[place]
    style = _SPECIAL if token in special else _CONTEXT
    shown.append(f"{token}", _QUIET)
    shown.append(f":{_cell_text(token, special, encoder)} ", style)
  return shown


def _cell(
  token: int, special: Mapping[int, str], encoder: tokenizer.Tokenizer
) -> str:
  return f"{token}:{_cell_text(token, special, encoder)}"


def _cell_text(
  token: int, special: Mapping[int, str], encoder: tokenizer.Tokenizer
) -> str:
  text = special.get(token) or encoder.decode([token], skip_special=False)
  return _pictured(text).replace("\n", _BREAK).replace(" ", _BLANK)


def _special(encoder: tokenizer.Tokenizer) -> dict[int, str]:
  """Returns the special tokens, and all that end a completion, by id."""
  added = encoder.backend.get_added_tokens_decoder()
  found = {i: token.content for i, token in added.items() if token.special}
  ends = {i: encoder.backend.id_to_token(i) or "" for i in encoder.eos_ids}
  return {**found, **ends}


def _plain(text: str, style: str = "") -> rich.text.Text:
  """Returns text as it is: no markup is read in it, and no control obeyed."""
  return rich.text.Text(_pictured(text), style=style)


def _pictured(text: str) -> str:
  """Puts a picture in the place of each character without one; not of breaks.

  Each is one character again, so that places in the text stay.
  """
  return "".join(
    c if c == "\n" or c.isprintable() else _PICTURES.get(ord(c), _NO_PICTURE)
    for c in text
  )


def _indented(console: rich.console.Console, text: rich.text.Text) -> None:
  console.print(
    rich.padding.Padding(text, (0, 0, 0, 2), expand=False), overflow="fold"
  )
