"""The long run over random compositions: `python -m tools.run_random --count 20000 --seed 0 --processes 1`.

Composition i of a seed is the same in every run, so an escape is repeated with `--first i --count 1`. Ends with 1 if there is any.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from random import Random

import torch

from tests.random.composition_mutations import mutated
from tests.random.compositions import Case, case, maybe
from tests.random.right_or_refused import Escape, outcome

MUTATIONS_EACH = 2
THREADED_PERCENT = 20
Counts = Counter[tuple[str, ...]]


def trial(seed: int, index: int) -> Iterator[tuple[str, ...]]:
    """What one composition and, if it compiles, some mutations of it came to, as keys to count."""
    random = Random(f"{seed}:{index}")
    drawn, by_threads = case(random), maybe(random, THREADED_PERCENT)
    found = _outcome(drawn, f"composition {index}", by_threads=by_threads)
    yield "composition", found
    if found != "right":
        return
    yield from (("right", *feature) for feature in features(drawn))
    if by_threads:
        yield "right", "a communicator per rank"
    for _ in range(MUTATIONS_EACH):
        what, changed = mutated(random, drawn)
        if not what.startswith("junk") and maybe(random, 25):
            more, changed = mutated(random, changed)
            what = what if more == what else "two of these"
        yield "mutation", what, _outcome(changed, f"composition {index}, {what}", by_threads=False)


def _outcome(drawn: Case, where: str, *, by_threads: bool) -> str:
    try:
        return outcome(drawn, by_threads=by_threads)
    except Escape as escape:
        print(f"ESCAPE  {where}\n{escape}\n", flush=True)
        return "ESCAPE"


def features(drawn: Case) -> Iterator[tuple[str, str]]:
    """What a composition has, for the summary."""
    cp, shape = drawn.cp, drawn.shape
    yield "mesh axes", str(len(cp["axes"]))
    yield "dtype", shape.dtype
    yield "layout", cp["layout"]["kind"]
    yield "mask", "from each call" if drawn.called is not None else drawn.mask["kind"]
    yield "heads", "MHA" if shape.heads == shape.kv_heads else "MQA" if shape.kv_heads == 1 else "GQA"
    for kind in {node["kind"] for node in cp["steps"].values()}:
        yield "step", kind
    if any(node.get("only") == "visible" for node in cp["steps"].values()):
        yield "step", "all_gather, only visible"
    for node in cp["steps"].values():
        if node.get("rotate"):
            yield "rotate", f"{len(node['rotate'])} axes"
        if node.get("sinks"):
            yield "step", "dense, sinks"
    yield "head_groups", str(cp["head_groups"])


def trials(seed: int, indices: range) -> Counts:
    torch.set_num_threads(1)
    counts = Counts()
    for done, i in enumerate(indices, 1):
        counts.update(trial(seed, i))
        if done % 1000 == 0:
            print(f"{done} of {len(indices)} compositions", flush=True)
    return counts


def summary(counts: Counts, seconds: float) -> list[str]:
    """The counts as lines."""
    whole = Counter({key[1]: n for key, n in counts.items() if key[0] == "composition"})
    mutations = Counter[tuple[str, str]]()
    for key, n in counts.items():
        if key[0] == "mutation":
            how = key[2] if key[2] in ("right", "ESCAPE") else "refused"
            mutations[key[1], how] += n
            mutations["all", how] += n
    escapes = whole["ESCAPE"] + mutations["all", "ESCAPE"]
    lines = [
        f"compositions  {whole.total()} in {seconds:.0f} s",
        f"compiled      {whole['right'] + whole['ESCAPE']}, right {whole['right']}",
        *(f"refused       {n}  {kind}" for kind, n in sorted(whole.items()) if kind not in ("right", "ESCAPE")),
        "",
        f"{'mutations of what compiled':<28}{'refused':>9}{'right':>9}{'escapes':>9}",
    ]
    for what in sorted({what for what, _ in mutations}, key=lambda w: (w == "all", w)):
        lines.append(f"{what:<28}" + "".join(f"{mutations[what, how]:>9}" for how in ("refused", "right", "ESCAPE")))
    rows: dict[str, list[str]] = {}
    for (_, *feature), n in sorted((k, n) for k, n in counts.items() if k[0] == "right"):
        rows.setdefault(feature[0], []).append(f"{feature[-1]} {n}" if len(feature) > 1 else str(n))
    return [*lines, "", *(f"{name:<28}{', '.join(values)}" for name, values in rows.items()), "", f"escapes  {escapes}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    start = time.perf_counter()
    stop, n = given.first + given.count, given.processes
    shares = [range(given.first + i, stop, n) for i in range(n)]
    if n == 1:
        counts = trials(given.seed, shares[0])
    else:
        with ProcessPoolExecutor(n) as pool:
            counts = sum(pool.map(partial(trials, given.seed), shares), Counts())
    lines = summary(counts, time.perf_counter() - start)
    print("\n".join(lines))
    return 0 if lines[-1] == "escapes  0" else 1


if __name__ == "__main__":
    sys.exit(main())
