"""gdelta from Python through ctypes. Structs, constants and functions are read from the headers themselves, so that
they cannot disagree with the library's; names lose their prefix.

    lib = gdelta.load("/opt/gdelta/lib/libgdelta.so", "/opt/gdelta/include")
    problem = lib.problem(batch=1, tokens=64, ..., dtype=lib.DTYPE_FP32)    # struct_size is filled in
    lib.reference_forward(problem, lib.forward_args(...))                   # raises gdelta.Error with the sentence

Needs nothing but Python 3.8 and Linux. Device pointers are integers, such as torch's data_ptr().
"""

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace


class Error(RuntimeError):
    """A call's sentence: which argument, its value and the rule."""


def load(library, include):
    """The library at a path, described by gdelta/gdelta.h and gdelta/reference.h in the folder `include`."""
    text = "".join(Path(include, "gdelta", name).read_text() for name in ("gdelta.h", "reference.h"))
    text = re.sub(r"/\*.*?\*/|^#[^\n]*", "", text, flags=re.S | re.M)
    types = {"double": ctypes.c_double, "size_t": ctypes.c_size_t}
    types.update({name + "_t": getattr(ctypes, "c_" + name) for name in "uint8 int32 uint32 int64 uint64".split()})
    dll, lib = ctypes.CDLL(str(library)), SimpleNamespace(structs={})

    for name, value in re.findall(r"\bGDELTA_(\w+) = (\d+)", text):
        setattr(lib, name, int(value))

    def type_of(words, stars):
        if stars:
            return ctypes.c_char_p if "char" in words else ctypes.c_void_p
        return types[words.replace("const", "").strip()]

    def fields(body):
        for declaration in filter(None, map(str.strip, body.split(";"))):
            words, names = re.match(r"((?:const )?\w+)\s+(.*)", declaration, re.S).groups()
            for star, name, count in re.findall(r"(\**)(\w+)(?:\[(\d+)\])?", names):
                kind = type_of(words, star)
                yield name, kind * int(count) if count else kind

    def struct(name, body):
        def init(self, **values):
            if hasattr(type(self), "struct_size"):
                values.setdefault("struct_size", ctypes.sizeof(self))
            ctypes.Structure.__init__(self, **values)

        return type(name, (ctypes.Structure,), {"_fields_": list(fields(body)), "__init__": init})

    declarations = r"typedef (?:struct (\w+) \{(.*?)\} \w+|(\w+) (gdelta_\w+)|struct \w+ (?:\*(\w+)|\w+));"
    for name, body, base, alias, handle in re.findall(declarations, text, re.S):
        if body:
            lib.structs[name] = types[name] = struct(name, body)
            setattr(lib, name[len("gdelta_") :], types[name])
        elif alias or handle:
            types[alias or handle] = types[base] if alias else ctypes.c_void_p

    def check(status):
        if status:
            raise Error(dll.gdelta_last_error().decode())

    for result, stars, name, arguments in re.findall(r"GDELTA_API ([\w ]+?) ?(\**)(gdelta_\w+)\((.*?)\);", text, re.S):
        function = getattr(dll, name)
        function.restype = check if result == "gdelta_status" else None if result == "void" else type_of(result, stars)
        pairs = [re.match(r"\s*((?:const )?\w+)\s*(\**)", one).groups() for one in arguments.split(",")]
        # A pointer to one of our structs takes the struct; any other, an address or byref().
        function.argtypes = [
            ctypes.POINTER(lib.structs[words.split()[-1]]) if stars and words.split()[-1] in lib.structs
            else type_of(words, stars) for words, stars in pairs if words != "void"
        ]
        setattr(lib, name[len("gdelta_") :], function)
    return lib
