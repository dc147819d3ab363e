// Charts of a page, drawn with uPlot when they come near the window; controls and sortable tables.
"use strict";

const $ = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...inside) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...inside);
  return element;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const FEW = 8, MANY = 16, DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];

const data = JSON.parse($("data").textContent);
let panels = [];
const state = { axis: data.axis, smooth: 2, view: "close-up", range: null, hidden: new Set(), log: new Set() };

// Numbers

const KINDS = { f4: Float32Array, f8: Float64Array, i4: Int32Array };
const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
const decoded = (text) => new KINDS[text.slice(0, 2)](bytesOf(text.slice(3)).buffer);
const nullable = (text) => Array.from(decoded(text), (value) => (Number.isFinite(value) ? value : null));
const columns = data.columns.map(decoded);
const along = data.runs.map((run) =>
  Object.fromEntries(Object.entries(run.along).map(([axis, text]) => [axis, decoded(text)])));
const position = (run, step) => { // of a step on the axis: linear between the points of `along`
  if (state.axis === "steps") return step;
  const { steps, [state.axis]: values } = along[run];
  let low = 0, high = steps.length - 1; // steps[low] <= step <= steps[high], unless it is outside
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  const share = high > low ? (step - steps[low]) / (steps[high] - steps[low]) : 0;
  return values[low] + Math.min(Math.max(share, 0), 1) * (values[high] - values[low]);
};
const positions = (run, column) => Array.from(columns[column], (x) => position(run, x));

// Moving average over the same number of values on either side, so that the start is not blurred.
// It averages medians of three values, so that spikes of a single value do not move it.
const smoothed = (logged, percent) => {
  const values = logged.map((value, i) => {
    const three = [logged[i - 1] ?? value, value, logged[i + 1] ?? value];
    return value === null ? null : three.sort((a, b) => a - b)[1];
  });
  const reach = Math.round((values.length * percent) / 200), sums = [0], counts = [0];
  values.forEach((value, i) => {
    sums.push(sums[i] + (value ?? 0));
    counts.push(counts[i] + (value !== null));
  });
  return values.map((value, i) => {
    const near = Math.min(reach, i), low = i - near, high = Math.min(values.length, i + near + 1);
    return value === null || !near ? value : (sums[high] - sums[low]) / (counts[high] - counts[low]);
  });
};

const small = (v, digits) => v.toExponential(digits).replace(/\.?0*e/, "e").replace("e+", "e");
const exact = (v) => {
  if (v === null || v === undefined) return "not finite";
  if (Number.isInteger(v) || Math.abs(v) >= 1e4) return Math.round(v).toLocaleString("en-US");
  return Math.abs(v) < 1e-3 ? small(v, 3) : v.toPrecision(5);
};
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 6 });
const tick = (v) => {
  if (v && Math.abs(v) < 1e-3) return small(v, 3);
  return Math.abs(v) < 1e4 ? String(+v.toPrecision(6)) : compact.format(v);
};
const ticks = (plot, values) => values.map((value) => (value === null ? "" : tick(value)));

// Curves in the format of uPlot: a noisy curve is drawn faint, with its moving average above it.

const lookOf = ({ colour: index, shade }) => (shade === undefined
  ? { stroke: colour(`c${index % FEW}`), dash: DASHES[Math.floor(index / FEW) % DASHES.length] }
  : { stroke: `color-mix(in srgb, ${colour("c5")} ${100 * shade}%, ${colour("c0")})` });
const linesOf = (chart) => {
  const curves = chart.curves.filter((curve) => !state.hidden.has(data.runs[curve.run]?.name)), lines = [];
  for (const curve of curves) {
    const look = lookOf(curve), xs = positions(curve.run, curve.x), ys = nullable(curve.y);
    const points = { show: curve.dots || ys.length < 3, size: curves.length > MANY ? 3 : 6, fill: look.stroke };
    const raw = { curve, xs, ys, raw: true, line: { ...look, width: 1.5, points } };
    if (curve.dots && chart.wide) raw.line.paths = () => null;
    if (!state.smooth || !chart.smooth || curve.dots || ys.length <= 20) { lines.push(raw); continue; }
    if (curves.length <= FEW) {
      const stroke = `color-mix(in srgb, ${look.stroke} ${curves.length > 2 ? 19 : 28}%, transparent)`;
      lines.unshift({ ...raw, line: { stroke, width: 1, points: { show: false }, class: "unlisted" } });
    }
    const [x, y] = curve.smooth ?? [curve.x, curve.y];
    lines.push({ curve, xs: positions(curve.run, x), ys: smoothed(nullable(y), state.smooth),
      line: { ...look, width: 2, points: { show: false } } });
  }
  return lines;
};

// Range of y: without the first tenth of the run, and without one raw value in fifty
const rangeOf = (chart, lines) => () => {
  const [min, max] = state.range ?? [-Infinity, Infinity], raws = [], values = [];
  const close = state.view === "close-up" && chart.smooth && !state.range && lines.some(({ xs }) => xs.length > 50);
  for (const { xs, ys, raw } of lines) {
    const first = close ? xs[0] + (xs.at(-1) - xs[0]) / 10 : min;
    const seen = ys.filter((y, i) => y !== null && xs[i] >= first && xs[i] <= max);
    for (const y of seen) (raw && state.view !== "all" ? raws : values).push(y);
  }
  raws.sort((a, b) => a - b);
  const outer = raws.length > 100 ? 0.01 : 0, last = raws.length - 1;
  if (raws.length) values.push(raws[Math.round(outer * last)], raws[Math.round((1 - outer) * last)]);
  if (!values.length) return [0, 1];
  const least = (numbers) => numbers.reduce((a, b) => Math.min(a, b), Infinity);
  const high = -least(values.map((y) => -y)), log = state.log.has(chart.title) && high > 0;
  const low = least(log ? values.filter((y) => y > 0) : values);
  if (log) return [low / Math.max((high / low) ** 0.04, 1.02), high * Math.max((high / low) ** 0.04, 1.02)];
  const air = 0.05 * (high - low) || 0.1 * Math.abs(high) || 1;
  return [low - air, high + air];
};

// Parts of a plot

const font = "12px system-ui, sans-serif";
const optionsOf = (panel, yAxis) => ({
  ...sizeOf(panel),
  legend: { show: panel.chart.curves.length <= MANY },
  cursor: {
    drag: { x: true, y: false, setScale: false },
    focus: { prox: 24 },
    bind: { dblclick: () => () => { zoom(null); return null; } },
    sync: { key: "pointer", filters: { pub: (kind) => /mouse(move|leave)/.test(kind) } },
  },
  focus: { alpha: 0.25 },
  axes: [{ grid: { show: false }, size: 30, values: ticks },
    { grid: { stroke: colour("hair"), width: 1 }, size: 56, values: ticks, ...yAxis }].map((axis) =>
    ({ stroke: colour("soft"), font, ticks: { stroke: colour("hair"), width: 1, size: 5 }, ...axis })),
});
const zoom = (range) => {
  state.range = range;
  for (const { plot } of panels) if (plot) rezoom(plot);
};
const rezoom = (plot) => {
  const [min, max] = state.range ?? [plot.data[0][0], plot.data[0].at(-1)];
  plot.setScale("x", { min, max: max > min ? max : min + 1 });
};
const selected = (plot) => {
  const { left, width } = plot.select;
  if (width > 0) zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
};
const inside = (plot, draw) => {
  const { ctx, bbox: { left, top, width, height } } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left - 5, top, width + 10, height);
  ctx.clip();
  draw(ctx, plot.bbox);
  ctx.restore();
};

// Dashed lines for resumes, triangles for skipped steps (below) and values that are not finite (above)
const drawMarks = (curves) => (plot) => inside(plot, (ctx, { top, height }) => {
  const unit = devicePixelRatio, x = (run, step) => plot.valToPos(position(run, step), "x", true);
  const stroke = (points, shape) => {
    ctx.beginPath();
    for (const point of points) ctx.lineTo(...point);
    ctx[shape]();
  };
  ctx.setLineDash([3 * unit, 4 * unit]);
  for (const run of new Set(curves.map((curve) => curve.run))) {
    ctx.strokeStyle = colour(data.runs.length > 1 ? `c${run % FEW}` : "soft");
    for (const step of data.runs[run].resumes) stroke([[x(run, step), top], [x(run, step), top + height]], "stroke");
  }
  ctx.fillStyle = colour("alarm");
  for (const { run, bad, skips } of curves) {
    for (const [steps, y, tip] of [[bad ?? [], top, 8], [skips ? data.runs[run].skips : [], top + height, -8]]) {
      for (const at of steps.map((step) => x(run, step))) {
        stroke([[at - 5 * unit, y], [at + 5 * unit, y], [at, y + tip * unit]], "fill");
      }
    }
  }
});

const drawChart = (panel) => {
  const { chart } = panel, lines = linesOf(chart), log = state.log.has(chart.title);
  if (!lines.length) return null;
  let focused = null;
  const point = ({ cursor: { idx, idxs }, data: [xs, ...ys] }) => {
    panel.where.textContent = idx == null ? "" : `${unit()} ${exact(xs[idx])}`;
    if (idx == null || focused === null) return;
    const { name, label } = lines[focused - 1].curve;
    panel.where.textContent += `, ${name || label}: ${exact(ys[focused - 1][idxs[focused]])}`;
  };
  const yAxis = log ? { // round values at equal ratios
    splits: (plot, axis, low, high) => Array.from({ length: 6 }, (_, i) => +(low * (high / low) ** (i / 5)).toPrecision(2)),
    filter: (plot, values) => values,
  } : {};
  return new uPlot({
    ...optionsOf(panel, yAxis),
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: rangeOf(chart, lines) } },
    series: [{ class: "unlisted" }, ...lines.map(({ line, curve }) =>
      ({ ...line, label: curve.name || curve.label || " ", value: (plot, y, i, idx) => exact(idx == null ? curve.last : y) }))],
    hooks: {
      setSelect: [selected], setCursor: [point],
      setSeries: [(plot, i) => { focused = i; point(plot); }],
      draw: chart.curves.length > MANY ? [] : [drawMarks(lines.map(({ curve }) => curve))],
    },
  }, uPlot.join(lines.map(({ xs, ys }) => [xs, ys])), panel.frame);
};
const unit = () => data.axes[state.axis].split(" ")[0];

// Panels: a chart with its head

const sizeOf = ({ frame, chart }) => ({ width: frame.clientWidth,
  height: 16 * (chart.wide ? 26 : 12) });
const redraw = (panel) => {
  panel.dirty = !panel.near;
  if (!panel.near) return;
  panel.plot?.destroy();
  panel.plot = drawChart(panel);
  if (panel.plot && state.range) rezoom(panel.plot);
};
const redrawAll = () => panels.forEach(redraw);
const panelAt = (frame) => panels.find((panel) => panel.frame === frame) ?? {};
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const panel = panelAt(target);
    panel.near = isIntersecting;
    if (isIntersecting && panel.dirty) redraw(panel);
  }
}, { rootMargin: "600px" });
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const panel = panelAt(target);
    if (panel.plot && panel.plot.width !== target.clientWidth) panel.plot.setSize(sizeOf(panel));
  }
});
const logSwitch = (panel) => {
  const { title } = panel.chart, box = make("input", { type: "checkbox", checked: state.log.has(title) });
  box.addEventListener("change", () => {
    state.log[box.checked ? "add" : "delete"](title);
    redraw(panel);
  });
  return make("label", {}, box, " log");
};
const movePointer = ({ plot }, event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!move || !plot) return;
  event.preventDefault();
  const xs = plot.data[0], i = Math.min(Math.max((plot.cursor.idx ?? xs.length) + move, 0), xs.length - 1);
  plot.setCursor({ left: plot.valToPos(xs[i], "x"), top: 1 }, true, true);
};
const panelOf = (chart) => {
  const { title, wide } = chart, panel = { chart, dirty: true, near: false, plot: null };
  const bad = chart.curves.reduce((sum, curve) => sum + (curve.bad_count ?? 0), 0);
  panel.where = make("span", { className: "where" });
  panel.frame = make("div", { className: "plot", tabIndex: 0, role: "img", ariaLabel: title });
  panel.frame.addEventListener("keydown", (event) => movePointer(panel, event));
  panel.figure = make("figure", { className: wide ? "wide" : "" }, make("figcaption", {},
    make("h3", {}, title), logSwitch(panel),
    make("span", { className: "note", textContent: bad ? `${bad.toLocaleString("en-US")} not finite` : "" }),
    panel.where), panel.frame);
  return panel;
};
const lay = () => {
  for (const panel of panels) panel.plot?.destroy();
  seen.disconnect();
  resized.disconnect();
  panels = data.charts.map(panelOf);
  const groups = Map.groupBy(panels, ({ chart }) => chart.group);
  $("charts").replaceChildren(...[...groups].map(([name, group]) => make("section", {},
    group[0].chart.wide ? "" : make("h2", { textContent: name }),
    make("div", { className: "grid" }, ...group.map(({ figure }) => figure)))));
  for (const { frame } of panels) {
    seen.observe(frame);
    resized.observe(frame);
  }
};

// Controls

const VIEWS = { "close-up": "close-up", most: "no outliers", all: "all values" };
const choice = (key, labels) => {
  const select = make("select", {}, ...Object.entries(labels).map(([value, textContent]) =>
    make("option", { value, textContent, selected: value === state[key] })));
  select.addEventListener("input", () => {
    if (key === "axis") state.range = null;
    state[key] = select.value;
    redrawAll();
  });
  return select;
};
const controls = () => {
  const smooth = make("input", { type: "range", min: 0, max: 20, value: state.smooth });
  const output = make("output", { textContent: `${state.smooth} %` });
  smooth.addEventListener("input", () => {
    state.smooth = Number(smooth.value);
    output.textContent = `${state.smooth} %`;
    redrawAll();
  });
  const whole = make("button", { type: "button", textContent: "whole run" });
  whole.addEventListener("click", () => zoom(null));
  $("controls").replaceChildren(make("label", {}, "x ", choice("axis", data.axes)),
    make("label", {}, "smooth ", smooth, " ", output), make("label", {}, "y ", choice("view", VIEWS)),
    make("span", { className: "hint" }, "drag to zoom, double click or ", whole),
    ...(data.runs.length > 1 ? data.runs.map(runSwitch) : []));
};
const runSwitch = ({ name }, i) => {
  const button = make("button", { type: "button", className: "run", title: "double click: only this one",
    ariaPressed: String(!state.hidden.has(name)) }, make("i"), name);
  button.style.setProperty("--c", `var(--c${i % FEW})`);
  const show = (hidden) => {
    state.hidden = hidden;
    document.querySelectorAll(".run").forEach((other, j) => { other.ariaPressed = !hidden.has(data.runs[j].name); });
    redrawAll();
  };
  button.addEventListener("click", () => show(state.hidden.symmetricDifference(new Set([name]))));
  button.addEventListener("dblclick", () => show(new Set(data.runs.map((run) => run.name).filter((run) => run !== name))));
  return button;
};

// Tables of runs: colours, and sorting by a clicked column

const SIZES = { K: 1e3, M: 1e6, B: 1e9, T: 1e12 };
const number = (text) => {
  const match = /^(-?[\d,.]+(?:e-?\d+)?)([KMBT]?)\b/.exec(text);
  return match ? Number(match[1].replaceAll(",", "")) * (SIZES[match[2]] ?? 1) : NaN;
};
const dressTables = () => {
  for (const row of document.querySelectorAll("tr[data-run]")) {
    row.style.setProperty("--c", `var(--c${row.dataset.run % FEW})`);
    row.cells[0].prepend(make("i"));
  }
  for (const head of document.querySelectorAll("table.runs thead th")) head.addEventListener("click", () => {
    const down = head.ariaSort !== "ascending", body = head.closest("table").tBodies[0];
    for (const cell of head.parentNode.cells) cell.ariaSort = null;
    head.ariaSort = down ? "ascending" : "descending";
    const text = (row) => row.cells[head.cellIndex].textContent;
    const compare = (a, b) => number(text(a)) - number(text(b)) || text(a).localeCompare(text(b));
    body.append(...[...body.rows].sort((a, b) => (down ? 1 : -1) * compare(a, b)));
  });
};

controls();
dressTables();
lay();
dark.addEventListener("change", lay);
addEventListener("beforeprint", () => {
  for (const panel of panels) {
    panel.near = true;
    if (panel.dirty) redraw(panel);
  }
});
