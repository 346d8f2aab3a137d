#!/usr/bin/env python3
"""gdelta beside its peers, in one run, on the same inputs: forward, backward and decode.

    cmake --build build --target gdelta_shared
    pip install flash-linear-attention flash-qla flashinfer-python    # what is missing is skipped, loudly
    GDELTA_LIBRARY=build/libgdelta.so bench/peers/compare.py --out peers

writes peers.json, after each row, and then the tables peers.md and the charts peers-*.svg (see charts.py). Every call
is captured in a CUDA graph; the graphs of all peers run in turns, L2 flushed before each, medians between two events.
Calls on less than twice the L2 are captured several times, each on tensors of its own. The first call of each peer in
the process is timed too: it holds compilation and tuning, which take most of this program's time. Several processes
with --seconds 0 --only HEADS fill the peers' caches sooner; FLA_CACHE_RESULTS=0 keeps what they tuned, on a shared GPU,
out of them. Errors: relative L2 of the worst head against fp64, for the first sequence and the value heads of the first
key head; through every token, so that a shortcut along the sequence shows."""

import argparse
import datetime
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
os.environ.setdefault("GDELTA_LIBRARY", str(ROOT / "build" / "libgdelta.so"))
os.environ.setdefault("GDELTA_INCLUDE", str(ROOT / "include"))

import cases  # noqa: E402
import exact  # noqa: E402
import torch  # noqa: E402
from peers import PEERS, Refused  # noqa: E402


def truth(case, x):
    """The outputs of the first sequence and key head in fp64, by name, of the call that the peers make."""
    rows = slice(0, case.lengths[0])
    group = case.hv // case.hq
    part = [y[:1, rows, :n].double() for y, n in ((x.q, 1), (x.k, 1), (x.v, group), (x.g, group), (x.beta, group))]
    part.append(x.s0[:1, :group].double())
    leaves = [y.requires_grad_(case.operation == "backward") for y in part]
    q, k = (exact.normalised(y) if case.norm else y for y in leaves[:2])
    q, k = (y.expand(-1, -1, group, -1) for y in (q, k))
    o, s = exact.by_chunks(q, k, *leaves[2:])
    if case.operation != "backward":
        return dict(o=o, s=s)
    grads = torch.autograd.grad([o, s], leaves, [x.d_o[:1, rows, :group].double(), x.d_s[:1, :group].double()])
    return dict(zip(("dq", "dk", "dv", "dg", "dbeta", "ds"), grads))


def errors(case, out, exactly):
    found = {}
    for name, right in exactly.items():
        if name in ("s", "ds"):
            found[name] = exact.state_error(out[name][:1, : right.shape[1]], right)
        else:
            found[name] = exact.error(out[name][:1, : right.shape[1], : right.shape[2]], right)
    return found


def capture(calls, stream):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def measure(case, peers, seconds):
    """One row: for each peer its times, first call and errors, or why there are none. 0 seconds: first calls only."""
    copies = min(64, max(1, -(-2 * torch.cuda.get_device_properties(0).L2_cache_size // case.bytes))) if seconds else 1
    sets = [cases.inputs(case, seed) for seed in range(copies)]
    exactly, stream = None, torch.cuda.Stream()
    flush = torch.empty(4 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")
    row = dict(operation=case.operation, heads=f"{case.hq}/{case.hv}", sequences=case.sequences, rows=case.rows,
               gate=case.gate, state=str(case.state)[6:], norm=case.norm, floor_us=case.floor, copies=copies, peers={})
    graphs = {}  # with the calls, whose tensors the graphs use
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        exactly = truth(case, sets[0]) if seconds else {}
        for name, peer in peers.items():
            try:
                torch.cuda.synchronize()
                began = time.perf_counter()
                calls = [peer.prepare(case, sets[0])]
                out = calls[0]()
                torch.cuda.synchronize()
                first = time.perf_counter() - began
                row["peers"][name] = dict(first_s=first, errors=errors(case, out, exactly))
                out = None
                if not seconds:
                    continue
                calls += [peer.prepare(case, x) for x in sets[1:]]
                for call in calls:
                    call()
                torch.cuda.synchronize()
                graphs[name] = capture(calls, stream), calls
            except Refused as reason:
                row["peers"][name] = dict(refused=str(reason))
            except Exception as wrong:  # a peer's failure is a finding, not the end of the run
                row["peers"][name] = dict(refused=f"{type(wrong).__name__}: {wrong}"[:300])
                print(f"**** {name} failed: {case}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        times = {name: [] for name in graphs}
        began, rounds = time.perf_counter(), 0
        while graphs and (rounds < 5 or (rounds < 50 and time.perf_counter() - began < seconds)):
            for name, (graph, _) in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(1e3 * start.elapsed_time(end) / copies)
            rounds += 1
    for name, of in times.items():
        of = sorted(of[1:])
        row["peers"][name].update(us=statistics.median(of), p10=of[len(of) // 10], p90=of[-1 - len(of) // 10])
    graphs.clear()
    torch.cuda.empty_cache()
    return row


def check_autograd():
    """examples/gdelta_torch.py against Hugging Face's function: outputs and all gradients, relative L2."""
    import inspect

    import gdelta_torch
    from transformers.models.qwen3_next import modeling_qwen3_next

    theirs = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    x = cases.inputs(cases.Case("backward", 16, 32, (1000, 1000)))
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta, x.s0)]
    results = []
    for function, repeat in ((gdelta_torch.chunk_gated_delta_rule, 1), (theirs, 2)):
        q, k = (y.repeat_interleave(repeat, 2) for y in leaves[:2])
        o, s = function(q, k, *leaves[2:5], initial_state=leaves[5], output_final_state=True,
                        use_qk_l2norm_in_kernel=True)
        results.append([o, s, *torch.autograd.grad([o, s], leaves, [x.d_o, x.d_s])])
    names = ("o", "s", "dq", "dk", "dv", "dg", "dbeta", "ds")
    return {n: ((a - b).float().norm() / b.float().norm()).item() for n, a, b in zip(names, *results)}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default="peers", help="what the names of the files begin with")
    options.add_argument("--suite", default="forward,backward,decode,weak,before",
                         help="forward (norm within the call), before (norm before it), weak gates, backward, decode")
    options.add_argument("--only", default="", help="rows that begin so, such as 16/32 or '16/32 1 x 8192'")
    options.add_argument("--peers", default=",".join(PEERS))
    options.add_argument("--seconds", type=float, default=0.3, help="of timing a row; 0: first calls only")
    options.add_argument("--tuning", type=float, help="milliseconds Triton may time one variant; default: its own, 125")
    given = options.parse_args()
    if given.tuning:
        import triton.testing

        bench = triton.testing.do_bench
        bench.__defaults__ = (given.tuning / 5, given.tuning, *bench.__defaults__[2:])

    peers, versions = {}, dict(torch=torch.__version__, cuda=torch.version.cuda)
    for name in given.peers.replace("gdelta, hopper", "gdelta; hopper").split(","):
        name = name.replace(";", ",")
        try:
            peers[name] = PEERS[name]()
            versions[name] = peers[name].version
        except Exception as wrong:  # ImportError, or whatever a package does on the wrong GPU
            print(f"**** SKIPPED: {name}: {type(wrong).__name__}: {wrong}\n{traceback.format_exc()}", file=sys.stderr,
                  flush=True)
    suites = dict(forward=lambda: cases.h200("forward"), before=lambda: cases.h200("forward", norm=False),
                  weak=lambda: cases.h200("forward", gate="weak"), backward=lambda: cases.h200("backward"),
                  decode=cases.decode)
    report = dict(date=datetime.date.today().isoformat(), gpu=torch.cuda.get_device_name(), versions=versions, rows=[])
    for suite in given.suite.split(","):
        for case in suites[suite]():
            if f"{case.hq}/{case.hv} {case.sequences}".startswith(given.only):
                row = dict(suite=suite, **measure(case, peers, given.seconds))
                report["rows"].append(row)
                shown = ", ".join(f"{n} {p['us']:.1f}" if "us" in p else f"{n} -" if "refused" in p else
                                  f"{n} 1st {p['first_s']:.1f} s" for n, p in row["peers"].items())
                print(f"{suite} {row['heads']} {row['sequences']} {row['state']}: {shown}", flush=True)
                Path(given.out + ".json").write_text(json.dumps(report, indent=1))
    if given.seconds and any(name.startswith("gdelta") for name in peers):
        try:
            report["autograd"] = check_autograd()
        except Exception as wrong:  # no transformers, or others than this was written for
            print(f"**** SKIPPED: autograd check: {type(wrong).__name__}: {wrong}", file=sys.stderr, flush=True)
    Path(given.out + ".json").write_text(json.dumps(report, indent=1))
    if given.seconds:
        import charts

        charts.write(report, given.out)


if __name__ == "__main__":
    main()
