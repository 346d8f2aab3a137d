#!/usr/bin/env python3
"""Hugging Face's Qwen3-Next with its delta rule replaced by gdelta: a small model with the heads of the real one,
random weights, bf16. Prefill and 32 decode steps, once with the functions of transformers in PyTorch, once with
gdelta's, on the same tokens; prints how far logits and states are apart, and both times of the model and of the
function alone.

    GDELTA_LIBRARY=build/libgdelta.so bench/peers/swap_in.py [--device cpu]"""

import argparse
import inspect
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
os.environ.setdefault("GDELTA_LIBRARY", str(ROOT / "build" / "libgdelta.so"))
os.environ.setdefault("GDELTA_INCLUDE", str(ROOT / "include"))
sys.path.insert(0, str(ROOT / "examples"))

import gdelta_torch  # noqa: E402
import torch  # noqa: E402
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next as modeling  # noqa: E402

CHUNK, RECURRENT = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
THEIRS = {name: inspect.unwrap(getattr(modeling, name)) for name in (CHUNK, RECURRENT)}  # not FLA's, where installed
OURS = {CHUNK: gdelta_torch.chunk_gated_delta_rule, RECURRENT: gdelta_torch.recurrent_gated_delta_rule}


def model_of(device):
    torch.manual_seed(2026)
    config = Qwen3NextConfig(vocab_size=4096, hidden_size=512, num_hidden_layers=4, num_attention_heads=4,
                             num_key_value_heads=2, head_dim=128, intermediate_size=512, moe_intermediate_size=128,
                             shared_expert_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
                             linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
                             linear_value_head_dim=128, mlp_only_layers=[0, 1, 2, 3])
    return Qwen3NextForCausalLM(config).to(device, torch.bfloat16).eval()


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def run(model, tokens, steps, functions):
    """Logits of all positions, states after the last, seconds of prefill and of a step, and of the functions alone."""
    spent = dict.fromkeys(functions, 0.0)

    def timed(name):
        def call(*args, **words):
            synchronize()
            began = time.perf_counter()
            result = functions[name](*args, **words)
            synchronize()
            spent[name] += time.perf_counter() - began
            return result

        return call

    for name in functions:
        setattr(modeling, name, timed(name))
    prompt = tokens.shape[1] - steps
    marks = []
    out, logits = None, []
    for part in (tokens[:, :prompt], *tokens[:, prompt:].split(1, 1)):
        synchronize()
        marks.append(time.perf_counter())
        out = model(part, past_key_values=out and out.past_key_values, use_cache=True)
        logits.append(out.logits.float())
    synchronize()
    marks.append(time.perf_counter())
    states = [layer.recurrent_states[0].float() for layer in out.past_key_values.layers
              if hasattr(layer, "recurrent_states")]
    return torch.cat(logits, 1), states, dict(prefill=marks[1] - marks[0], step=(marks[-1] - marks[1]) / steps,
                                              chunk=spent[CHUNK], recurrent=spent[RECURRENT] / steps)


def apart(a, b):
    return ((a - b).norm() / b.norm()).item()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda")
    options.add_argument("--prompt", type=int, default=4096)
    options.add_argument("--steps", type=int, default=32)
    given = options.parse_args()
    model = model_of(given.device)
    tokens = torch.randint(0, model.config.vocab_size, (1, given.prompt + given.steps), device=given.device)
    results = {}
    for name, functions in (("PyTorch", THEIRS), ("gdelta", OURS)):
        run(model, tokens, given.steps, functions)  # warm
        results[name] = run(model, tokens, given.steps, functions)
    exact = run(model.float(), tokens, given.steps, THEIRS)
    kinds = model.config.layer_types
    print(f"{kinds.count('linear_attention')} gated delta layers of 16/32 heads, K = V = 128, bf16; {given.prompt} "
          f"tokens, then {given.steps} steps")
    print("relative L2 of            prefill logits   step logits   states, worst layer")
    for name, one, other in (("gdelta - PyTorch", results["gdelta"], results["PyTorch"]),
                             ("gdelta - fp32 model", results["gdelta"], exact),
                             ("PyTorch - fp32 model", results["PyTorch"], exact)):
        worst = max(map(apart, one[1], other[1]))
        print(f"{name:24} {apart(one[0][:, :given.prompt], other[0][:, :given.prompt]):14.2e} "
              f"{apart(one[0][:, given.prompt:], other[0][:, given.prompt:]):14.2e} {worst:14.2e}")
    same = (results["gdelta"][0].argmax(-1) == results["PyTorch"][0].argmax(-1)).float().mean().item()
    print(f"same most likely token: {100 * same:.2f}%")
    for what, unit in (("prefill", "model, prefill"), ("step", "model, a step"), ("chunk", "delta rule, prefill"),
                       ("recurrent", "delta rule, a step")):
        theirs, ours = (1e3 * results[n][2][what] for n in ("PyTorch", "gdelta"))
        print(f"{unit:32} PyTorch {theirs:9.3f} ms   gdelta {ours:9.3f} ms   {theirs / ours:6.1f} x")


if __name__ == "__main__":
    main()
