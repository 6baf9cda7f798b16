"""Time tiles of layers, cold: measure_tiles.py GROUPS.JSON OUT.JSON SECONDS.

Groups are objects of a `shape`, an `epi` if there is one, and `tiles`: pairs of a strategy and its
parameters, or "manual" and "tuned".
"""
import json, sys, time, os, warnings
from concurrent.futures import ProcessPoolExecutor
import multiprocessing as mp
warnings.simplefilter("ignore")
START = time.monotonic()


def strategy(tile):
    from dwtir.tune.wire import strategy_from_json
    return tile if isinstance(tile, str) else strategy_from_json({"strategy": tile[0], "parameters": tile[1]})


def work(job):
    import dwtir
    shape, epi, tile, target = job
    try:
        k = dwtir.build(shape, epilogue=epi or None, schedule=strategy(tile), target=target)
        return {"regs": k.info.resources.registers, "spill": getattr(k.info.resources, "local_bytes", None), "tile": str(k.strategy)}
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"[:200]}


def main():
    groups, out, limit = json.load(open(sys.argv[1])), sys.argv[2], float(sys.argv[3])
    from dwtir.target import resolve
    from dwtir.tune.testbed import open_testbed
    from dwtir.tune.outcome import Task
    from dwtir.shape import Shape
    from dwtir.epilogue import Epilogue
    import dwtir
    target = resolve(None)
    check = os.environ.get("CHECK", "1") == "1"
    pool = ProcessPoolExecutor(int(os.environ.get("JOBS", "14")), mp_context=mp.get_context("spawn"))
    futures = [[pool.submit(work, (g["shape"], g.get("epi"), t, target)) for t in g["tiles"]] for g in groups]
    rows = []
    for g, fs in zip(groups, futures):
        bed = None
        for t, f in zip(g["tiles"], fs):
            if time.monotonic() - START > limit:
                break
            row = {"shape": g["shape"], "epi": g.get("epi"), "tile": t}
            row |= f.result()
            if "error" not in row:
                try:
                    if bed is None:
                        bed = open_testbed(Task(Shape.of(g["shape"]), Epilogue.of(g.get("epi") or ())), target)
                    k = dwtir.build(g["shape"], epilogue=g.get("epi") or None, schedule=strategy(t), target=target)
                    if check:
                        bed.check(k)
                    times = sorted(bed.times(k))
                    row["us"] = round(times[len(times) // 2] * 1e6, 3)
                    row["spread"] = round((times[-1] / times[0] - 1), 4)
                except Exception as e:
                    row["error"] = f"{type(e).__name__}: {e}"[:200]
            rows.append(row)
        del bed
        with open(out, "w") as f:
            json.dump({"gpu": target.name, "rows": rows}, f)
        if time.monotonic() - START > limit:
            print("LIMIT at", g["shape"], flush=True)
            break
    for fs in futures:
        for f in fs:
            f.cancel()
    pool.shutdown(cancel_futures=True)
    bad = [r for r in rows if "error" in r]
    print(sys.argv[1], len(rows), "timed", len(bad), "errors", round(time.monotonic() - START), "s", [b["error"] for b in bad[:3]], flush=True)


if __name__ == "__main__":
    main()
