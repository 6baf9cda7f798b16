import json, random
from dwtir.schedules import ChannelPairs, RowStream, UnitSums
from dwtir.shape import Shape
from dwtir.target import resolve
T = resolve("nvidia-h200")
random.seed(1)
def entry(t): return [t.name, t.parameters]
def pick(tiles, shape, top, extra, key):
    ranked = sorted(tiles, key=lambda t: t.expected_seconds(shape, T))
    best = ranked[0].expected_seconds(shape, T)
    chosen = list(ranked[:top])
    seen = {key(t) for t in chosen}
    for t in ranked[top:]:
        if len(chosen) >= top + extra or t.expected_seconds(shape, T) > 1.6 * best: break
        if key(t) not in seen:
            seen.add(key(t)); chosen.append(t)
    return chosen
def write(name, layers, tiles_of, top, extra, key):
    groups = []
    for text in layers.split():
        s = Shape.parse(text)
        tiles = list(dict.fromkeys(tiles_of(s)))
        tiles = pick(tiles, s, top, extra, key)
        groups.append({"shape": text, "tiles": ["manual", *map(entry, tiles)]})
    json.dump(groups, open(name, "w"))
    print(name, len(groups), sum(len(g["tiles"]) for g in groups))
write("pairs.json", """
128x96x56x56_k5_p2_float16_nhwc 128x240x28x28_k5_p2_float16_nhwc 128x384x14x14_k5_p2_float16_nhwc 128x672x14x14_k5_p2_bfloat16_nhwc
128x96x57x57_k5_p2_float16_nhwc 128x144x56x56_s2_k5_p2_float16_nhwc 32x96x56x56_k5_p2_float16_nhwc 32x672x14x14_k5_p2_float16_nhwc
32x480x14x14_k5_p2_float16_nhwc 32x240x28x28_k5_p2_bfloat16_nhwc
128x96x56x56_k7_p3_float16_nhwc 128x192x28x28_k7_p3_float16_nhwc 128x384x14x14_k7_p3_float16_nhwc 128x768x7x7_k7_p3_float16_nhwc
32x384x14x14_k7_p3_bfloat16_nhwc_dgrad 32x192x28x28_k7_p3_float16_nhwc 8x384x14x14_k7_p3_float16_nhwc
128x96x56x56_k9_p4_float16_nhwc 32x256x28x28_k13_p6_float16_nhwc 32x96x56x56_k13_p6_float16_nhwc 32x96x56x56_k21_p10_float16_nhwc 32x512x14x14_k13_p6_float16_nhwc
""", lambda s: ChannelPairs._tiles(s, T), 8, 12, lambda t: (t.channels, t.rows, t.ahead, t.words, t.steps > 1))
write("rw.json", """
128x384x14x14_k7_p3_nhwc 128x384x14x14_k7_p3 128x384x14x14_k5_p2_nhwc 128x384x14x14_k5_p2 128x512x10x10_k7_p3_nhwc 128x512x10x10_k7_p3
128x672x14x14_k5_p2_nhwc 32x384x14x14_k7_p3_nhwc 128x384x12x12_k9_p4_nhwc 128x384x14x14_k7_p3_nhwc_dgrad 128x240x28x28_k5_p2_nhwc
""", RowStream.tiles, 14, 14, lambda t: (t.rows, t.cols, t.vector, t.depth, t.min_blocks * t.thread_x * t.thread_y))
write("us.json", """
128x96x56x56_k5_p2_float16_nhwc_wgrad 128x240x28x28_k5_s2_p2_float16_nhwc_wgrad 128x240x28x28_k5_s2_p2_bfloat16_nhwc_wgrad
128x672x14x14_k5_p2_bfloat16_nhwc_wgrad
""", lambda s: UnitSums.tiles(s, T), 24, 16, lambda t: (t.channels, t.together, t.images, t.warps, t.ahead))
