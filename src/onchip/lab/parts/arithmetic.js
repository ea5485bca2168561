"use strict";
// The page's arithmetic, without drawing. tests/test_page.py holds every function to onchip's own:
// rows to onchip.ladder, bills, roofs, grids and timelines to onchip.analysis.
//
// Legend: N queries and keys, D head dimension, C keys of a tile; masks are {left, right}, -1 for
// unbounded; spans are [first, last + 1].
const arithmetic = (() => {
  const FULL = { left: -1, right: -1 };
  const CAUSAL = { left: -1, right: 0 };

  // Keys that at least one of the rows [first, stop) sees, of `numKeys`, with as many queries.
  function keyRange(mask, first, stop, numKeys) {
    const start = mask.left < 0 ? 0 : Math.max(0, first - mask.left);
    const end = mask.right < 0 ? numKeys : Math.min(numKeys, stop + mask.right);
    return [start, Math.max(start, end)];
  }

  const sees = (mask, row, key) =>
    (mask.left < 0 || key >= row - mask.left) && (mask.right < 0 || key <= row + mask.right);

  // Tiles of keys that hold one which the row sees.
  function keyTiles(mask, row, numKeys, tile) {
    const [start, end] = keyRange(mask, row, row + 1, numKeys);
    const tiles = [];
    if (start === end) return tiles;
    for (let at = Math.floor(start / tile) * tile; at < end; at += tile) {
      tiles.push([at, Math.min(at + tile, numKeys)]);
    }
    return tiles;
  }

  // The one-pass method for one row: what it holds after each tile.
  // m' = max(m, max s); a = exp(m - m'); l' = a l + sum exp(s - m'); o' = a o + sum exp(s - m') v
  function onePass(scores, values, row, mask, tile) {
    let state = { m: -Infinity, l: 0, o: 0 };
    return keyTiles(mask, row, scores.length, tile).map(([start, end]) => {
      const own = [];
      for (let key = start; key < end; key++) {
        own.push(sees(mask, row, key) ? scores[key] : -Infinity);
      }
      const m = Math.max(state.m, ...own);
      const shift = m === -Infinity ? 0 : m; // -Infinity - -Infinity is not a number
      const alpha = Math.exp(state.m - shift);
      const p = own.map((s) => Math.exp(s - shift));
      const l = alpha * state.l + p.reduce((sum, x) => sum + x, 0);
      const o = alpha * state.o + p.reduce((sum, x, i) => sum + x * values[start + i], 0);
      state = { start, end, m, alpha, p, l, o };
      return state;
    });
  }

  // A row without any tile, or whose keys are all hidden, is 0.
  const divided = (state) => (state && state.l > 0 ? state.o / state.l : 0);

  // ---- what a call moves -------------------------------------------------------------------

  const ELEMENT = 2; // bytes of float16 and bfloat16
  const FLOAT = 4; // bytes of the LSE

  const visible = (mask, n) => (mask.right === 0 ? (n * (n + 1)) / 2 : n * n);

  // Keys that each tile of queries reads: whole tiles, the last one cut at the end.
  function walks(mask, n, blockM, blockN) {
    let requested = 0, count = 0, last = 0;
    for (let row = 0; row < n; row += blockM) {
      const [, end] = keyRange(mask, row, Math.min(row + blockM, n), n);
      const stop = Math.min(n, Math.ceil(end / blockN) * blockN);
      requested += stop;
      count += 1;
      last = Math.max(last, stop);
    }
    return { requested, count, unique: last };
  }

  // Bytes of K or V from slow memory: once if they stay in the L2 cache, else once for each wave
  // of programs.
  function reads(found, rounds, dim, gpu) {
    const unique = found.unique * dim * ELEMENT;
    if (unique <= Math.floor(gpu.l2_bytes * 0.5)) return unique;
    const waves = Math.ceil((found.count * rounds) / gpu.num_sms);
    return Math.min(found.requested * rounds * dim * ELEMENT, unique * waves);
  }

  // The three methods: stages with FLOPs, exponentials and bytes of slow memory, all heads.
  function bills(call, gpu) {
    const { n, heads, dim, causal } = call;
    const mask = causal ? CAUSAL : FULL;
    const tensor = heads * n * dim * ELEMENT;
    const scores = heads * n * n * ELEMENT;
    const pairs = heads * visible(mask, n), all = heads * n * n;
    const lse = heads * n * FLOAT;
    const found = walks(mask, n, call.blockM, call.blockN);
    const fused = (rounds) =>
      2 * tensor + lse + heads * (reads(found, rounds, dim, gpu) + reads(found, 1, dim, gpu));
    const stage = (name, flops, exps, bytes) => ({ name, flops, exps, bytes });
    return [
      {
        method: "three-step",
        stages: [
          stage("scores", 2 * all * dim, 0, 2 * tensor + scores),
          stage("softmax", 0, all, 2 * scores),
          stage("values", 2 * all * dim, 0, scores + 2 * tensor),
        ],
      },
      {
        method: "fused, no online softmax",
        stages: [stage("three passes", 8 * pairs * dim, 2 * pairs, fused(3))],
      },
      { method: "flash", stages: [stage("flash", 4 * pairs * dim, pairs, fused(1))] },
    ];
  }

  const sum = (stages, what) => stages.reduce((total, stage) => total + stage[what], 0);

  // ---- the roofline ------------------------------------------------------------------------

  const neededFlops = (call) =>
    4 * call.heads * visible(call.causal ? CAUSAL : FULL, call.n) * call.dim;

  function limits(stage, gpu) {
    const memory = (stage.bytes / gpu.bandwidth) * 1e6;
    const products = (stage.flops / gpu.flops) * 1e6;
    const exps = (stage.exps / gpu.exps) * 1e6;
    return { memory, products, exps, bound: Math.max(memory, products, exps) };
  }

  // A method under the roof: its stages one after the other. Times in microseconds.
  function roof(bill, gpu) {
    const total = { memory: 0, products: 0, exps: 0, bound: 0 };
    for (const stage of bill.stages) {
      const own = limits(stage, gpu);
      for (const name of Object.keys(total)) total[name] += own[name];
    }
    const words = { memory: "memory", products: "matrix products", exps: "exponentials" };
    const slowest = Math.max(total.memory, total.products, total.exps);
    const limiter = Object.keys(words)
      .filter((name) => total[name] >= slowest * 0.95)
      .map((name) => words[name])
      .join(" and ");
    return { ...total, limiter, bytes: sum(bill.stages, "bytes"), flops: sum(bill.stages, "flops") };
  }

  // ---- who holds which tile ----------------------------------------------------------------

  // Programs of a launch: a tile of queries of a head each, and the tiles of keys it walks over.
  function programs(call) {
    const mask = call.causal ? CAUSAL : FULL, found = [];
    for (let head = 0; head < call.heads; head++) {
      for (let row = 0; row < call.n; row += call.blockM) {
        const stop = Math.min(row + call.blockM, call.n);
        const [, end] = keyRange(mask, row, stop, call.n);
        found.push({ head, row, stop, tiles: Math.ceil(end / call.blockN) });
      }
    }
    return found;
  }

  // Which SM runs what from when to when, one program at a time, the longest first, each on
  // whichever SM is free; times in tiles of keys.
  function schedule(call, numSms) {
    const order = programs(call).sort((a, b) => b.tiles - a.tiles);
    const ends = new Float64Array(numSms), heap = Array.from({ length: numSms }, (_, sm) => sm);
    const later = (a, b) => ends[a] - ends[b] || a - b;
    const sift = () => {
      for (let at = 0; ; ) {
        let least = at;
        for (const child of [2 * at + 1, 2 * at + 2]) {
          if (child < numSms && later(heap[child], heap[least]) < 0) least = child;
        }
        if (least === at) return;
        [heap[at], heap[least]] = [heap[least], heap[at]];
        at = least;
      }
    };
    const runs = order.map((program) => {
      const sm = heap[0], start = ends[sm];
      ends[sm] += program.tiles;
      sift();
      return { ...program, sm, start, end: ends[sm] };
    });
    const total = Math.max(...ends), work = ends.reduce((all, end) => all + end, 0);
    return { runs, total, imbalance: (total * numSms) / work, idle: Math.max(0, numSms - runs.length) };
  }

  // ---- producer and consumer ---------------------------------------------------------------

  // Loads run ahead by as many tiles as there are buffers; one buffer is the serial schedule.
  function pipelined(load, compute, tiles, stages) {
    const loads = [], computed = [];
    for (let tile = 0; tile < tiles; tile++) {
      const free = tile >= stages ? computed[tile - stages].end : 0;
      const from = Math.max(free, tile ? loads[tile - 1].end : 0);
      loads.push({ lane: "load", label: `${tile}`, start: from, end: from + load });
      const start = Math.max(loads[tile].end, tile ? computed[tile - 1].end : 0);
      computed.push({ lane: "compute", label: `${tile}`, start, end: start + compute });
    }
    return [...loads, ...computed];
  }

  // Warpgroups that share the tensor cores and the exponential unit: whoever is ready first.
  function pingPong(scores, softmax, values, tiles, groups) {
    const steps = [["tensor cores", "S", scores], ["exponentials", "x", softmax],
      ["tensor cores", "O", values]];
    const free = { "tensor cores": 0, exponentials: 0 };
    const ready = Array(groups).fill(0), done = Array(groups).fill(0), spans = [];
    while (Math.min(...done) < 3 * tiles) {
      let best = null;
      for (let group = 0; group < groups; group++) {
        if (done[group] === 3 * tiles) continue;
        const [unit, label, time] = steps[done[group] % 3];
        const at = Math.max(ready[group], free[unit]);
        const next = { unit, label, time, group, at, ready: ready[group] };
        if (!best || at < best.at || (at === best.at && next.ready < best.ready)) best = next;
      }
      const end = best.at + best.time;
      ready[best.group] = free[best.unit] = end;
      done[best.group] += 1;
      spans.push({ lane: best.unit, label: `${best.label}${best.group + 1}`, start: best.at, end });
    }
    return spans;
  }

  const ends = (spans) => Math.max(...spans.map((span) => span.end));

  return { FULL, CAUSAL, keyTiles, sees, onePass, divided, bills, roof, neededFlops, schedule,
    pipelined, pingPong, ends, sum };
})();
