"""A file of costs, read back and refused."""

import json

import pytest

from jaxrl_post import types
from jaxrl_post.planning import costs as costs_lib


def changed(tmp_path, place, **values):
  """Writes a file of costs with some fields changed."""
  path = tmp_path / "costs.json"
  costs = costs_lib.Costs(column_s=0.25, update_s=1.0, lengths=(8,))
  costs_lib.write(path, costs_lib.Setting(), costs)
  tree = json.loads(path.read_text())
  tree[place] |= values
  path.write_text(json.dumps(tree))
  return path


@pytest.mark.parametrize(
  ("place", "values", "words"),
  [
    ("costs", {"column_s": -1}, "costs.column_s: expected seconds"),
    ("costs", {"column_s": "1"}, "costs.column_s: expected a number, got '1'"),
    ("costs", {"column_s": True}, "expected a number, got True"),
    ("costs", {"column_s": 0}, "costs.column_s + row_s: expected more than 0"),
    ("costs", {"update_s": float("nan")}, "costs.update_s: expected seconds"),
    ("costs", {"lengths": []}, "costs.lengths: expected at least one"),
    ("costs", {"lengths": [0]}, "costs.lengths"),
    ("costs", {"lengths": [1.5]}, "a list of whole numbers"),
    ("costs", {"efficiency": 0}, "costs.efficiency"),
    ("costs", {"left": 1}, "costs.left: expected a share in [0, 1)"),
    ("costs", {"colour": 1}, "got 'colour'"),
    ("costs", {"column_s": None}, "expected a number, got None"),
    ("setting", {"rows": 0}, "setting.rows: expected a number from 1 on"),
    ("setting", {"rows": 1e6}, "setting.rows: expected a whole number"),
    ("setting", {"mode": "both"}, "setting.mode: expected one of colocated"),
    ("setting", {"max_lag": -1}, "setting.max_lag"),
  ],
)
def test_a_wrong_file_of_costs_is_one_line(place, values, words, tmp_path):
  with pytest.raises(types.InputError) as error:
    costs_lib.read(changed(tmp_path, place, **values))
  assert words in str(error.value) and "\n" not in str(error.value)
