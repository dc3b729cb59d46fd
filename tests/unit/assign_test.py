"""What a refusal of --set proposes."""

import re

import pytest

from jaxrl_post import config, types
from jaxrl_post.training import lora, trained
from tests.unit.config_test import tiny


@pytest.mark.parametrize(
  ("assignment", "meant"),
  [
    ("region.high=0.3", "algo.region.high"),
    ("filters=none", "algo.filters"),
    ("kl.coef=0.1", "algo.kl.coef"),
    ("high=0.3", "algo.region.high or algo.correction.high"),
    ("every=2", "checkpoint.every or evaluation.every"),
    ("max_lags=2", "'max_lag'"),
  ],
)
def test_a_name_that_stands_below_others_is_told_whole(assignment, meant):
  place = assignment.partition("=")[0]
  with pytest.raises(types.InputError) as error:
    config.override(tiny(), [assignment])
  head = place.partition(".")[0]
  told = f"--set {head}: Run has no field {head!r}. Did you mean {meant}?"
  assert str(error.value).startswith(told)


def test_a_setting_that_is_proposed_is_taken():
  with pytest.raises(types.InputError) as error:
    config.override(tiny(), ["optim.trained=lora"])
  made = str(error.value).partition("with the rest: ")[2]
  settings = re.findall(r"optim\.trained\.\w+=\S+(?=, | \()", made)
  assert len(settings) == 4
  for setting in settings[:3]:
    assert config.override(tiny(), [setting]).optim.trained == lora.Lora()
  only = config.override(tiny(), settings[3:]).optim.trained
  assert only == trained.Only()
