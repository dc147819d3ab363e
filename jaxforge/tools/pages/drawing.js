// Drawing of charts with uPlot: numbers, curves, marks, heat maps. `page.js` follows in the same
// function.
"use strict";

const $ = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...inside) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...inside);
  return element;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const FEW = 8, MANY = 16, DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]], POINTER = "pointer";

let data = JSON.parse($("data").textContent);
const state = { axis: data.axis, smooth: 2, view: "close-up", range: null, hidden: new Set(), log: new Set() };

// Numbers

const KINDS = { f4: Float32Array, f8: Float64Array, i4: Int32Array };
const decoded = (text) => {
  const bytes = Uint8Array.from(atob(text.slice(3)), (character) => character.charCodeAt(0));
  return new KINDS[text.slice(0, 2)](bytes.buffer);
};
let columns, along;
const decode = () => {
  columns = data.columns.map(decoded);
  along = (data.runs ?? []).map((run) =>
    Object.fromEntries(Object.entries(run.along).map(([axis, text]) => [axis, decoded(text)])));
  for (const chart of data.charts) for (const curve of chart.curves) {
    curve.ys = decoded(curve.y);
    curve.smoothYs = curve.smooth && decoded(curve.smooth[1]);
  }
};

const after = (xs, x) => { // index of the first value that is not below x
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
};
const place = (run, step) => {
  if (state.axis === "steps") return step;
  const { steps, [state.axis]: values } = along[run];
  const i = Math.min(Math.max(after(steps, step), 1), steps.length - 1);
  if (i < 1) return values[0];
  const part = (step - steps[i - 1]) / (steps[i] - steps[i - 1]);
  return values[i - 1] + Math.min(Math.max(part, 0), 1) * (values[i] - values[i - 1]);
};
const places = (chart, curve, column) => {
  if (chart.x?.log) return Array.from(columns[column], Math.log10);
  if (chart.x || state.axis === "steps") return Array.from(columns[column]);
  return Array.from(columns[column], (step) => place(curve.run, step));
};
const nullable = (values) => Array.from(values, (value) => (Number.isFinite(value) ? value : null));

// Moving average over the same number of values on either side, so that the start is not blurred.
// Spikes of a single value are ignored.
const middle = (a, b, c) => (a === null || b === null || c === null ? b : Math.max(Math.min(a, b), Math.min(Math.max(a, b), c)));
const smoothed = (logged, percent) => {
  const values = logged.map((value, i) => middle(logged[i - 1] ?? value, value, logged[i + 1] ?? value));
  const reach = Math.round((values.length * percent) / 200), sums = [0], counts = [0];
  values.forEach((value, i) => {
    sums.push(sums[i] + (value ?? 0));
    counts.push(counts[i] + (value !== null));
  });
  return values.map((value, i) => {
    const near = Math.min(reach, i), low = i - near, high = Math.min(values.length, i + near + 1);
    return value === null || near === 0 ? value : (sums[high] - sums[low]) / (counts[high] - counts[low]);
  });
};

const exact = (v) => {
  if (v === null || v === undefined) return "not finite";
  if (Number.isInteger(v) || Math.abs(v) >= 1e4) return Math.round(v).toLocaleString("en-US");
  if (Math.abs(v) >= 1e-3) return v.toPrecision(5);
  return v.toExponential(3).replace(/\.?0*e/, "e").replace("e+", "e");
};
const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]];
const ticks = (values) => {
  const top = Math.max(...values.filter((value) => value !== null).map(Math.abs), 0);
  const [by, suffix] = UNITS.find(([least]) => top >= least) ?? [1, ""];
  const unit = suffix === "K" ? 1e3 : by;
  return values.map((value) => value === null ? "" : value === 0 ? "0" : top < 1e-3
    ? value.toExponential().replace("e+", "e") : `${+(value / unit).toPrecision(6)}${suffix}`);
};

// Parts of a chart

const lookOf = (curve) => curve.shade === undefined
  ? { stroke: colour(`c${curve.colour % FEW}`), dash: DASHES[Math.floor(curve.colour / FEW) % DASHES.length] }
  : { stroke: mixed(curve.shade), dash: [] };
const mixed = (part) => {
  const [from, to] = ["c0", "c5"].map((name) => parseInt(colour(name).slice(1), 16));
  const channel = (shift) => Math.round(((from >> shift) & 255) * (1 - part) + ((to >> shift) & 255) * part);
  return `#${[16, 8, 0].map((shift) => channel(shift).toString(16).padStart(2, "0")).join("")}`;
};

// Curves in the format of uPlot: a noisy curve is drawn faint, with its moving average above it.
const linesOf = (chart, curves) => {
  const faint = state.smooth > 0 && curves.length <= FEW;
  const lines = [];
  for (const curve of curves) {
    const { stroke, dash } = lookOf(curve);
    const xs = places(chart, curve, curve.x), ys = nullable(curve.ys);
    const noisy = state.smooth > 0 && chart.smooth && !curve.dots && ys.length > 20;
    const raw = { curve, xs, ys, raw: true, line: { stroke, dash, width: 1.5 } };
    if (curve.dots && chart.wide && !chart.x) raw.line.paths = () => null;
    raw.line.points = { show: Boolean(curve.dots) || ys.length < 3, size: curves.length > MANY ? 3 : 6, fill: stroke };
    if (!noisy) { lines.push(raw); continue; }
    const base = curve.smooth ? [places(chart, curve, curve.smooth[0]), nullable(curve.smoothYs)] : [xs, ys];
    if (faint) lines.push({ ...raw, faint: true, line: { stroke: `${stroke}${curves.length > 2 ? "30" : "48"}`, width: 1, points: { show: false } } });
    lines.push({ curve, xs: base[0], ys: smoothed(base[1], state.smooth), line: { stroke, dash, width: 2, points: { show: false } } });
  }
  return lines.sort((a, b) => Boolean(b.faint) - Boolean(a.faint)); // faint curves are drawn first
};

const rangeOf = (chart, lines) => () => {
  const [min, max] = (chart.x ? null : state.range) ?? [-Infinity, Infinity], values = [], firm = [];
  const close = state.view === "close-up" && chart.smooth && !state.range && lines.some(({ xs }) => xs.length > 50);
  for (const { xs, ys, raw } of lines) {
    const late = close ? xs[0] + (xs.at(-1) - xs[0]) / 10 : min;
    for (let i = after(xs, late); i < xs.length && xs[i] <= max; i++) {
      if (ys[i] !== null) (raw && state.view !== "all" ? values : firm).push(ys[i]);
    }
  }
  values.sort((a, b) => a - b);
  const many = values.length > 100, at = (part) => values[Math.round(part * (values.length - 1))];
  if (values.length) firm.push(at(many ? 0.01 : 0), at(many ? 0.99 : 1));
  if (!firm.length) return [0, 1];
  let low = firm.reduce((a, b) => Math.min(a, b));
  const high = firm.reduce((a, b) => Math.max(a, b));
  if (state.log.has(chart.title) && high > 0) {
    low = firm.reduce((a, b) => (b > 0 ? Math.min(a, b) : a), high);
    const air = Math.max((high / low) ** 0.04, 1.02);
    return [low / air, high * air];
  }
  const air = 0.05 * (high - low) || 0.1 * Math.abs(high) || 1;
  return [chart.zero && low >= 0 ? 0 : low - air, high + air];
};

// Round ticks of a logarithmic axis: equal ratios, or equal distances within a power of ten
const logSplits = (plot, axis, low, high) => {
  const ticks = [], power = (value) => 10 ** Math.floor(Math.log10(value));
  if (high < 10 * low) {
    const rough = (high - low) / 5, step = [1, 2, 5, 10].find((m) => m * power(rough) >= rough) * power(rough);
    for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(i * step);
  } else {
    const few = high > 1e4 * low ? [1] : [1, 2, 5];
    for (let at = power(low); at <= high; at *= 10) ticks.push(...few.map((m) => m * at));
  }
  return ticks.filter((value) => value >= low && value <= high);
};

// The nearest point of a curve without a point at the pointer
const nearest = (plot, series, i) => {
  const ys = plot.data[series], xs = plot.data[0];
  if (ys[i] !== undefined) return i;
  let low = i, high = i;
  while (low > 0 && ys[low] === undefined) low--;
  while (high < ys.length - 1 && ys[high] === undefined) high++;
  if (ys[high] === undefined) return low;
  return ys[low] === undefined || xs[high] - xs[i] < xs[i] - xs[low] ? high : low;
};

const common = () => ({ stroke: colour("soft"), font: "12px system-ui, sans-serif", ticks: { stroke: colour("hair"), width: 1, size: 5 } });
const some = (values) => values.filter((_, i) => i % Math.ceil(values.length / 12) === 0);
const axesOf = (chart, yTicks, lines = []) => {
  const own = chart.x && { // ticks at the chart's own points
    label: chart.x.label, labelSize: 20, labelFont: common().font, labelGap: 0,
    splits: () => some([...new Set(lines.filter(({ curve }) => curve.dots).flatMap(({ xs }) => xs))].sort((a, b) => a - b)),
    values: (plot, values) => values.map((value) => chart.x.names?.[value] ?? ticks([chart.x.log ? Number((10 ** value).toPrecision(3)) : value])[0]),
  };
  return [
    { ...common(), grid: { show: false }, size: 30, values: (plot, values) => ticks(values), ...own },
    { ...common(), grid: { stroke: colour("hair"), width: 1 }, size: 56, ...yTicks },
  ];
};
const zoom = (range) => {
  state.range = range;
  for (const panel of panels) if (panel.plot && !panel.chart.x) rezoom(panel.plot);
};
const rezoom = (plot) => {
  const xs = plot.data[0];
  const [min, max] = state.range ?? [xs[0], xs.at(-1)];
  plot.setScale("x", { min, max: max > min ? max : min + 1 });
};
const pointerOf = (chart) => ({
  drag: { x: !chart.x, y: false, setScale: false },
  focus: { prox: 24 },
  bind: { dblclick: () => () => { if (!chart.x) zoom(null); return null; } },
  ...(chart.x ? {} : { sync: { key: POINTER, filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } } }),
});
const selected = (plot) => {
  const { left, width } = plot.select;
  if (width > 0) zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
};

// Marks: dashed lines for resumes, triangles for skipped steps and values that are not finite
const drawMarks = (chart, curves) => (plot) => {
  if (curves.length > MANY) return;
  const { ctx, bbox: { left, top, width, height } } = plot, unit = devicePixelRatio;
  const at = (run, step) => plot.valToPos(place(run, step), "x", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(left - 5 * unit, top, width + 10 * unit, height);
  ctx.clip();
  ctx.setLineDash([3 * unit, 4 * unit]);
  ctx.globalAlpha = 0.7;
  for (const i of new Set(curves.map((curve) => curve.run))) {
    ctx.strokeStyle = colour(data.runs.length > 1 ? `c${i % FEW}` : "soft");
    for (const step of data.runs[i].resumes) {
      ctx.beginPath();
      ctx.moveTo(at(i, step), top);
      ctx.lineTo(at(i, step), top + height);
      ctx.stroke();
    }
  }
  ctx.globalAlpha = 1;
  ctx.fillStyle = colour("alarm");
  const triangle = (x, y, side) => {
    ctx.beginPath();
    ctx.moveTo(x - 5 * unit, y);
    ctx.lineTo(x + 5 * unit, y);
    ctx.lineTo(x, y + side * 8 * unit);
    ctx.fill();
  };
  for (const curve of curves) {
    for (const step of curve.bad ?? []) triangle(at(curve.run, step), top, 1);
    for (const step of curve.skips ? data.runs[curve.run].skips : []) triangle(at(curve.run, step), top + height, -1);
  }
  ctx.restore();
};

const drawChart = (panel) => {
  const { chart } = panel;
  const curves = chart.curves.filter((curve) => !state.hidden.has(data.runs?.[curve.run]?.name));
  const lines = linesOf(chart, curves), log = state.log.has(chart.title);
  panel.curves = lines.map(({ curve }) => curve);
  if (!lines.length) return null;
  const showValues = (plot) => tell(panel, plot);
  const focus = (plot, i) => {
    panel.focused = i === null ? null : panel.curves[i - 1];
    tell(panel, plot);
  };
  return new uPlot({
    ...sizeOf(panel),
    legend: { show: false },
    cursor: { ...pointerOf(chart), dataIdx: nearest, points: { size: 7 } },
    focus: { alpha: 0.25 },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: rangeOf(chart, lines) } },
    axes: axesOf(chart, { values: (plot, values) => ticks(values), ...(log ? { splits: logSplits, filter: (plot, values) => values } : {}) }, lines),
    series: [{}, ...lines.map(({ line, curve }) => ({ ...line, label: curve.label }))],
    hooks: { setSelect: [selected], setCursor: [showValues], setSeries: [focus], draw: chart.x ? [] : [drawMarks(chart, curves)] },
  }, uPlot.join(lines.map(({ xs, ys }) => [xs, ys])), panel.frame);
};

// The legend shows the values at the pointer
const unit = () => data.axes[state.axis].split(" ")[0];
const tell = (panel, plot) => {
  const { idx, idxs } = plot.cursor, values = new Map();
  const pointed = idx !== null && idx !== undefined;
  if (pointed) panel.curves.forEach((curve, i) => values.set(curve, plot.data[i + 1][idxs[i + 1]]));
  for (const [curve, { entry, value }] of panel.entries) {
    entry.hidden = !panel.curves.includes(curve) || (panel.entries.size > MANY && curve !== panel.focused);
    value.textContent = exact(values.has(curve) ? values.get(curve) : curve.last);
  }
  const along = panel.chart.x, x = pointed && (along?.log ? 10 ** plot.data[0][idx] : plot.data[0][idx]);
  panel.where.textContent = pointed ? `${along?.label ?? unit()} ${along?.names?.[x] ?? exact(x)}` : "";
  if (pointed && panel.focused?.name) panel.where.textContent += `, ${panel.focused.name}`;
};

// Heat maps: a column for each logged step, experts downwards

const levelsOf = async (map) => {
  const packed = Uint8Array.from(atob(map.levels), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};
const pictureOf = (levels, width, height) => {
  const canvas = make("canvas", { width, height }), context = canvas.getContext("2d");
  const picture = context.createImageData(width, height), bands = data.bands;
  levels.forEach((level, i) => {
    const band = bands[level];
    if (band) picture.data.set([...(dark.matches ? band.dark : band.light), 255], 4 * i);
  });
  context.putImageData(picture, 0, 0);
  return canvas;
};
const drawMap = (panel) => {
  const { chart: map } = panel;
  if (!map.bytes) {
    levelsOf(map).then((bytes) => { map.bytes = bytes; redraw(panel); });
    return null;
  }
  const xs = Array.from(columns[map.x], (step) => place(map.run, step)), n = xs.length;
  const edge = (i) => (i <= 0 ? xs[0] : i >= n ? xs[n - 1] : (xs[i - 1] + xs[i]) / 2);
  const [least, most] = [map.least, map.most].map((text) => nullable(decoded(text)));
  const picture = pictureOf(map.bytes, n, map.experts);
  const paint = (plot) => {
    const { ctx, bbox: { left, top, width, height } } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    const air = n === 1 ? width / 2 : 0;
    for (let i = 0; i < n; i++) {
      const from = Math.floor(plot.valToPos(edge(i), "x", true) - air), to = Math.ceil(plot.valToPos(edge(i + 1), "x", true) + air);
      ctx.drawImage(picture, i, 0, 1, map.experts, from, top, Math.max(to - from, 1), height);
    }
    ctx.restore();
  };
  const showValues = (plot) => {
    const { idx, top } = plot.cursor, column = idx ?? n - 1;
    const row = Math.floor(plot.posToVal(top ?? -1, "y")), level = map.bytes[row * n + column];
    const pointed = idx !== null && idx !== undefined, inside = row >= 0 && row < map.experts;
    panel.where.textContent = pointed ? `${unit()} ${exact(xs[column])}` : "";
    if (pointed && inside) panel.where.textContent += `, expert ${row}: ${data.bands[level]?.name ?? "not finite"}`;
    panel.entries.get("least").value.textContent = exact(least[column]);
    panel.entries.get("most").value.textContent = exact(most[column]);
  };
  return new uPlot({
    ...sizeOf(panel),
    legend: { show: false },
    cursor: { ...pointerOf(map), points: { show: false } },
    scales: { x: { time: false }, y: { range: () => [0, map.experts], dir: -1 } },
    axes: axesOf(map, { grid: { show: false }, incrs: [1, 2, 4, 8, 16, 32, 64, 128, 256] }),
    series: [{}, { stroke: "transparent", points: { show: false } }],
    hooks: { setSelect: [selected], setCursor: [showValues], drawClear: [paint] },
  }, [xs, least], panel.frame);
};
