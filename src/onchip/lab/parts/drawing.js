// Charts as SVG, drawn as wide as their place so that text keeps its size on a phone.
function element(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function show(place, title, height, children) {
  const width = widthOf(place);
  const picture = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.append(element("title", {}, title), ...children);
  document.getElementById(place).replaceChildren(picture);
}

const widthOf = (place) => Math.max(280, document.getElementById(place).clientWidth);

const text = (x, y, words, more = {}) => element("text", { x, y, ...more }, words);

const rounded = (x, digits = 4) => String(Number(x.toPrecision(digits)));

function human(amount, unit, base, prefixes) {
  let value = amount, at = 0;
  while (value >= base && at < prefixes.length - 1) [value, at] = [value / base, at + 1];
  return `${rounded(value, 3)} ${prefixes[at]}${unit}`;
}

const bytes = (n) => human(n, "B", 1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi"]);
const short = (n) => human(n, "", 1e3, ["", "k", "M", "G"]).replace(" ", "");
const micros = (us) => human(us * 1e3, "s", 1e3, ["n", "µ", "m", ""]);

// Loads and computation over time: a lane for each unit.
function gantt(place, name, spans, total) {
  const width = widthOf(place), margin = 96, row = 26;
  const lanes = [...new Set(spans.map((span) => span.lane))];
  const scale = (width - margin - 8) / total;
  const parts = [text(0, 14, `${name}: ${rounded(arithmetic.ends(spans))} µs`)];
  lanes.forEach((lane, index) => {
    const top = 24 + index * (row + 4);
    parts.push(text(0, top + 17, lane, { class: "quiet" }));
    for (const span of spans.filter((x) => x.lane === lane)) {
      const left = margin + span.start * scale, wide = (span.end - span.start) * scale;
      const box = element("rect", { x: left, y: top, width: Math.max(wide - 1, 0.5), height: row,
        rx: 2, class: "box" });
      box.append(element("title", {}, `${lane} ${span.label}: ${rounded(span.start)} to ${rounded(span.end)} µs`));
      const group = element("g", { class: index ? "s3" : "s2" }, box);
      if (wide > 16) {
        group.append(text(left + wide / 2, top + 17, span.label, { "text-anchor": "middle", class: "on" }));
      }
      parts.push(group);
    }
  });
  show(place, name, 30 + lanes.length * (row + 4), parts);
}

// A chart with two logarithmic axes. Lines: {name, points: [[x, y]], kind, series}.
function logChart(place, title, { lines, marks, xName, yName, xWords, yWords }) {
  const width = widthOf(place), height = 320, left = 64, right = 12, top = 22, bottom = 40;
  const every = lines.flatMap((line) => line.points).concat(marks.map((mark) => mark.at));
  const range = (axis) => {
    const all = every.map((point) => Math.log10(point[axis]));
    return [Math.floor(Math.min(...all)), Math.ceil(Math.max(...all))];
  };
  const [x0, x1] = range(0), [y0, y1] = range(1);
  const atX = (x) => left + ((Math.log10(x) - x0) / (x1 - x0)) * (width - left - right);
  const atY = (y) => height - bottom - ((Math.log10(y) - y0) / (y1 - y0)) * (height - top - bottom);
  const parts = [];
  for (let x = x0; x <= x1; x++) {
    parts.push(element("line", { x1: atX(10 ** x), x2: atX(10 ** x), y1: top, y2: height - bottom, class: "axis" }));
    const anchor = x === x1 ? "end" : "middle";
    parts.push(text(atX(10 ** x), height - bottom + 16, xWords(10 ** x), { "text-anchor": anchor, class: "quiet" }));
  }
  for (let y = y0; y <= y1; y++) {
    parts.push(element("line", { x1: left, x2: width - right, y1: atY(10 ** y), y2: atY(10 ** y), class: "axis" }));
    parts.push(text(left - 6, atY(10 ** y) + 4, yWords(10 ** y), { "text-anchor": "end", class: "quiet" }));
  }
  parts.push(text(width - right, height - 6, xName, { "text-anchor": "end" }), text(0, 12, yName));
  for (const line of lines) {
    const path = line.points.map(([x, y]) => `${atX(x)},${atY(y)}`).join(" ");
    parts.push(element("polyline", { points: path, class: `${line.kind} ${line.series ?? ""}` }));
  }
  for (const mark of marks) {
    const [x, y] = mark.at;
    const dot = element("circle", { cx: atX(x), cy: atY(y), r: 5, class: `dot ${mark.series}` });
    dot.append(element("title", {}, mark.name));
    const end = atX(x) > width * 0.6;
    parts.push(dot, text(atX(x) + (end ? -9 : 9), atY(y) + (mark.below ? 18 : -8), mark.name,
      { "text-anchor": end ? "end" : "start" }));
  }
  show(place, title, height, parts);
}

function fill(id, head, rows) {
  const cell = (tag, words) => Object.assign(document.createElement(tag), { textContent: words });
  const line = (tag, words) => {
    const made = document.createElement("tr");
    made.append(...words.map((word) => cell(tag, word)));
    return made;
  };
  document.getElementById(id).replaceChildren(line("th", head), ...rows.map((row) => line("td", row)));
}
