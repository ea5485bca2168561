// What the controls say, and everything drawn anew when one of them moves.
const at = (id) => document.getElementById(id);
const number = (id) => Number(at(id).value);
const EXAMPLE = { scores: [1, 2, 3, 0], values: [2, 8, 4, 10] };
const row = { ...EXAMPLE, step: 0, timer: 0 };

// ---- one row -------------------------------------------------------------------------------

const MASKS = { full: arithmetic.FULL, causal: arithmetic.CAUSAL, window: { left: 2, right: 0 } };
const maskNow = () => MASKS[at("mask").value];

function states() {
  const query = Math.min(number("query"), row.scores.length - 1);
  return arithmetic.onePass(row.scores, row.values, query, maskNow(), number("tile"));
}

function setKeys(count) {
  while (row.scores.length < count) {
    row.scores.push(Math.round(Math.random() * 80 - 30) / 10);
    row.values.push(Math.round(Math.random() * 100) / 10);
  }
  row.scores = row.scores.slice(0, count);
  row.values = row.values.slice(0, count);
  at("keys").value = count;
  at("tile").max = count;
  at("query").max = count - 1;
  at("query").value = count - 1;
  row.step = 0;
}

function drawRow() {
  const found = states();
  row.step = Math.min(row.step, Math.max(0, found.length - 1));
  at("query").disabled = at("mask").value === "full";
  const now = found[row.step];
  drawKeys(now);
  drawStates(found);
  drawBars(found, now);
  at("said").textContent = said(found, now);
  at("back").disabled = row.step === 0;
  at("next").disabled = row.step >= found.length - 1;
}

// The table of keys: inputs for scores and values, and the weights of the current tile.
function drawKeys(now) {
  const query = number("query"), tile = number("tile");
  const head = cells("th", "key", (key) => `${key}`);
  const scores = cells("td", "score s", (key) => input("scores", key));
  const values = cells("td", "value v", (key) => input("values", key));
  const inTile = (key) => now && key >= now.start && key < now.end;
  const weights = cells("td", "e^(s − m)", (key) => (inTile(key) ? rounded(now.p[key - now.start]) : ""));
  for (const line of [head, scores, values, weights]) {
    row.scores.forEach((_, key) => {
      const place = line.children[key + 1];
      if (key % tile === 0) place.classList.add("edge");
      if (inTile(key)) place.classList.add("now");
      if (!arithmetic.sees(maskNow(), query, key)) place.classList.add("hidden");
    });
  }
  const focused = document.activeElement?.id;
  at("row").replaceChildren(head, scores, values, weights);
  if (focused && at(focused) !== document.activeElement) at(focused)?.focus();
}

function cells(tag, name, content) {
  const line = document.createElement("tr");
  line.append(Object.assign(document.createElement("th"), { textContent: name, scope: "row" }));
  row.scores.forEach((_, key) => {
    const cell = document.createElement(tag);
    cell.append(content(key));
    line.append(cell);
  });
  return line;
}

function input(kind, key) {
  const made = document.createElement("input");
  Object.assign(made, { type: "number", step: "0.1", value: row[kind][key], id: `${kind}-${key}` });
  made.setAttribute("aria-label", `${kind === "scores" ? "score" : "value"} of key ${key}`);
  made.addEventListener("change", () => {
    const value = Number(made.value);
    row[kind] = row[kind].map((old, i) => (i === key && Number.isFinite(value) ? value : old));
    drawRow();
  });
  return made;
}

function drawStates(found) {
  const lines = found.map((state, step) => {
    const known = step <= row.step;
    const words = [state.m, state.alpha, state.l, state.o, arithmetic.divided(state)];
    return [`${state.start} to ${state.end - 1}`, ...words.map((x) => (known ? rounded(x) : "·"))];
  });
  fill("states", ["keys of the tile", "m", "a", "l", "o", "o / l"], lines);
  [...at("states").children].forEach((line, index) => {
    if (index - 1 === row.step) line.classList.add("now");
    if (index - 1 > row.step) line.classList.add("later");
  });
}

// l before, rescaled, and with the tile's own sum added.
function drawBars(found, now) {
  if (!now) return at("bars").replaceChildren();
  const before = row.step ? found[row.step - 1].l : 0;
  const kept = now.alpha * before;
  const largest = Math.max(...found.map((state) => state.l), before, 1);
  const scale = (widthOf("bars") - 56) / largest;
  const bar = (x, size, kind) =>
    element("rect", { x: 48 + x * scale, y: 20, width: Math.max(0, size * scale - 1), height: 22, class: kind });
  show("bars", "the denominator", 58, [
    text(0, 12, `l: kept ${rounded(kept)} of ${rounded(before)}, added ${rounded(now.l - kept)}`),
    text(0, 36, "l", { class: "quiet" }),
    element("g", { class: "s2" }, bar(0, kept, "box")),
    element("g", { class: "s3" }, bar(kept, now.l - kept, "box")),
    bar(0, before, "ghost"),
  ]);
}

function said(found, now) {
  if (!now) return "This row sees no key: its output is 0.";
  const previous = found[row.step - 1];
  const rescaled = previous
    ? `m goes from ${rounded(previous.m)} to ${rounded(now.m)}, so l and o so far are multiplied by ${rounded(now.alpha)}. `
    : "";
  const done = row.step === found.length - 1
    ? `Done: O = o / l = ${rounded(arithmetic.divided(now))}, which is the softmax of the whole row times the values: ${rounded(whole())}.`
    : "";
  return `Tile ${row.step + 1} of ${found.length}. ${rescaled}${done}`;
}

// The row at once, as a check of the tiles.
function whole() {
  const query = number("query"), seen = row.scores.map((_, key) => arithmetic.sees(maskNow(), query, key));
  const most = Math.max(...row.scores.filter((_, key) => seen[key]));
  const p = row.scores.map((s, key) => (seen[key] ? Math.exp(s - most) : 0));
  const total = p.reduce((sum, x) => sum + x, 0);
  return p.reduce((sum, x, key) => sum + x * row.values[key], 0) / total;
}

function stop() {
  clearInterval(row.timer);
  row.timer = 0;
  at("play").textContent = "Play";
}

function play() {
  if (row.timer) return stop();
  row.step = 0;
  drawRow();
  at("play").textContent = "Stop";
  row.timer = setInterval(() => {
    if (row.step >= states().length - 1) return stop();
    row.step += 1;
    drawRow();
  }, 1200);
}

// ---- a call --------------------------------------------------------------------------------

const gpuNow = () => GPUS[at("gpu").selectedIndex];

const callNow = (n = 2 ** number("length")) => ({
  n, heads: number("heads"), dim: number("dim"), causal: at("causal").checked,
  blockM: number("block-m"), blockN: number("block-n"),
});

let planned = null;

function drawCall() {
  const gpu = gpuNow();
  at("source").textContent = `Rates of ${gpu.name}: ${gpu.source}. 16-bit inputs, batch of 1.`;
  planned = arithmetic.schedule(callNow(), gpu.num_sms);
  at("time").max = planned.total - 1;
  at("time").value = Math.min(number("time"), planned.total - 1);
  at("sm").max = gpu.num_sms - 1;
  drawGrid();
  drawBill();
  drawRoof();
}

function drawGrid() {
  const gpu = gpuNow(), call = callNow(), now = number("time"), chosen = chosenSm();
  showOutputs();
  const byHead = Math.max(0, gpu.num_sms - call.heads);
  at("tasks").textContent =
    `${call.heads} tasks by B × H would leave ${byHead} of ${gpu.num_sms} SMs idle. With tiles of ` +
    `queries there are ${planned.runs.length}: ${planned.idle} idle, and the busiest SM works ` +
    `${rounded(planned.imbalance, 3)} times as long as the mean.`;
  const running = new Map(planned.runs.filter((run) => run.start <= now && now < run.end).map((run) => [run.sm, run]));
  const columns = Math.max(8, Math.min(24, Math.floor(widthOf("grid") / 36)));
  const size = widthOf("grid") / columns, parts = [];
  for (let sm = 0; sm < gpu.num_sms; sm++) {
    const x = (sm % columns) * size + 1, y = Math.floor(sm / columns) * size + 1, run = running.get(sm);
    const box = element("rect", { x, y, width: size - 3, height: size - 3, rx: 3,
      class: run ? "busy" : "idle" });
    if (run) box.setAttribute("fill", `hsl(${(run.head * 137) % 360} 45% ${45 + ((run.row / call.blockM) % 5) * 4}%)`);
    box.append(element("title", {}, holds(sm, run, now)));
    box.addEventListener("click", () => { at("sm").value = sm; drawGrid(); });
    parts.push(box);
    if (sm === chosen) parts.push(element("rect", { x, y, width: size - 3, height: size - 3, rx: 3, class: "chosen" }));
  }
  show("grid", "SMs and what they hold", Math.ceil(gpu.num_sms / columns) * size + 2, parts);
  const own = planned.runs.filter((run) => run.sm === chosen);
  at("held").textContent = `${holds(chosen, running.get(chosen), now)}. In all it holds ${own.length} ` +
    `${own.length === 1 ? "tile" : "tiles"} of queries, one after the other.`;
}

const chosenSm = () => Math.min(Math.max(0, Math.floor(number("sm")) || 0), gpuNow().num_sms - 1);

function holds(sm, run, now) {
  if (!run) return `SM ${sm} is idle`;
  return `SM ${sm} holds rows ${run.row} to ${run.stop - 1} of head ${run.head} and is at key tile ` +
    `${now - run.start + 1} of ${run.tiles}`;
}

const LENGTHS = Array.from({ length: 9 }, (_, index) => 2 ** (9 + index));

function drawBill() {
  const gpu = gpuNow(), here = callNow();
  const all = LENGTHS.map((n) => arithmetic.bills(callNow(n), gpu));
  const lines = all[0].map((bill, index) => ({
    name: bill.method, kind: "line", series: `s${index}`,
    points: LENGTHS.map((n, i) => [n, arithmetic.sum(all[i][index].stages, "bytes")]),
  }));
  const found = arithmetic.bills(here, gpu);
  const marks = found.map((bill, index) => ({
    name: bill.method, series: `s${index}`, below: index === 2,
    at: [here.n, arithmetic.sum(bill.stages, "bytes")],
  }));
  logChart("bytes", "bytes of slow memory against N", { lines, marks, xName: "N", yName: "bytes",
    xWords: short, yWords: (n) => human(n, "B", 1e3, ["", "k", "M", "G", "T", "P"]) });
  const flash = arithmetic.sum(found[2].stages, "bytes");
  fill("bill", ["method", "bytes", "against flash", "FLOPs"], found.map((bill) => {
    const own = arithmetic.sum(bill.stages, "bytes");
    return [bill.method, bytes(own), `${rounded(own / flash, 3)}×`,
      human(arithmetic.sum(bill.stages, "flops"), "FLOP", 1e3, ["", "k", "M", "G", "T", "P"])];
  }));
}

function drawRoof() {
  const gpu = gpuNow(), call = callNow(), needed = arithmetic.neededFlops(call);
  const ridge = gpu.flops / gpu.bandwidth;
  at("ridge").textContent = `${gpu.name} multiplies ${rounded(gpu.flops / 1e12, 3)} TFLOP/s and moves ` +
    `${rounded(gpu.bandwidth / 1e12, 3)} TB/s: below ${rounded(ridge, 3)} FLOP a byte memory is the limit. ` +
    "Only FLOPs that the call needs count, so that computing again earns no height.";
  const found = arithmetic.bills(call, gpu).map((bill) => ({ bill, ...arithmetic.roof(bill, gpu) }));
  const marks = found.map((own, index) => ({
    name: own.bill.method, series: `s${index}`, below: index !== 2,
    at: [needed / own.bytes, needed / own.bound / 1e6],
  }));
  const widest = Math.max(ridge * 4, ...marks.map((mark) => mark.at[0] * 2));
  const peak = gpu.flops / 1e12, low = Math.min(ridge / 64, ...marks.map((mark) => mark.at[0] / 2));
  const softmax = (4 * call.dim * gpu.exps) / 1e12;
  const lines = [
    { name: "roof", kind: "roof", points: [[low, (low * gpu.bandwidth) / 1e12], [ridge, peak], [widest, peak]] },
    { name: "exponentials", kind: "dashed", points: [[low, softmax], [widest, softmax]] },
  ];
  logChart("roofline", "the methods under the roof", { lines, marks, xName: "needed FLOP per byte (dashed: exponentials of one pass)",
    yName: "TFLOP/s at best", xWords: short, yWords: rounded });
  fill("limits", ["method", "at best", "limited by", "memory", "products", "exponentials"],
    found.map((own) => [own.bill.method, micros(own.bound), own.limiter, micros(own.memory),
      micros(own.products), micros(own.exps)]));
}

// ---- timelines -----------------------------------------------------------------------------

function drawTimelines() {
  const load = number("load"), compute = number("compute"), tiles = number("tiles");
  const one = arithmetic.pipelined(load, compute, tiles, 1);
  const several = arithmetic.pipelined(load, compute, tiles, number("stages"));
  gantt("serial", "one buffer", one, arithmetic.ends(one));
  gantt("overlapped", `${number("stages")} buffers`, several, arithmetic.ends(one));
  const times = [number("scores-us"), number("softmax-us"), number("values-us")];
  const alone = arithmetic.pingPong(...times, 4, 1), together = arithmetic.pingPong(...times, 2, 2);
  gantt("alone", "one warpgroup, 4 tiles", alone, arithmetic.ends(alone));
  gantt("together", "two warpgroups, 2 tiles each", together, arithmetic.ends(alone));
}

// ---- controls ------------------------------------------------------------------------------

function showOutputs() {
  for (const output of document.querySelectorAll("output")) {
    const range = output.previousElementSibling;
    output.textContent = range.id === "length" ? 2 ** Number(range.value) : range.value;
  }
}

function drawAll() {
  showOutputs();
  drawRow();
  drawCall();
  drawTimelines();
}

function whenMoved(ids, draw) {
  for (const id of ids) at(id).addEventListener("input", () => { showOutputs(); draw(); });
}

function step(by) {
  stop();
  row.step = Math.max(0, Math.min(row.step + by, states().length - 1));
  drawRow();
}

function begin() {
  for (const gpu of GPUS) at("gpu").append(new Option(gpu.name));
  at("gpu").selectedIndex = GPUS.findIndex((gpu) => gpu.name === "H200");
  whenMoved(["keys"], () => { stop(); setKeys(number("keys")); showOutputs(); drawRow(); });
  whenMoved(["tile", "mask", "query"], () => { stop(); row.step = 0; drawRow(); });
  whenMoved(["gpu", "length", "heads", "dim", "block-m", "block-n", "causal"], drawCall);
  whenMoved(["time", "sm"], drawGrid);
  whenMoved(["load", "compute", "tiles", "stages", "scores-us", "softmax-us", "values-us"], drawTimelines);
  at("back").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  at("play").addEventListener("click", play);
  at("draw").addEventListener("click", () => {
    const count = row.scores.length;
    stop();
    setKeys(0);
    setKeys(count);
    drawAll();
  });
  at("example").addEventListener("click", () => {
    stop();
    Object.assign(row, EXAMPLE);
    at("mask").value = "full";
    setKeys(4);
    at("tile").value = 2;
    drawAll();
  });
  at("theme").addEventListener("click", nextTheme);
  addEventListener("resize", drawAll);
  drawAll();
}

function nextTheme() {
  const order = ["", "dark", "light"], words = ["as the system", "dark", "light"];
  const next = (order.indexOf(document.documentElement.dataset.theme ?? "") + 1) % 3;
  if (next) document.documentElement.dataset.theme = order[next];
  else delete document.documentElement.dataset.theme;
  at("theme").textContent = `Colours: ${words[next]}`;
}

begin();
