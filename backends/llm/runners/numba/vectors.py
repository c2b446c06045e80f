"""Vectors of 16 lanes for kernels that numba's own loops cannot express: LLVM's instructions, written down.

A kernel is a numba intrinsic whose body is built with `Code`, a thin layer over llvmlite's builder. All pointers are
plain addresses (int64), so that one compiled kernel serves every shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backends.llm.runners.numba.compiling import has_features
from backends.llm.runners.numba.packing import LANES

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)
ZERO_INTS = ir.Constant(INTS, [0] * LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BFLOATS, HALF_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES), ir.VectorType(_BFloat(), LANES)
# Whether the processor multiplies bfloat16 itself (Cooper Lake, Sapphire Rapids, Zen 4 and later).
HAS_BFLOAT = has_features("avx512bf16")


def constant(number: int) -> Any:
    """Returns an int64 of a kernel."""
    return ir.Constant(I64, number)


def pointer_to(kind: Any) -> Any:
    """Returns a numba intrinsic that makes an int64 address a pointer, for `carray`."""
    pointer = types.CPointer(kind)

    @intrinsic  # type: ignore[untyped-decorator]
    def at(context: Any, address: Any) -> Any:
        return pointer(types.int64), lambda c, b, s, a: b.inttoptr(a[0], c.get_value_type(pointer))

    return at


def kernel(num_arguments: int) -> Callable[[Callable[..., None]], Any]:
    """Makes a numba intrinsic of a function that writes a kernel; it gets a `Code` and so many int64 values."""

    def decorate(write: Callable[..., None]) -> Any:
        def typed(context: Any, *arguments: Any) -> Any:
            def codegen(target: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                write(Code(builder), *values)
                return target.get_dummy_value()

            return types.void(*[types.int64] * num_arguments), codegen

        names = ", ".join(f"a{i}" for i in range(num_arguments))
        # numba reads the number of arguments from the function's signature.
        scope: dict[str, Any] = {"typed": typed}
        exec(f"def {write.__name__}(context, {names}): return typed(context, {names})", scope)
        return intrinsic(scope[write.__name__])

    return decorate


@intrinsic  # type: ignore[untyped-decorator]
def uncounted(context: Any, record: Any) -> Any:
    """Returns a tuple of arrays without the counts of their references: threads that share them would fight for these.

    Whoever calls compiled code holds the arrays; what is made of them there lives no longer.
    """

    def codegen(target: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        found = values[0]
        for index, kind in enumerate(record.types):
            if isinstance(kind, types.Array):
                array = target.make_array(kind)(target, builder, builder.extract_value(found, index))
                array.meminfo = cgutils.get_null_value(array.meminfo.type)
                array.parent = cgutils.get_null_value(array.parent.type)
                found = builder.insert_value(found, array._getvalue(), index)
        return found

    return record(record), codegen


class Code:
    """Writes one kernel."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def at(self, address: Any, offset: Any = 0) -> Any:
        """Returns an address moved by bytes."""
        return address if isinstance(offset, int) and not offset else self.b.add(address, _value(offset))

    def times(self, value: Any, factor: Any) -> Any:
        return self.b.mul(value, _value(factor))

    def load(self, kind: ir.Type, address: Any, align: int = 4) -> Any:
        found = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        found.align = align
        return found

    def store(self, vector: Any, address: Any, align: int = 4) -> None:
        self.b.store(vector, self.b.inttoptr(address, vector.type.as_pointer())).align = align

    def splat(self, scalar: Any) -> Any:
        nothing = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        first = self.b.insert_element(nothing, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, nothing, ir.Constant(INTS, [0] * LANES))

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """Returns x * y + z, rounded once."""
        return self.b.call(self._function("llvm.fma.v16f32", FLOATS, FLOATS, FLOATS, FLOATS), [x, y, z])

    def dot_bytes(self, total: Any, unsigned: Any, signed: Any) -> Any:
        """Returns total + the products of four bytes each, summed in a lane of 32 bits (VPDPBUSD)."""
        function = self._function("llvm.x86.avx512.vpdpbusd.512", INTS, INTS, INTS, INTS)
        return self.b.call(function, [total, unsigned, signed])

    def exponential(self, x: Any) -> Any:
        """Returns e ** x to about one unit in the last place (Cephes' expf); what is below -87 counts as -87."""
        b = self.b
        low, high = _floats(-87.0), _floats(88.0)
        x = b.select(b.fcmp_ordered("<", x, low), low, x)  # what is no number stays none
        x = b.select(b.fcmp_ordered(">", x, high), high, x)
        whole = b.call(self._function("llvm.rint.v16f32", FLOATS, FLOATS), [b.fmul(x, _floats(1.4426950408889634))])
        r = self.multiply_add(whole, _floats(-0.693359375), x)
        r = self.multiply_add(whole, _floats(2.12194440e-4), r)
        p = _floats(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.multiply_add(p, r, _floats(factor))
        p = b.fadd(self.multiply_add(p, b.fmul(r, r), r), _floats(1.0))
        power = b.shl(b.add(b.fptosi(whole, INTS), _ints(127)), _ints(23))
        return b.fmul(p, b.bitcast(power, FLOATS))

    def weight(self, x: Any) -> Any:
        """Returns e ** x, for x up to 0, as exact as `store_numbers` keeps it: to 4e-5 where that is bfloat16."""
        if not HAS_BFLOAT:
            return self.exponential(x)
        b = self.b
        x = b.select(b.fcmp_ordered("<", x, _floats(-87.0)), _floats(-87.0), x)
        turns = b.fmul(x, _floats(1.4426950408889634))
        whole = b.call(self._function("llvm.rint.v16f32", FLOATS, FLOATS), [turns])
        r = b.fmul(b.fsub(turns, whole), _floats(0.6931471805599453))
        p = _floats(1 / 24)
        for factor in (1 / 6, 0.5, 1.0, 1.0):
            p = self.multiply_add(p, r, _floats(factor))
        power = b.shl(b.add(b.fptosi(whole, INTS), _ints(127)), _ints(23))
        return b.fmul(p, b.bitcast(power, FLOATS))

    def lanes(self, first: Any) -> Any:
        """Returns first, first + 1, ...: int32, of an int64."""
        numbers = ir.Constant(INTS, list(range(LANES)))
        return self.b.add(self.splat(self.b.trunc(first, I32)), numbers)

    def folded(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Returns the lanes combined, half with half, in a fixed order."""
        b, width = self.b, LANES
        while width > 1:
            width //= 2
            picked = ir.Constant(INTS, [(lane + width) % LANES for lane in range(LANES)])
            vector = combine(vector, b.shuffle_vector(vector, vector, picked))
        return b.extract_element(vector, ir.Constant(I32, 0))

    def larger(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def pairs(self, address: Any) -> Any:
        """Loads 16 pairs of bfloat16, prepared for `dot_pairs`."""
        pairs = self.load(INTS, address, 64)
        if HAS_BFLOAT:
            return self.b.bitcast(pairs, BFLOATS)
        low, high = self.b.shl(pairs, _ints(16)), self.b.and_(pairs, _ints(0xFFFF0000 - (1 << 32)))
        return self.b.bitcast(low, FLOATS), self.b.bitcast(high, FLOATS)

    def dot_pairs(self, total: Any, pairs: Any, address: Any) -> Any:
        """Returns total + each lane's pair times the pair of numbers at an address: bfloat16 or float32, see PAIR."""
        if HAS_BFLOAT:
            numbers = self.b.bitcast(self.splat(self.load(I32, address)), BFLOATS)
            function = self._function("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, FLOATS, BFLOATS, BFLOATS)
            return self.b.call(function, [total, pairs, numbers])
        for half in range(2):
            number = self.splat(self.load(F32, self.at(address, 4 * half)))
            total = self.multiply_add(pairs[half], number, total)
        return total

    def store_numbers(self, vector: Any, address: Any) -> None:
        """Stores 16 numbers as `dot_pairs` reads them."""
        if HAS_BFLOAT:
            function = self._function("llvm.x86.avx512bf16.cvtneps2bf16.512", HALF_BFLOATS, FLOATS)
            vector = self.b.call(function, [vector])
        self.store(vector, address)

    def loop(self, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Writes a loop that runs once at least.

        Args:
            count: int64.
            carried: values that the body gets, and returns anew.
            body: (index, carried) -> carried.
        """
        b, before = self.b, self.b.block
        inside = b.append_basic_block("loop")
        after = b.append_basic_block("after")
        b.branch(inside)
        b.position_at_end(inside)
        index = b.phi(I64)
        phis = [b.phi(value.type) for value in carried]
        for phi, value in zip([index, *phis], [constant(0), *carried], strict=True):
            phi.add_incoming(value, before)
        results = body(index, list(phis))
        following = b.add(index, constant(1))
        end = b.block
        for phi, value in zip([index, *phis], [following, *results], strict=True):
            phi.add_incoming(value, end)
        b.cbranch(b.icmp_signed("<", following, count), inside, after)
        b.position_at_end(after)
        return results

    def _function(self, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, arguments), name)


def _floats(number: float) -> Any:
    return ir.Constant(FLOATS, [float(np.float32(number))] * LANES)


def _ints(number: int) -> Any:
    return ir.Constant(INTS, [number] * LANES)


def _value(number: Any) -> Any:
    return constant(number) if isinstance(number, int) else number
