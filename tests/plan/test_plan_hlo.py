"""Compiled texts are read: loops as often as they run, collectives by kind and size, buffers with their lines."""

# ruff: noqa: E501 - lines of a compiled text are long

import pytest

from lmres.plan.buffers import biggest_buffers, bytes_moved, kept_for_backward
from lmres.plan.collectives import by_kind, collectives, first_group
from lmres.plan.hlo import Module, Shape, parse_instruction, parse_shapes

# A loop of 5 around a gather, inside a loop of 3 around an update of a slice, and a sum at the end; what a program of
# libtpu looks like, shortened.
TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/lmres/model/layers.py"
2 "/lib/python3/site-packages/optax/transform.py"

FunctionNames
1 "attend"

FileLocations
1 {file_name_id=1 function_name_id=1 line=72 end_line=72 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%inner_condition (p.1: (s32[], f32[4,256])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, f32[4,256]{1,0:T(8,128)}) parameter(0)
  %counter.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %five = s32[]{:T(128)} constant(5)
  ROOT %less.1 = pred[]{:T(512)} compare(%counter.1, %five), direction=LT
}

%inner_body (p.2: (s32[], f32[4,256])) -> (s32[], f32[4,256]) {
  %p.2 = (s32[]{:T(128)}, f32[4,256]{1,0:T(8,128)}) parameter(0)
  %counter.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %part = f32[4,256]{1,0:T(8,128)} get-tuple-element(%p.2), index=1
  %gather = f32[8,256]{1,0:T(8,128)} all-gather(%part), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %t.2 = (s32[]{:T(128)}, f32[4,256]{1,0:T(8,128)}) tuple(%counter.2, %part)
}

%outer_condition (p.3: (s32[], f32[4,256], f32[3,4,256])) -> pred[] {
  %p.3 = (s32[], f32[4,256], /*index=2*/f32[3,4,256]) parameter(0)
  %counter.3 = s32[] get-tuple-element(%p.3), index=0
  %three = s32[] constant(3)
  ROOT %less.3 = pred[] compare(%counter.3, %three), direction=LT
}

%update (a: f32[3,4,256], b: f32[4,256]) -> f32[3,4,256] {
  %a = f32[3,4,256]{2,1,0:T(8,128)} parameter(0)
  %b = f32[4,256]{1,0:T(8,128)} parameter(1)
  %row = f32[1,4,256]{2,1,0:T(8,128)} bitcast(%b)
  %zero = s32[] constant(0)
  ROOT %dus = f32[3,4,256]{2,1,0:T(8,128)} dynamic-update-slice(%a, %row, %zero, %zero, %zero)
}

%outer_body (p.4: (s32[], f32[4,256], f32[3,4,256])) -> (s32[], f32[4,256], f32[3,4,256]) {
  %p.4 = (s32[], f32[4,256]{1,0:T(8,128)}, f32[3,4,256]{2,1,0:T(8,128)}) parameter(0)
  %counter.4 = s32[] get-tuple-element(%p.4), index=0
  %x.4 = f32[4,256]{1,0:T(8,128)} get-tuple-element(%p.4), index=1
  %stack.4 = f32[3,4,256]{2,1,0:T(8,128)} get-tuple-element(%p.4), index=2
  %start = (s32[], f32[4,256]{1,0:T(8,128)}) tuple(%counter.4, %x.4)
  %loop.1 = (s32[], f32[4,256]{1,0:T(8,128)}) while(%start), condition=%inner_condition, body=%inner_body
  %kept = f32[3,4,256]{2,1,0:T(8,128)} fusion(%stack.4, %x.4), kind=kLoop, calls=%update, metadata={op_name="jit(step)/jvp(M)/while/body/keep" stack_frame_id=2}
  ROOT %t.4 = (s32[], f32[4,256]{1,0:T(8,128)}, f32[3,4,256]{2,1,0:T(8,128)}) tuple(%counter.4, %x.4, %kept)
}

%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %sum = f32[] add(%l, %r)
}

ENTRY %main (x: f32[4,256]) -> f32[4,256] {
  %x = f32[4,256]{1,0:T(8,128)} parameter(0), metadata={op_name="state[\\'params\\']"}
  %none = s32[] constant(0)
  %empty = f32[3,4,256]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %carry = (s32[], f32[4,256]{1,0:T(8,128)}, f32[3,4,256]{2,1,0:T(8,128)}) tuple(%none, %x, %empty)
  %forward = (s32[], f32[4,256]{1,0:T(8,128)}, f32[3,4,256]{2,1,0:T(8,128)}) while(%carry), condition=%outer_condition, body=%outer_body, metadata={op_name="jit(step)/jvp(M)/while" stack_frame_id=1}
  %saved = f32[3,4,256]{2,1,0:T(8,128)} get-tuple-element(%forward), index=2
  %same = f32[4,256]{1,0:T(8,128)} get-tuple-element(%forward), index=1
  %near = f32[4,256]{1,0:T(8,128)S(1)} negate(%x), metadata={op_name="jit(step)/neg"}
  %back = f32[4,256]{1,0:T(8,128)} reduce(%saved, %same), dimensions={0}, to_apply=%add, metadata={op_name="jit(step)/transpose(jvp(M))/sum" stack_frame_id=1}
  ROOT %all = f32[4,256]{1,0:T(8,128)} all-reduce(%back), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}
"""
ROW = 4 * 256 * 4  # bytes without padding; 8 rows with it
PADDED = 8 * 256 * 4


@pytest.fixture(scope="module")
def module():
    return Module(TEXT)


def test_shapes_have_sizes_and_padding():
    (shape,) = parse_shapes("bf16[1048576,16]{1,0:T(8,128)(2,1)}")
    assert shape.bytes == 2**20 * 16 * 2 and shape.padded_bytes == 2**20 * 128 * 2 and str(shape) == "bf16[1048576,16]"
    assert Shape("f32", (32, 14336, 16), "1,2,0:T(8,128)").padded_bytes == 32 * 14336 * 16 * 4
    assert Shape("s4", (3,)).bytes == 2 and Shape("f32", ()).padded_bytes == 4
    assert not Shape("f32", (4,), "0:T(1024)S(1)").in_memory
    pair = parse_shapes("(s32[], /*index=1*/f32[2,3]{1,0}, pred[4]{0})")
    assert [s.bytes for s in pair] == [4, 24, 4]


def test_instructions_are_read():
    found = parse_instruction(
        '  ROOT %a.1 = (f32[2]{0}, s32[]) fusion(%b, %c.2), kind=kLoop, calls=%f, metadata={op_name="jit(f)/g(h)"}'
    )
    assert (found.name, found.opcode, found.operands, found.root) == ("a.1", "fusion", ("b", "c.2"), True)
    assert found.called == ["f"] and found.op_name == "jit(f)/g(h)"
    assert parse_instruction("  // nothing") is None


def test_loops_count_as_often_as_they_run(module):
    assert module.runs["outer_body"] == 3 and module.runs["inner_body"] == 15 and module.unknown_loops == 0
    known = TEXT.replace("body=%inner_body", 'body=%inner_body, backend_config={"known_trip_count":{"n":"7"}}')
    assert Module(known).runs["inner_body"] == 21
    end = "%t.2 = (s32[]{:T(128)}, f32[4,256]{1,0:T(8,128)}) tuple(%counter.2, %part)"
    grown = f"  %two = s32[] constant(2)\n  %next = s32[] add(%two, %counter.2)\n  ROOT {end}"
    by_two = TEXT.replace(f"  ROOT {end}", grown.replace("tuple(%counter.2", "tuple(%next"))
    assert Module(by_two).runs["inner_body"] == 3 * 3  # unrolled: 0, 2 and 4 are below 5
    unknown = Module(TEXT.replace("constant(5)", "constant(-5)"))
    assert unknown.unknown_loops == 1 and unknown.runs["inner_body"] == 3


def test_lines_of_code_are_this_library_s(module):
    body, main = module.computations["outer_body"].instructions, module.entry.instructions
    assert module.source(main["forward"]) == "lmres/model/layers.py:72"
    assert module.source(body["kept"]) == "lmres/model/layers.py:72"  # not optax's, which was called from there
    named = parse_instruction(
        '%a = f32[2]{0} add(%b, %c), metadata={op_name="x" source_file="/a/lmres/ops/norm.py" source_line=3}'
    )
    assert module.source(named) == "lmres/ops/norm.py:3" and module.source(body["start"]) == ""


def test_collectives_are_counted_by_kind(module):
    found = collectives(module, [0] * 8)
    gather, reduce = by_kind(found) if by_kind(found)[0].kind == "all-gather" else reversed(by_kind(found))
    assert (gather.count, gather.bytes, gather.sent) == (15, 15 * 2 * ROW, 15 * ROW)  # half of the result is there
    assert (reduce.count, reduce.bytes, reduce.sent) == (1, ROW, 2 * ROW * 3 / 4)
    assert {c.group for c in found} == {2, 4} and all(c.far == 0 for c in found)
    assert {(c.devices, *map(str, c.arrays)) for c in found} == {((0, 1), "f32[8,256]"), ((0, 1, 2, 3), "f32[4,256]")}


@pytest.mark.parametrize(
    ("line", "arrays"),
    [
        ("(f32[4,256], f32[8,256]) all-gather-start(%x), dimensions={0}", ["f32[8,256]"]),
        ("f32[4,256] all-reduce-start(%x), to_apply=%add", ["f32[4,256]"]),
        ("(f32[4,256], f32[4,256]) all-reduce(%x, %same), to_apply=%add", ["f32[4,256]"] * 2),
        ("(f32[4,256], f32[4,256], u32[], u32[]) collective-permute-start(%x)", ["f32[4,256]"]),
        ("f32[2,256] reduce-scatter(%x), dimensions={0}, to_apply=%add", ["f32[4,256]"]),
    ],
)
def test_arrays_of_collectives_are_those_that_are_sent(line, arrays):
    text = TEXT.replace("  %near = ", f"  %new = {line}, replica_groups=[4,2]<=[8]\n  %near = ")
    (new,) = [c for c in collectives(Module(text), [0] * 8) if c.times == 1 and c.group == 2]
    assert [str(shape) for shape in new.arrays] == arrays


def test_what_leaves_a_host_is_told_apart(module):
    hosts = [0, 0, 1, 1, 2, 2, 3, 3]
    found = {c.kind: c for c in collectives(module, hosts)}
    assert found["all-gather"].far == 0  # groups of two, on one host
    # Two of the group's four devices are on each host: 2 n (2 - 1) / 2 must leave it, and each carries a half.
    assert found["all-reduce"].far == 2 * ROW * 0.5 / 2 * 1


def test_what_is_handed_to_other_slices_is_told_apart():
    send = '%send = (f32[4,256]{1,0}, u32[], token[]) send(%x, %none), is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
    found = collectives(Module(TEXT.replace("  %none = ", f"  {send}\n  %none = ")), [0, 0, 0, 0, 1, 1, 1, 1])
    (between,) = [row for row in by_kind(found) if row.kind == "all-reduce between slices"]
    assert (between.count, between.bytes, between.sent) == (1, ROW, ROW)  # 2 n (2 - 1) / 2
    assert [c.far for c in found if c.near == 0] == [ROW]


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", [0, 2]),
        ("replica_groups=[2,4]<=[8]", [0, 1, 2, 3]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, use_global", [0, 4]),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [0, 1, 4, 5]),
        ("source_target_pairs={{0,1},{1,5},{5,0}}", [5, 0]),
        ("replica_groups={}", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_groups_of_devices_are_read(written, group):
    assert first_group(parse_instruction(f"%a = f32[2]{{0}} all-reduce(%b), channel_id=1, {written}"), 8) == group


def test_buffers_are_listed_with_their_lines(module):
    found = biggest_buffers(module)
    first = found[0]  # the empty stack, by the name of what fills it
    assert (first.bytes, first.shape, first.count) == (3 * PADDED, "f32[3,4,256]", 1)
    assert (first.source, first.op_name) == ("lmres/model/layers.py:72", "jvp(M)/keep")
    assert {b.bytes for b in found[1:4]} == {PADDED} and "f32[8,256]" in {b.shape for b in found[1:4]}
    assert all("neg" not in b.op_name for b in found)  # not in main memory
    assert len(biggest_buffers(module, 1)) == 1


def test_what_the_backward_pass_reads_is_an_activation(module):
    assert kept_for_backward(module) == 3 * PADDED  # the stack; the row is handed on unchanged


def test_bytes_moved_count_slices_and_loops(module):
    update = 3 * (ROW + ROW)  # the row is read and written, the stack around it is not
    gather = 15 * (2 * ROW + ROW)
    ends = ROW + (3 * ROW + ROW + ROW) + (ROW + ROW)  # x for what stays near the cores; the sum; the all-reduce
    conditions = (15 + 3) * 9  # two numbers in, one bit out
    assert bytes_moved(module) == update + gather + ends + conditions + 3 * ROW  # and the stack, allocated


# A row taken from a stack by a fusion inside a fusion; and one fusion that updates a row and gives something else too.
NESTED = """HloModule nested

%take (s: f32[16,4,256], i: s32[]) -> f32[4,256] {
  %s = f32[16,4,256]{2,1,0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %slice = f32[1,4,256]{2,1,0:T(8,128)} dynamic-slice(%s, %i, %i, %i), dynamic_slice_sizes={1,4,256}
  ROOT %taken = f32[4,256]{1,0:T(8,128)} bitcast(%slice)
}

%add_row (y: f32[4,256], all: f32[16,4,256], j: s32[]) -> f32[4,256] {
  %y = f32[4,256]{1,0:T(8,128)} parameter(0)
  %all = f32[16,4,256]{2,1,0:T(8,128)} parameter(1)
  %j = s32[] parameter(2)
  %row = f32[4,256]{1,0:T(8,128)} fusion(%all, %j), kind=kLoop, calls=%take
  ROOT %plus = f32[4,256]{1,0:T(8,128)} add(%y, %row)
}

%put (t: f32[16,4,256], new: f32[4,256], k: s32[]) -> (f32[16,4,256], f32[4,256]) {
  %t = f32[16,4,256]{2,1,0:T(8,128)} parameter(0)
  %new = f32[4,256]{1,0:T(8,128)} parameter(1)
  %k = s32[] parameter(2)
  %one = f32[1,4,256]{2,1,0:T(8,128)} bitcast(%new)
  %dus = f32[16,4,256]{2,1,0:T(8,128)} dynamic-update-slice(%t, %one, %k, %k, %k)
  %minus = f32[4,256]{1,0:T(8,128)} negate(%new)
  ROOT %both = (f32[16,4,256]{2,1,0:T(8,128)}, f32[4,256]{1,0:T(8,128)}) tuple(%dus, %minus)
}

%whole (u: f32[16,4,256]) -> f32[16,4,256] {
  %u = f32[16,4,256]{2,1,0:T(8,128)} parameter(0)
  ROOT %same = f32[16,4,256]{2,1,0:T(8,128)} bitcast(%u)
}

ENTRY %main (stack: f32[16,4,256], x: f32[4,256], at: s32[]) -> f32[16,4,256] {
  %stack = f32[16,4,256]{2,1,0:T(8,128)} parameter(0)
  %x = f32[4,256]{1,0:T(8,128)} parameter(1)
  %at = s32[] parameter(2)
  %sum = f32[4,256]{1,0:T(8,128)} fusion(%x, %stack, %at), kind=kLoop, calls=%add_row
  %pair = (f32[16,4,256]{2,1,0:T(8,128)}, f32[4,256]{1,0:T(8,128)}) fusion(%stack, %sum, %at), kind=kLoop, calls=%put
  %first = f32[16,4,256]{2,1,0:T(8,128)} get-tuple-element(%pair), index=0
  ROOT %end = f32[16,4,256]{2,1,0:T(8,128)} fusion(%first), kind=kLoop, calls=%whole
}
"""


def test_bytes_moved_look_into_fusions_of_fusions_and_of_several_results():
    taken = (ROW + ROW + 4) + ROW  # x, the row and its place are read; the sum is written
    put = (ROW + 4) + (ROW + ROW)  # the row and what else there is are written
    assert bytes_moved(Module(NESTED)) == taken + put + 2 * 16 * ROW  # and all of the stack, where all is handed on


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="entry"):
        Module("HloModule nothing")
