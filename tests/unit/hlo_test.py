"""Costs read from programs as XLA writes them."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.placement import traffic
from jaxrl_post.planning import hlo

# Eight devices; a loop of three layers in one of unknown length. A layer reads
# a slice of 64 x 64 from a stack in a fusion, and gathers it along fsdp.
TEXT = """HloModule jit_f, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%fused (p0: f32[3,64,64], p1: s32[]) -> f32[64,64] {
  %p0 = f32[3,64,64]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,64,64]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), \
dynamic_slice_sizes={1,64,64}
  ROOT %flat = f32[64,64]{1,0} bitcast(%part)
}

%inner_body (s: STATE) -> STATE {
  %s = STATE parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = f32[3,64,64]{2,1,0} get-tuple-element(%s), index=1
  %x = f32[8,256]{1,0:T(8,128)S(1)} get-tuple-element(%s), index=2
  %layer = f32[64,64]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused, \
backend_config={"estimated_cycles":"1000"}
  %whole = f32[256,64]{1,0} all-gather(%layer), \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %y = f32[8,64]{1,0:T(8,128)S(1)} dot(%x, %whole), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
  ROOT %t = STATE tuple(%i, %w, %x)
}

%always (s: STATE) -> pred[] {
  %s.1 = STATE parameter(0)
  ROOT %true = pred[] constant(true)
}

%outer_body (s.2: STATE) -> STATE {
  %s.2 = STATE parameter(0)
  ROOT %in = STATE while(%s.2), condition=%always, body=%inner_body, \
backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (q: f32[3,64,64], r: f32[8,256]) -> f32[8,256] {
  %q = f32[3,64,64]{2,1,0} parameter(0)
  %r = f32[8,256]{1,0} parameter(1)
  %n = s32[] constant(0)
  %start = STATE tuple(%n, %q, %r)
  %out = STATE while(%start), condition=%always, body=%outer_body
  %z = f32[8,256]{1,0} get-tuple-element(%out), index=2
  ROOT %sum_of_all = f32[8,256]{1,0} all-reduce(%z), \
replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}
""".replace("STATE", "(s32[], f32[3,64,64]{2,1,0}, f32[8,256]{1,0})")
MESH = {"fsdp": 4, "tensor": 2}


def test_loops_count_as_often_as_they_run():
  once, five = (hlo.cost(TEXT, MESH, trips) for trips in ((), (5,)))
  layer = 2 * 8 * 256 * 64
  assert once.flops == 3 * layer and five.flops == 15 * layer
  assert five.cycles == 15_000
  # A slice is read and a layer written, gathered, and read by the product; of
  # what lies on the chip nothing counts. And the number of the layer.
  part, whole, ends = 64 * 64 * 4, 256 * 64 * 4, 2 * 8 * 256 * 4
  assert five.bytes == 15 * (3 * part + 2 * whole + 4) + ends


@pytest.mark.parametrize(
  ("first", "last", "step", "turns"),
  [(0, 6, 1, 6), (3, 16, 2, 7), (0, 16, 4, 4), (5, 6, 8, 1)],
)
def test_a_loop_that_goes_in_steps_runs_that_much_less(
  first, last, step, turns
):
  text = f"""HloModule jit_f, is_scheduled=true

%below (s: STATE) -> pred[] {{
  %s = STATE parameter(0)
  %end = u32[] constant({last})
  %at = u32[] get-tuple-element(%s), index=1
  ROOT %more = pred[] compare(%at, %end), direction=LT
}}

%body (t: STATE) -> STATE {{
  %t = STATE parameter(0)
  %x = f32[8,256]{{1,0}} get-tuple-element(%t), index=0
  %i = u32[] get-tuple-element(%t), index=1
  %by = u32[] constant({step})
  %y = f32[8,256]{{1,0}} collective-permute(%x), source_target_pairs={{{{0,1}}}}
  %next = u32[] add(%i, %by)
  ROOT %both = STATE tuple(%y, %next)
}}

ENTRY %main (q: f32[8,256]) -> STATE {{
  %q = f32[8,256]{{1,0}} parameter(0)
  %from = u32[] constant({first})
  %start = STATE tuple(%q, %from)
  ROOT %out = STATE while(%start), condition=%below, body=%body
}}
""".replace("STATE", "(f32[8,256]{1,0}, u32[])")
  assert hlo.cost(text, {"x": 2}).collectives == {
    ("collective-permute", "x"): (turns, turns * 8 * 256 * 4 / 2)
  }


def test_collectives_are_named_by_the_axes_that_talk():
  found = hlo.cost(TEXT, MESH, (5,)).collectives
  gathered = 256 * 64 * 4 * 3 / 4
  assert found == {
    ("all-gather", "fsdp"): (15, 15 * gathered),
    ("all-reduce", "fsdp x tensor"): (1, 8 * 256 * 4 * 2 * 7 / 8),
  }


@pytest.mark.parametrize(
  ("kept", "kind", "times"),
  [("f32[8,64]", "reduce-scatter", 1), ("f32[8,256]", "all-reduce", 2)],
)
def test_a_sum_of_which_each_keeps_a_part_is_scattered(kept, kind, times):
  text = f"""HloModule jit_f, is_scheduled=true

%all-reduce-scatter (p: f32[8,256]) -> {kept} {{
  %p = f32[8,256]{{1,0}} parameter(0)
  %all = f32[8,256]{{1,0}} all-reduce(%p), replica_groups=[2,4]<=[4,2]T(1,0)
  %at = s32[] constant(0)
  ROOT %part = {kept}{{1,0}} dynamic-slice(%all, %at, %at)
}}

ENTRY %main (q: f32[8,256]) -> {kept} {{
  %q = f32[8,256]{{1,0}} parameter(0)
  ROOT %f = {kept}{{1,0}} fusion(%q), kind=kCustom, calls=%all-reduce-scatter
}}
"""
  sent = times * 8 * 256 * 4 * 3 / 4
  assert hlo.cost(text, MESH).collectives == {(kind, "fsdp"): (1, sent)}


@pytest.mark.parametrize(
  ("groups", "talk", "axes"),
  [
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", (0, 1), "tensor"),
    ("replica_groups=[4,2]<=[8]", (0, 1), "tensor"),
    ("replica_groups=[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6), "fsdp"),
    ("replica_groups=[1,8]<=[8]", tuple(range(8)), "fsdp x tensor"),
    (
      "replica_groups=mesh['a'=4,'b'=2] {'a'}",
      (0, 2, 4, 6),
      "fsdp",
    ),
    ("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}", (0, 2), "fsdp"),
    ("channel_id=1", tuple(range(8)), "fsdp x tensor"),
  ],
)
def test_groups_are_read_in_all_their_spellings(groups, talk, axes):
  line = f"  %x = f32[16]{{0}} all-gather(%y), {groups}, dimensions={{0}}"
  found = traffic.collective(line, 8)
  assert found is not None and found.talk == (talk,)
  assert found.received == 64 * 8 * (len(talk) - 1) // len(talk)
  assert hlo.axes(found.talk, MESH) == axes


def test_a_permute_talks_along_the_axes_of_its_pairs():
  pairs = "source_target_pairs={{0,2},{2,0},{1,1}}"
  line = f"  %x = f32[16]{{0}} collective-permute(%y), {pairs}"
  found = traffic.collective(line, 8)
  assert found is not None
  assert found == ("collective-permute", ((0, 2), (2, 0)), 128)
  assert hlo.axes(found.talk, MESH) == "fsdp"
  assert hlo.axes([(3, 3)], MESH) == "none"


@pytest.mark.parametrize(
  ("line", "flops"),
  [
    # A product of [8, 32] and [32, 16].
    ("window={} dim_labels=bf_io->bf", 2 * 8 * 32 * 16),
    # A batch of 4 of them, as TPUs' compiler writes it.
    (
      "window={size=4 stride=3 pad=0_0 lhs_dilate=4} dim_labels=0bf_0io->0bf",
      4 * 2 * 8 * 32 * 16,
    ),
    # A window of 3 at both ends meets 2 inputs, and 3 in between.
    (
      "window={size=3 pad=1_1} dim_labels=0bf_0io->0bf",
      (2 + 3 + 3 + 2) * 2 * 8 * 32 * 16,
    ),
  ],
)
def test_products_written_as_convolutions_count_what_meets(line, flops):
  batched = "0" in line.rpartition("dim_labels=")[2]
  size = "4," if batched else ""
  window = "3," if "size=3" in line else size
  text = (
    "HloModule m\n\n"
    "ENTRY %main (a: f32[8], b: f32[8]) -> f32[8] {\n"
    f"  %a = f32[{size}8,32]{{1,0}} parameter(0)\n"
    f"  %b = f32[{window}32,16]{{1,0}} parameter(1)\n"
    f"  ROOT %c = f32[{size}8,16]{{1,0}} convolution(%a, %b), {line}\n"
    "}\n"
  )
  assert hlo.cost(text, {"x": 1}).flops == flops


def test_a_real_program_costs_what_its_products_do():
  def layers(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  w, x = jnp.ones((6, 64, 64)), jnp.ones((32, 64))
  text = jax.jit(layers).lower(x, w).compile().as_text()
  assert text is not None
  found = hlo.cost(text, {"x": 1})
  assert found.flops == 6 * 2 * 32 * 64 * 64
  # At least the weights, once.
  assert 6 * 64 * 64 * 4 <= found.bytes < 20 * 6 * 64 * 64 * 4
  assert found.collectives == {} and found.cycles == 0
