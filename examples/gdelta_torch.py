"""The gated delta rule as a PyTorch function with gradients, and its decode step: the signatures that FLA and Hugging
Face's models use. CUDA tensors run on the GPU, on the current stream; CPU tensors on the reference, in fp64.
GDELTA_LIBRARY and GDELTA_INCLUDE say where libgdelta.so and the headers are."""

import ctypes
import functools
import os

import gdelta
import torch

lib = gdelta.load(os.environ.get("GDELTA_LIBRARY", "libgdelta.so"), os.environ.get("GDELTA_INCLUDE", "include"))
DTYPES = {torch.bfloat16: lib.DTYPE_BF16, torch.float16: lib.DTYPE_FP16, torch.float32: lib.DTYPE_FP32}


def tensor(x, kind=lib.tensor):
    """A [batch, token, head, element] tensor of any strides, a [batch, token, head] one, or a contiguous state."""
    if x is None:
        return kind()
    return kind(data=x.data_ptr(), dtype=DTYPES[x.dtype], stride=(*x.stride(), 1)[:4])


state = functools.partial(tensor, kind=lib.state)


def problem(q, k, v, g, beta, norm, engine):
    return dict(batch=q.shape[0], tokens=q.shape[1], heads_q=q.shape[2], heads_k=k.shape[2], heads_v=v.shape[2],
                dim_k=q.shape[3], dim_v=v.shape[3], dtype=DTYPES[q.dtype], gate_dtype=DTYPES[g.dtype],
                beta_dtype=DTYPES[beta.dtype], l2norm=lib.L2NORM_ADD_EPS if norm else lib.L2NORM_NONE, engine=engine)


@functools.lru_cache(maxsize=None)
def plan(items):
    made = ctypes.c_void_p()
    lib.plan_create(lib.problem(**dict(items)), ctypes.byref(made))
    return made


def run(name, words, args, device):
    """Calls lib.forward, backward or step with scratch from PyTorch's allocator, or the reference."""
    if device.type == "cpu":
        return getattr(lib, "reference_" + name)(lib.problem(**words), args)
    with torch.cuda.device(device):
        it, size = plan(tuple(words.items())), ctypes.c_size_t()
        lib.plan_workspace_size(it, getattr(lib, "OPERATION_" + name.upper()), ctypes.byref(size))
        scratch = torch.empty(size.value, dtype=torch.uint8, device=device)
        getattr(lib, name)(it, args, scratch.data_ptr(), size.value, torch.cuda.current_stream().cuda_stream)


class GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, norm, engine):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        o = torch.empty(*v.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3], dtype=v.dtype, device=v.device)
        final = torch.empty(o.shape[0], o.shape[2], q.shape[3], v.shape[3], dtype=torch.float32, device=v.device)
        inputs = dict(q=tensor(q), k=tensor(k), v=tensor(v), g=tensor(g), beta=tensor(beta),
                      initial_state=state(initial_state))
        words = problem(q, k, v, g, beta, norm, engine)
        run("forward", words, lib.forward_args(o=tensor(o), final_state=state(final), **inputs), q.device)
        ctx.words, ctx.inputs = words, inputs
        ctx.save_for_backward(q, k, v, g, beta, initial_state)  # inputs holds their addresses
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx, d_o, d_final):
        of = dict(zip(("dq", "dk", "dv", "dg", "dbeta", "d_initial_state"), ctx.saved_tensors))
        grads = {name: None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
                 for name, x in of.items()}
        d_o, d_final = (x if x is None else x.contiguous() for x in (d_o, d_final))
        args = lib.backward_args(d_o=tensor(d_o), d_final_state=tensor(d_final), **ctx.inputs,
                                 **{name: tensor(x) for name, x in grads.items()})
        run("backward", ctx.words, args, of["dq"].device)
        return (*grads.values(), None, None)


def chunk_gated_delta_rule(query, key, value, g, beta, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, engine=lib.ENGINE_AUTO, **_):
    """Whole sequences, with gradients. q, k [B, T, HQ, K], v [B, T, HV, V]; g, beta [B, T, HV]; states [B,HV,K,V]."""
    o, final = GatedDeltaRule.apply(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel, engine)
    return o, final if output_final_state else None


def recurrent_gated_delta_rule(query, key, value, g, beta, initial_state, output_final_state=False,
                               use_qk_l2norm_in_kernel=False, **_):
    """Decode: 1 to 16 tokens on each state, without gradients. The new states are a new tensor."""
    o, new = torch.empty_like(value), torch.empty_like(initial_state)
    args = lib.step_args(q=tensor(query), k=tensor(key), v=tensor(value), g=tensor(g), beta=tensor(beta), o=tensor(o),
                         state=state(initial_state), output_state=state(new))
    run("step", problem(query, key, value, g, beta, use_qk_l2norm_in_kernel, lib.ENGINE_AUTO), args, query.device)
    return o, new if output_final_state else None
