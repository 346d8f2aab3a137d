"""Cases and their inputs. The h200 suite is read from bench/cases.c; floors are counted as there."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

K = V = 128


@dataclass(frozen=True)
class Case:
    operation: str  # forward, backward, step
    hq: int
    hv: int
    lengths: tuple
    gate: str = "mild"  # mild: logsigmoid(N(0,1)) / 16; weak: -1e-3 U(0,1)
    state: torch.dtype = torch.float32
    norm: bool = True  # q and k arrive raw and are normalised within the call; else normalised before

    @property
    def step(self):
        return self.operation == "step"

    @property
    def rows(self):
        return sum(self.lengths)

    @property
    def sequences(self):
        return f"{len(self.lengths)} x {self.lengths[0]}" if len(set(self.lengths)) == 1 else (
            f"{len(self.lengths)} ragged, {self.rows}")

    @property
    def bytes(self):
        """The fewest: each input read once, each output written once."""
        qkv = self.rows * 2 * (2 * self.hq * K + self.hv * V)
        o, gates = self.rows * 2 * self.hv * V, self.rows * self.hv * 2 * 4
        states = len(self.lengths) * self.hv * K * V * self.state.itemsize
        return 2 * qkv + o + 2 * gates + 3 * states if self.operation == "backward" else qkv + o + gates + 2 * states

    @property
    def floor(self):
        """Microseconds at 803 TFLOP/s and 4.24 TB/s, whichever is more: an H200, see bench/cases.h."""
        rows = self.rows * self.hv
        flops = {"forward": rows / 64 * 10.5e6, "backward": rows / 64 * 33e6, "step": rows * 6 * K * V}[self.operation]
        return 1e6 * max(flops / 803e12, self.bytes / 4.24e12)


def h200(operation, **words):
    text = (Path(__file__).parents[1] / "cases.c").read_text()
    rows = re.search(r"table_row h200\[\] = \{(.*?)^\};", text, re.S | re.M).group(1)
    for name, hq, hv, lengths in re.findall(r'GDELTA_OPERATION_(\w+), (\d+), (\d+), "([\dx,]+)"', rows):
        if name.lower() == operation:
            count, _, length = lengths.partition("x")
            each = (int(length),) * int(count) if length else tuple(map(int, lengths.split(",")))
            yield Case(operation, int(hq), int(hv), each, **words)


def decode():
    for state in (torch.float32, torch.bfloat16):
        for hv in (32, 64):
            for batch in (1, 8, 32, 128, 512):
                yield Case("step", 16, hv, (1,) * batch, state=state)


def inputs(case, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)

    ragged = len(set(case.lengths)) > 1
    outer = (1, case.rows) if ragged else (len(case.lengths), case.lengths[0])
    q, k, v = normal(*outer, case.hq, K), normal(*outer, case.hq, K), normal(*outer, case.hv, V)
    x = SimpleNamespace(q=q, k=k, v=v, cu=None)
    if not case.norm:
        x.q, x.k = (torch.nn.functional.normalize(y.float(), dim=-1).bfloat16() for y in (x.q, x.k))
    x.s0 = (0.1 * normal(len(case.lengths), case.hv, K, V, dtype=torch.float32)).to(case.state)
    if ragged:
        starts = torch.tensor((0,) + case.lengths).cumsum(0)
        x.cu = starts.to(torch.int32).cuda()
    if case.step:  # as the models have it: a and b of a projection, in bf16; states in a pool, for who takes one
        x.slots = torch.arange(len(case.lengths), dtype=torch.int32, device="cuda")
        x.a, x.b = normal(*outer, case.hv), normal(*outer, case.hv)
        x.a_log, x.dt_bias = normal(case.hv, dtype=torch.float32).abs(), normal(case.hv, dtype=torch.float32)
        x.g = -x.a_log.exp() * torch.nn.functional.softplus(x.a.float() + x.dt_bias)
        x.beta = x.b.float().sigmoid()
        return x
    x.beta = normal(*outer, case.hv, dtype=torch.float32).sigmoid()
    if case.gate == "weak":
        x.g = -1e-3 * torch.rand(*outer, case.hv, device="cuda", generator=generator)
    else:
        x.g = torch.nn.functional.logsigmoid(normal(*outer, case.hv, dtype=torch.float32)) / 16
    if case.operation == "backward":
        x.d_o, x.d_s = normal(*outer, case.hv, V), normal(*x.s0.shape, dtype=torch.float32)
    return x
