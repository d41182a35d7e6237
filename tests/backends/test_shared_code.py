"""Shared code of the cpu backend: equal parts of a function become one function."""

import pytest

from monotile.backends.cpu import shared_code
from monotile.backends.cpu.emit import Emitter
from monotile.backends.cpu.shared_code import scalar_type

ARGUMENTS = {"%a": "ptr", "%n": "i64"}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(shared_code, "LEAST", 4)


@pytest.mark.parametrize(
    ("instruction", "type_"),
    [
        ("add nsw i64 %a, 4", "i64"),
        ("load ptr, ptr %a, align 8", "ptr"),
        ("getelementptr float, ptr %a, i64 %n", "ptr"),
        ("getelementptr float, ptr %a, <8 x i64> %n", None),
        ("icmp slt i64 %a, %n", "i1"),
        ("fcmp olt <8 x float> %a, %n", None),
        ("select i1 %c, ptr %a, ptr %b", "ptr"),
        ("select <8 x i1> %c, <8 x float> %a, <8 x float> %b", None),
        ("sext i32 %a to i64", "i64"),
        ("bitcast i8 %few to <8 x i1>", None),
        ("uitofp <8 x i1> %a to <8 x float>", None),
        ("extractelement <8 x float> %a, i64 0", "float"),
        ("call i64 @llvm.smin.i64(i64 %a, i64 %b)", "i64"),
        ("call <8 x float> @llvm.fma.v8f32(<8 x float> %a, <8 x float> %b, <8 x float> %c)", None),
        ("phi i64 [ 0, %L1 ], [ %v2, %L2 ]", "i64"),
        ("alloca <8 x float>", "ptr"),
    ],
)
def test_the_type_of_a_result(instruction, type_):
    assert scalar_type(instruction) == type_


def sum_up(e, start, end):
    """Add the numbers from start to end in a variable, and store the sum."""

    def emit():
        total = e.var("i64", "0")
        e.loop(start, end, 1, lambda i: e.set(total, e.add(e.get(total), i)))
        e.store(e.get(total), e.element("%a", start, "i64"), "i64", 8)

    e.part(emit)


def test_equal_parts_are_one_function():
    e = Emitter(8)
    middle = e.add("%n", 3)
    sum_up(e, middle, "%n")
    sum_up(e, "%n", e.add("%n", 5))
    (function,) = e.share(ARGUMENTS, "nounwind")
    text = e.function("define void @f(ptr %a, i64 %n)")
    assert text.count("call void @part0(") == 2 and "phi" not in text
    assert function.count("phi") == 1 and function.count("alloca") == 1
    assert f"call void @part0(i64 {middle}, i64 %n, ptr %a)" in text


def test_parts_of_other_numbers_are_not():
    e = Emitter(8)
    sum_up(e, 0, "%n")
    sum_up(e, 1, "%n")
    assert e.share(ARGUMENTS, "") == []


def test_a_part_whose_register_is_read_outside_stays():
    e = Emitter(8)
    found = []

    def emit():
        found.append(e.add(e.mul("%n", "%n"), e.mul("%n", 3)))
        e.store(found[-1], "%a", "i64", 8)

    e.part(emit)
    e.part(emit)
    e.store(found[0], "%a", "i64", 8)
    assert e.share(ARGUMENTS, "") == []


def test_parts_inside_parts():
    e = Emitter(8)
    for number in (1, 2):

        def outer(number=number):
            sum_up(e, "%n", e.mul("%n", "%n"))
            e.store(str(number), "%a", "i64", 8)

        e.part(outer)
    (function,) = e.share(ARGUMENTS, "")
    text = e.function("define void @f(ptr %a, i64 %n)")
    assert text.count("call void @part0(") == 2 and "store i64 2" in text and "store i64" in function


def test_an_instruction_is_emitted_once_where_it_has_run():
    e = Emitter(8)
    first = e.add("%n", 1)
    inside = []
    e.loop(0, "%n", 1, lambda i: inside.extend([e.add("%n", 1), e.add("%n", 2)]))
    assert inside[0] == first and e.add("%n", 2) != inside[1]
    assert e.load("%a", "i64", 8) != e.load("%a", "i64", 8)
