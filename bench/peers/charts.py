#!/usr/bin/env python3
"""charts.py peers.json: tabulates what compare.py measured, peers.md, and with matplotlib draws it, peers-*.svg."""

import json
import sys
from pathlib import Path

COLOURS = {"gdelta": "#1b6ca8", "gdelta, hopper": "#7fb2d6", "FlashQLA": "#d1495b", "FlashInfer": "#66a182",
           "FLA": "#edae49"}
TITLES = {"forward": "Forward, norm within the call", "before": "Forward, q and k normalised before",
          "weak": "Forward, weak gates", "backward": "Backward", "decode": "Decode, one token"}


def times(row):
    return {name: peer["us"] for name, peer in row["peers"].items() if "us" in peer}


def ours_and_best(row):
    """gdelta's own time and the best peer's name and time, None where there is none."""
    of = times(row)
    theirs = {name: us for name, us in of.items() if not name.startswith("gdelta")}
    best = min(theirs, key=theirs.get) if theirs else None
    return of.get("gdelta"), best, theirs.get(best)


def three(x):
    return f"{x:#.3g}".rstrip(".")


def cell(peer, unit):
    return three(peer["us"] / unit) if "us" in peer else "-"


def table(report):
    lines = [f"{report['gpu']}, {report['date']}; " + ", ".join(f"{n} {v}" for n, v in report["versions"].items()), ""]
    for suite, title in TITLES.items():
        rows = [row for row in report["rows"] if row["suite"] == suite]
        if not rows:
            continue
        unit, word = (1, "us") if suite == "decode" else (1000, "ms")
        names = list(rows[0]["peers"])
        lines += [f"### {title} ({word})", "", "| heads | sequences | states | " + " | ".join(names) +
                  " | best peer / gdelta | floor / gdelta |", "|---" * (5 + len(names)) + "|"]
        for row in rows:
            ours, best, time = ours_and_best(row)
            ratio = f"{time / ours:.2f} ({best})" if ours and best else "-"
            floor = f"{100 * row['floor_us'] / ours:.0f}%" if ours else "-"
            cells = [cell(row["peers"][name], unit) for name in names]
            lines.append(f"| {' | '.join([row['heads'], row['sequences'], row['state'], *cells, ratio, floor])} |")
        lines.append("")
    lines += ["### Largest relative errors against fp64, and the longest first call (s)", "",
              "| suite | who | errors | first call |", "|---|---|---|---|"]
    for suite in TITLES:
        found = {}
        for row in (row for row in report["rows"] if row["suite"] == suite):
            for name, peer in row["peers"].items():
                worst, first = found.setdefault(name, ({}, [0.0]))
                first[0] = max(first[0], peer.get("first_s", 0))
                for what, error in peer.get("errors", {}).items():
                    worst[what] = error if error != error else max(worst.get(what, 0), error)
        lines += [f"| {suite} | {name} | {', '.join(f'{k} {v:.1e}' for k, v in worst.items())} | {three(first[0])} |"
                  for name, (worst, first) in found.items() if worst]
    refused = {f"{row['suite']}: {name}: {peer['refused']}" for row in report["rows"]
               for name, peer in row["peers"].items() if "refused" in peer}
    lines += ["", *(f"- {line}" for line in sorted(refused))]
    if "autograd" in report:
        lines += ["", "examples/gdelta_torch.py against torch_chunk_gated_delta_rule: " +
                  ", ".join(f"{name} {error:.1e}" for name, error in report["autograd"].items())]
    return "\n".join(lines) + "\n"


def draw(report, out):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plot

    plot.rcParams.update({"svg.hashsalt": "gdelta", "axes.spines.top": False, "axes.spines.right": False})
    for suite, title in TITLES.items():
        rows = [row for row in report["rows"] if row["suite"] == suite and times(row)]
        if not rows:
            continue
        settings = list(dict.fromkeys((row["heads"], row["state"]) for row in rows))
        figure, axes = plot.subplots(1, len(settings), figsize=(4 * len(settings), 3.4), squeeze=False)
        for axis, setting in zip(axes[0], settings):
            here = sorted((row for row in rows if (row["heads"], row["state"]) == setting), key=lambda row: row["rows"])
            for name, colour in COLOURS.items():
                points = [(row["rows"], times(row)[name]) for row in here if name in times(row)]
                if points:
                    axis.plot(*zip(*points), "o-" if suite == "decode" else "o", color=colour, label=name)
            floors = [row["floor_us"] for row in here]
            axis.plot([row["rows"] for row in here], floors, "_", color="grey", label="floor")
            axis.set(xscale="log", yscale="log", title=f"{setting[0]} heads, {setting[1]} states", ylabel="us",
                     xlabel="sequences" if suite == "decode" else "tokens in all")
        axes[0][0].legend(frameon=False, fontsize=8)
        figure.suptitle(f"{title}: {report['gpu']}")
        figure.tight_layout()
        figure.savefig(f"{out}-{suite}-time.svg", metadata={"Date": None})

        labels = [f"{row['heads']}  {row['sequences']}  {row['state']}" for row in rows]
        figure, (ratio, floor) = plot.subplots(1, 2, figsize=(10, 1 + 0.28 * len(rows)), sharey=True)
        for at, row in enumerate(rows):
            ours, best, time = ours_and_best(row)
            if ours and best:
                ratio.barh(at, time / ours, color=COLOURS[best])
            if ours:
                floor.barh(at, 100 * row["floor_us"] / ours, color=COLOURS["gdelta"])
        ratio.axvline(1, color="black", linewidth=0.8)
        ratio.set(yticks=range(len(rows)), yticklabels=labels, xlabel="time of the best peer / gdelta's (its colour)")
        floor.set(xlabel="% of the floor")
        ratio.invert_yaxis()
        figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(f"{out}-{suite}-ratio.svg", metadata={"Date": None})


def write(report, out):
    Path(out + ".md").write_text(table(report))
    try:
        draw(report, out)
    except ImportError:
        print(f"**** SKIPPED: charts; there is no matplotlib here. Elsewhere: charts.py {out}.json", file=sys.stderr)


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()), sys.argv[1].removesuffix(".json"))
