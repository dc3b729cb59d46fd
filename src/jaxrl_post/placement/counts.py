"""How many devices each side of a placement gets, from numbers alone.

Sizes map a mesh axis to its size, -1 is "the rest".
"""

import math
from collections.abc import Mapping

from jaxrl_post import types

Sizes = Mapping[str, int]


def product(sizes: Sizes) -> int:
  """Returns the devices that the written sizes ask for, the rest left out."""
  return math.prod(n for n in sizes.values() if n != -1)


def resolve(place: str, sizes: Sizes, devices: int) -> dict[str, int]:
  """Fills in the rest.

  Args:
    place: the setting, for the message.
    sizes: of each axis.
    devices: how many there are, at least one.

  Returns:
    Sizes without -1 whose product is `devices`.

  Raises:
    InputError: the sizes do not fit; names both numbers.
  """
  written = product(sizes)
  if -1 in sizes.values():
    _check_divides(place, sizes, devices)
  elif written != devices:
    raise types.InputError(
      f"{place}: expected axes whose product is the {devices} devices, got a "
      f"product of {written}. Change the axes or the devices."
    )
  rest = devices // written
  return {name: rest if n == -1 else n for name, n in sizes.items()}


def together(training: Sizes, generation: Sizes, count: int) -> int:
  """Returns how many devices do both, one side after the other.

  Raises:
    InputError: the sides differ, or do not fit; names both numbers.
  """
  train, generate = _fixed(training), _fixed(generation)
  if train and generate and train != generate:
    raise types.InputError(
      "placement: expected equally many devices in both meshes when "
      f"colocated, got {train} to train and {generate} to generate. Change "
      "one of them, or use mode split."
    )
  used = train or generate or count
  _check_room("placement", used, count)
  return used


def apart(
  training: Sizes,
  generation: Sizes,
  count: int,
  fraction: float,
  processes: int,
) -> tuple[int, int]:
  """Returns how many devices train and how many others generate.

  Args:
    training: axes of the training mesh.
    generation: axes of the generation mesh.
    count: devices there are, a multiple of `processes`.
    fraction: part that generates; read only if both sides have a rest.
    processes: how many processes the devices belong to, equally many each.

  Returns:
    Two numbers, both at least 1, that add up to `count` at most.

  Raises:
    InputError: they do not fit; names both numbers.
  """
  place = "placement (mode split)"
  _check_room(place, product(training) + product(generation), count)
  if count < 2 * processes:
    raise types.InputError(
      f"{place}: expected at least 2 devices in each of {processes} processes, "
      f"got {count} in all. Use mode colocated, or more devices."
    )
  train, generate = _fixed(training), _fixed(generation)
  if train is None and generate is None:
    each = count // processes
    wanted = round(fraction * each)
    generate = min(max(wanted, 1), each - 1) * processes
  if generate is None:
    generate = count - (train or 0)
  if train is None:
    train = count - generate
  return train, generate


def check_listed(numbers: tuple[int, ...], count: int) -> None:
  """Refuses a list of devices that are not there.

  Args:
    numbers: indices into the run's devices, at least one.
    count: devices there are.

  Raises:
    InputError: names both numbers.
  """
  if max(numbers) >= count:
    raise types.InputError(
      "placement.training_devices and generation_devices: expected indices "
      f"below the {count} devices there are, got {max(numbers)}. Correct the "
      "lists, or use more devices."
    )


def check_processes(place: str, devices: int, processes: int) -> None:
  """Refuses devices that are not equally many in each process."""
  if devices % processes:
    raise types.InputError(
      f"{place}: expected a number of devices that {processes} processes "
      f"divide, got {devices}. Change the axes, the fraction or the processes."
    )


def _check_divides(place: str, sizes: Sizes, devices: int) -> None:
  written = product(sizes)
  if devices % written:
    raise types.InputError(
      f"{place}: expected a number of devices that its written axes, together "
      f"{written}, divide, got {devices}. Change the axes or the share."
    )


def _fixed(sizes: Sizes) -> int | None:
  """Returns the devices the axes ask for; None if one of them is the rest."""
  return None if -1 in sizes.values() else product(sizes)


def _check_room(place: str, needed: int, count: int) -> None:
  if needed > count:
    raise types.InputError(
      f"{place}: expected axes for at most {count} devices, got axes that need "
      f"{needed}. Use smaller axes or more devices."
    )
