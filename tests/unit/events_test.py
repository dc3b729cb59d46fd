"""The events of a run: written, cut back, read, refused."""

import pytest

from jaxrl_post import types
from jaxrl_post.envs import events
from jaxrl_post.envs import ledger as ledgers

ALL = (
  events.Begin("ours"),
  ledgers.Publish(0),
  events.Take(0),
  ledgers.Admit(3),
  events.Run(),
  ledgers.Block(3, 17, 0),
  ledgers.Finish(3),
  ledgers.Score(3),
  ledgers.Filter(4),
  ledgers.Fail(5),
  ledgers.Drop(6),
  ledgers.Retry(7),
  ledgers.Consume((3, 8)),
)


def written(path, *what: events.Event, keep: int = 0) -> None:
  log = events.Log(path, keep)
  for event in what:
    log.write(event)
  log.close()


def test_what_was_written_is_read(tmp_path):
  written(tmp_path / "e", *ALL)
  assert tuple(events.read(tmp_path / "e", "ours")) == ALL[1:]


def test_lines_beyond_those_kept_are_cut_off(tmp_path):
  written(tmp_path / "e", *ALL)
  written(tmp_path / "e", ledgers.Admit(9), keep=4)
  assert tuple(events.read(tmp_path / "e", "ours")) == (
    *ALL[1:4],
    ledgers.Admit(9),
  )
  log = events.Log(tmp_path / "e", 5)
  assert log.count == 5
  log.close()
  written(tmp_path / "e", ALL[0], ledgers.Admit(1))
  assert tuple(events.read(tmp_path / "e", "ours")) == (ledgers.Admit(1),)


def test_a_batch_is_on_the_disk_when_it_is_taken(tmp_path):
  log = events.Log(tmp_path / "e")
  for event in ALL:
    log.write(event)
  assert tuple(events.read(tmp_path / "e", "ours")) == ALL[1:]
  log.close()


def test_a_torn_last_line_is_left_out(tmp_path):
  written(tmp_path / "e", *ALL)
  with (tmp_path / "e").open("a") as file:
    file.write('{"event": "Adm')
  assert tuple(events.read(tmp_path / "e", "ours")) == ALL[1:]


@pytest.mark.parametrize(
  ("text", "says"),
  [
    ("", "got none"),
    ("{}\n", "line 1"),
    ('{"event": "Admit", "uid": 1}\nx\n', "line 2"),
    ('{"event": "Vanish", "uid": 1}\n', "line 1"),
    ('{"event": "Admit", "uids": [1]}\n', "line 1"),
    ("[1]\n", "line 1"),
    ('{"event": "Begin", "digest": "theirs"}\n', "with the settings"),
    ('{"event": "Run"}\n', "with the settings"),
    ('{"event": "Restore", "step": 3}\n', "restart after step 3"),
  ],
)
def test_files_of_something_else_are_refused(tmp_path, text, says):
  (tmp_path / "e").write_text(text)
  with pytest.raises(types.InputError, match=f"^stream.follow: .*{says}"):
    events.read(tmp_path / "e", "ours")


def test_a_missing_file_is_refused(tmp_path):
  with pytest.raises(types.InputError, match="^stream.follow: "):
    events.read(tmp_path / "none", "ours")
