"""What compare.py times: for gdelta and each peer, a class that turns a case and its inputs into a call on preallocated
or graph-captured memory. A call enqueues one operation and returns its outputs by name: o, s (states, [N, HV, K, V]),
or gradients. A peer that cannot do a case raises Refused with the reason; one that is not installed raises ImportError
when it is made.

Each peer gets the same numbers in its own conventions, made before the clock starts: FlashInfer takes decays instead of
log gates and states as [V, K]. All write outputs and final states and read initial ones."""

import ctypes
import importlib.metadata
import os
import sys
from pathlib import Path

import torch

os.environ["FLA_FLASH_QLA"] = "0"  # FLA hands its calls to FlashQLA where that is installed
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


class Refused(Exception):
    pass


def packed(x):
    return x.flatten(0, 1)


class Gdelta:
    def __init__(self, engine="AUTO"):
        import gdelta_torch

        self.api, self.lib = gdelta_torch, gdelta_torch.lib
        self.engine = getattr(self.lib, "ENGINE_" + engine)
        number = self.lib.version()
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def prepare(self, case, x):
        if self.engine and case.operation != "backward":
            raise Refused("is what gdelta is")
        lib, tensor, state = self.lib, self.api.tensor, self.api.state
        words = self.api.problem(x.q, x.k, x.v, x.a if case.step else x.g, x.b if case.step else x.beta, case.norm,
                                 self.engine)
        words.update(state_dtype=self.api.DTYPES[x.s0.dtype])
        if x.cu is not None:
            words.update(batch=0, tokens=max(case.lengths), sequences=len(case.lengths), total_tokens=case.rows,
                         layout=lib.LAYOUT_THD)
            tensor = self.packed_tensor
        if case.step:
            words.update(gate=lib.GATE_SOFTPLUS, beta=lib.BETA_SIGMOID)
            out = dict(o=torch.empty_like(x.v), s=x.s0.clone())  # in place
            args = lib.step_args(q=tensor(x.q), k=tensor(x.k), v=tensor(x.v), g=tensor(x.a), beta=tensor(x.b),
                                 a_log=vector(lib, x.a_log), dt_bias=vector(lib, x.dt_bias), o=tensor(out["o"]),
                                 state=state(out["s"]))
            args.state.slots, args.state.slot_count = lib.index(data=x.slots.data_ptr()), len(case.lengths)
            run, operation = lib.step, lib.OPERATION_STEP
        else:
            inputs = dict(q=tensor(x.q), k=tensor(x.k), v=tensor(x.v), g=tensor(x.g), beta=tensor(x.beta),
                          initial_state=state(x.s0))
            if x.cu is not None:
                inputs.update(cu_seqlens=lib.index(data=x.cu.data_ptr()))
            out = dict(o=torch.empty_like(x.v), s=torch.empty_like(x.s0))
            args = lib.forward_args(o=tensor(out["o"]), final_state=state(out["s"]), **inputs)
            run, operation = lib.forward, lib.OPERATION_FORWARD
        if case.operation == "backward":
            words.update(save_mode=lib.SAVE_STATES)
        plan = self.api.plan(tuple(words.items()))
        if case.operation == "backward":
            size = ctypes.c_size_t()
            lib.plan_saved_size(plan, ctypes.byref(size))
            saved = torch.empty(size.value, dtype=torch.uint8, device="cuda") if size.value else None
            if saved is not None:
                args.saved, args.saved_bytes = saved.data_ptr(), size.value
            self.enqueue(lib.forward, lib.OPERATION_FORWARD, plan, args)()
            of = dict(dq=x.q, dk=x.k, dv=x.v, dg=x.g, dbeta=x.beta)
            out = {name: torch.empty_like(y) for name, y in of.items()}
            grads = {name: tensor(y) for name, y in out.items()}
            out["ds"] = torch.empty_like(x.s0)
            args = lib.backward_args(d_o=tensor(x.d_o), d_final_state=self.api.tensor(x.d_s), saved=args.saved,
                                     saved_bytes=args.saved_bytes, d_initial_state=self.api.tensor(out["ds"]),
                                     **inputs, **grads)
            run, operation = lib.backward, lib.OPERATION_BACKWARD
            out["keep"] = saved
        enqueue = self.enqueue(run, operation, plan, args)

        def call():
            enqueue()
            return out

        return call

    def packed_tensor(self, y):
        made = self.api.tensor(y)
        made.stride[0] = 0  # [1, rows, heads, ...]
        return made

    def enqueue(self, run, operation, plan, args):
        size = ctypes.c_size_t()
        self.lib.plan_workspace_size(plan, operation, ctypes.byref(size))
        scratch = torch.empty(size.value, dtype=torch.uint8, device="cuda")
        return lambda: run(plan, args, scratch.data_ptr(), size.value, torch.cuda.current_stream().cuda_stream)


def vector(lib, x):
    return lib.tensor(data=x.data_ptr(), dtype=lib.DTYPE_FP32)


class Autograd:
    """FLA's and FlashQLA's way: one function for whole sequences, whose backward is autograd's."""

    def prepare(self, case, x):
        if case.step:
            return self.step(case, x)
        leaves = [y.detach().requires_grad_(case.operation == "backward") for y in (x.q, x.k, x.v, x.g, x.beta, x.s0)]
        words = dict(output_final_state=True, use_qk_l2norm_in_kernel=case.norm, cu_seqlens=x.cu)

        def forward():
            o, s = self.chunk(*leaves[:5], initial_state=leaves[5], **words)
            return dict(o=o, s=s)

        if case.operation == "forward":
            return forward
        out = forward()
        names = ("dq", "dk", "dv", "dg", "dbeta", "ds")
        return lambda: dict(zip(names, torch.autograd.grad([out["o"], out["s"]], leaves, [x.d_o, x.d_s],
                                                           retain_graph=True)))


class Fla(Autograd):
    def __init__(self):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

        self.chunk, self.recurrent = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        self.version = importlib.metadata.version("fla-core")

    def step(self, case, x):
        if x.s0.dtype != torch.float32:
            raise Refused("writes states in fp32 only")

        def call():
            o, s = self.recurrent(x.q, x.k, x.v, g=x.a, beta=x.b, A_log=x.a_log, dt_bias=x.dt_bias,
                                  use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, initial_state=x.s0,
                                  output_final_state=True, use_qk_l2norm_in_kernel=case.norm)
            return dict(o=o, s=s)

        return call


class FlashQla(Autograd):
    def __init__(self):
        import flash_qla

        self.chunk = flash_qla.chunk_gated_delta_rule
        self.version = flash_qla.__version__

    def step(self, case, x):
        raise Refused("has no decode")


class FlashInfer:
    def __init__(self):
        import flashinfer
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        self.chunk, self.decode = chunk_gated_delta_rule, gated_delta_rule_decode_pretranspose
        self.version = flashinfer.__version__

    def prepare(self, case, x):
        if case.operation == "backward":
            raise Refused("has no backward")
        s0 = x.s0.transpose(-1, -2).contiguous()
        if case.step:
            o = torch.empty_like(x.v)

            def call():
                self.decode(x.q, x.k, x.v, None, x.a_log, x.a, x.dt_bias, x.b, output=o, use_qk_l2norm=case.norm,
                            initial_state=s0, initial_state_indices=x.slots)
                return dict(o=o, s=s0.transpose(-1, -2))

            return call
        q, k, v, decay, beta = (packed(y) for y in (x.q, x.k, x.v, x.g.exp(), x.beta))
        o, s = torch.empty_like(v), torch.empty_like(s0)
        starts = [0]
        for length in case.lengths:
            starts.append(starts[-1] + length)
        cu = x.cu if x.cu is not None else torch.tensor(starts, dtype=torch.int32, device="cuda")

        def call():
            self.chunk(q, k, v, decay, beta, initial_state=s0, output_final_state=True, cu_seqlens=cu, output=o,
                       output_state=s, use_qk_l2norm_in_kernel=case.norm, max_seqlen=max(case.lengths))
            return dict(o=o.view_as(x.v), s=s.transpose(-1, -2))

        return call


PEERS = {"gdelta": Gdelta, "gdelta, hopper": lambda: Gdelta("HOPPER"), "FlashQLA": FlashQla, "FlashInfer": FlashInfer,
         "FLA": Fla}
