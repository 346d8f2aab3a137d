#!/usr/bin/env python3
"""check_layouts.py LIBRARY INCLUDE: prints a C file that compiles only if ctypes lays every struct out as C does, and
runs one call of the CPU reference through ctypes."""

import ctypes
import math
import sys

import gdelta

lib = gdelta.load(*sys.argv[1:])
print("#include <gdelta/gdelta.h>")
for name, struct in lib.structs.items():
    print(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}");')
    for field, *_ in struct._fields_:
        at = getattr(struct, field)
        same = f"offsetof({name}, {field}) == {at.offset} && sizeof((({name} *)0)->{field}) == {at.size}"
        print(f'_Static_assert({same}, "{name}.{field}");')

ones, out = (ctypes.c_float * 2)(1, 1), (ctypes.c_float * 2)()
one, to = (lib.tensor(data=ctypes.addressof(x)) for x in (ones, out))
problem = lib.problem(batch=1, tokens=1, heads_q=1, heads_k=1, heads_v=1, dim_k=2, dim_v=2, dtype=lib.DTYPE_FP32)
lib.reference_forward(problem, lib.forward_args(q=one, k=one, v=one, o=to))
assert all(math.isclose(x, math.sqrt(2), rel_tol=1e-6) for x in out), list(out)
try:
    lib.reference_forward(problem, lib.forward_args(k=one, v=one, o=to))
except gdelta.Error as sentence:
    assert "q.data" in str(sentence), sentence
else:
    raise AssertionError("a call without q was accepted")
