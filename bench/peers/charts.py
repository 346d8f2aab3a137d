#!/usr/bin/env python3
"""charts.py OUT JSON...: tabulates what compare.py measured, OUT.md, and draws it, OUT-SUITE.svg: a line a call, a mark
a peer, times to a logarithmic scale, and the floor. Of several JSON files the first counts; the others add the rows and
the peers that it lacks, for peers that do not fit into one installation, and longer first calls, such as those of
compare.py --seconds 0. OUT.md says how far gdelta's own times are apart between them."""

import json
import sys
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from textwrap import fill

COLOURS = {"gdelta": "#1b6ca8", "gdelta, hopper": "#5aa9e6", "FlashQLA": "#d1495b", "FlashInfer": "#3f8f5f",
           "FLA": "#e09f3e"}
TICK = 'stroke="#888" stroke-width="2"'
TITLES = {"forward": "Forward, norm within the call", "before": "Forward, q and k normalised before",
          "weak": "Forward, weak gates", "backward": "Backward", "decode": "Decode, one token"}


def times(row):
    return {name: peer["us"] for name, peer in row["peers"].items() if "us" in peer}


def best(row, ours):
    """The fastest of gdelta's engines, or of the peers: time and name, None where there is none."""
    return min(((us, name) for name, us in times(row).items() if name.startswith("gdelta") == ours), default=None)


def three(x):
    return f"{x:#.3g}".rstrip(".") if x < 1000 else f"{x:.0f}"


def table(report):
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [fill(f"{report['gpu']}, {report['date']}; {versions}", 120), ""]
    for suite, title in TITLES.items():
        rows = [row for row in report["rows"] if row["suite"] == suite and times(row)]
        if not rows:
            continue
        unit, word = (1, "us") if suite == "decode" else (1000, "ms")
        names = [name for name in COLOURS if any(name in times(row) for row in rows)]
        lines += [f"### {title} ({word})", "", "| heads | sequences | states | " + " | ".join(names) +
                  " | best peer / gdelta | floor / gdelta |", "|---" * (5 + len(names)) + "|"]
        for row in rows:
            of, ours, theirs = times(row), best(row, True), best(row, False)
            cells = [three(of[name] / unit) if name in of else "-" for name in names]
            cells.append(f"{theirs[0] / ours[0]:.2f} ({theirs[1]})" if ours and theirs else "-")
            cells.append(f"{100 * row['floor_us'] / ours[0]:.0f}%" if ours else "-")
            lines.append(f"| {' | '.join([row['heads'], row['sequences'], row['state'], *cells])} |")
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
               for name, peer in row["peers"].items() if "refused" in peer and not name.startswith("gdelta")}
    if refused:
        lines += ["", *(fill(f"- {line}", 120, subsequent_indent="  ") for line in sorted(refused))]
    if "apart" in report:
        lines += ["", "From several runs: gdelta's times in the later ones are {:.3f} to {:.3f} of those above.".format(
            *report["apart"])]
    if "autograd" in report:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in report["autograd"].items())
        lines += ["", fill(f"examples/gdelta_torch.py against torch_chunk_gated_delta_rule: {errors}", 120)]
    return "\n".join(lines) + "\n"


def text(x, y, words, size=12, anchor="start", colour="#222"):
    return (f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
            f"{escape(words)}</text>")


def draw(report, suite, title):
    """One chart as SVG; no library makes it, so that it is the same bytes everywhere."""
    rows = [row for row in report["rows"] if row["suite"] == suite and times(row)]
    names = [name for name in COLOURS if any(name in times(row) for row in rows)]
    found = [us for row in rows for us in (row["floor_us"], *times(row).values())]
    low, high = floor(log10(min(found))), ceil(log10(max(found)))
    left, right, top, step = 215, 760, 78, 22
    bottom = top + step * len(rows)

    def x(us):
        return left + (right - left) * (log10(us) - low) / (high - low)

    shapes = [text(16, 24, f"{title}: {report['gpu']}, {report['date']}", 15)]
    for at, name in enumerate(names):
        shapes += [f'<circle cx="{26 + 125 * at}" cy="44" r="5" fill="{COLOURS[name]}"/>',
                   text(36 + 125 * at, 48, name)]
    shapes += [f'<path d="M{26 + 125 * len(names)} 37v14" {TICK}/>', text(36 + 125 * len(names), 48, "floor")]
    for decade in range(low, high + 1):
        for part in (1, 2, 5) if decade < high else (1,):
            us = part * 10.0**decade
            shapes += [f'<path d="M{x(us):.1f} {top - 6}V{bottom}" stroke="{"#bbb" if part == 1 else "#e6e6e6"}"/>',
                       text(x(us), top - 10, f"{us:g} us" if us < 1000 else f"{us / 1000:g} ms", 10, "middle", "#555")]
    for at, row in enumerate(rows):
        y = top + step * at + step // 2
        state = f", {row['state']}" if suite == "decode" else ""
        shapes += [text(left - 10, y + 4, f"{row['heads']}  {row['sequences']}{state}", 12, "end"),
                   f'<path d="M{x(row["floor_us"]):.1f} {y - 7}v14" {TICK}/>']
        shapes += [f'<circle cx="{x(us):.1f}" cy="{y}" r="5" fill="{COLOURS[name]}"/>'
                   for name, us in sorted(times(row).items(), key=lambda one: -list(COLOURS).index(one[0]))]
    box = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" viewBox="0 0 {right + 40} {bottom + 12}">'
    return "\n".join([box, '<rect width="100%" height="100%" fill="white"/>', *shapes, "</svg>\n"])


def merged(reports):
    """The first report with what it lacks; gdelta's times in the others over its times there, least and most."""
    report, apart = reports[0], []
    rows = {(row["suite"], row["heads"], row["sequences"], row["state"]): row for row in report["rows"]}
    for other in reports[1:]:
        report["versions"] = {**other["versions"], **report["versions"]}
        for row in other["rows"]:
            mine = rows.setdefault((row["suite"], row["heads"], row["sequences"], row["state"]), row)
            if mine is row:
                report["rows"].append(row)
                continue
            for name, peer in row["peers"].items():
                if name.startswith("gdelta") and "us" in peer and "us" in mine["peers"].get(name, {}):
                    apart.append(peer["us"] / mine["peers"][name]["us"])
                have = mine["peers"].setdefault(name, peer)
                if "us" in peer and "us" not in have:
                    mine["peers"][name] = dict(peer, first_s=max(peer["first_s"], have.get("first_s", 0)))
                elif "first_s" in peer:
                    have["first_s"] = max(peer["first_s"], have.get("first_s", 0))
    if apart:
        report["apart"] = [min(apart), max(apart)]
    return report


def write(report, out):
    Path(f"{out}.md").write_text(table(report))
    for suite, title in TITLES.items():
        if any(row["suite"] == suite and times(row) for row in report["rows"]):
            Path(f"{out}-{suite}.svg").write_text(draw(report, suite, title))


if __name__ == "__main__":
    write(merged([json.loads(Path(name).read_text()) for name in sys.argv[2:]]), sys.argv[1])
