// User interface: charts with their heads, drawn when they come near the window; controls, tables, and
// with `--watch` newer data. It follows `drawing.js` in the same function.

// Panels: a chart with its head

let panels = [];
const sizeOf = ({ frame }) => ({ width: frame.clientWidth, height: frame.clientHeight });
const redraw = (panel) => {
  panel.dirty = true;
  if (!panel.near) return;
  panel.dirty = false;
  panel.plot?.destroy();
  panel.plot = (panel.chart.experts ? drawMap : drawChart)(panel);
  if (!panel.plot) return;
  if (state.range && !panel.chart.x) rezoom(panel.plot);
  if (!panel.chart.experts) tell(panel, panel.plot);
};
const redrawAll = () => panels.forEach(redraw);
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const panel = panels.find((item) => item.frame === target);
    if (!panel) continue;
    panel.near = isIntersecting;
    if (isIntersecting && panel.dirty) redraw(panel);
  }
}, { rootMargin: "600px" });
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const panel = panels.find((item) => item.frame === target);
    if (panel?.plot && panel.plot.width !== target.clientWidth) panel.plot.setSize(sizeOf(panel));
  }
});

const entryOf = (panel, key, label, look, last, name = "") => {
  const value = make("b", { textContent: exact(last) });
  const swatch = make("i");
  if (look) swatch.style.setProperty("--c", look);
  const entry = make("li", { title: name }, ...(look ? [swatch] : []), `${label} `, value);
  panel.entries.set(key, { entry, value });
  return entry;
};
const legendOf = (panel) => {
  const { chart } = panel;
  if (chart.experts) {
    return [entryOf(panel, "least", "least", null, decoded(chart.least).at(-1)),
      entryOf(panel, "most", "most", null, decoded(chart.most).at(-1))];
  }
  return chart.curves.map((curve) => {
    const look = curve.shade === undefined ? `var(--c${curve.colour % FEW})` : mixed(curve.shade);
    const alone = chart.curves.length === 1 && data.runs.length === 1;
    return entryOf(panel, curve, alone ? "" : curve.label, alone ? null : look, curve.last, curve.name);
  });
};
const logSwitch = (panel) => {
  const { chart } = panel;
  if (chart.experts || chart.zero) return [];
  const box = make("input", { type: "checkbox", checked: state.log.has(chart.title) });
  box.addEventListener("change", () => {
    state.log[box.checked ? "add" : "delete"](chart.title);
    redraw(panel);
  });
  return [make("label", {}, box, " log")];
};
const panelOf = (chart) => {
  const panel = { chart, entries: new Map(), dirty: true, near: false, plot: null, curves: [], focused: null };
  panel.where = make("span", { className: "where" });
  panel.frame = make("div", { className: "plot", tabIndex: 0 });
  if (chart.experts) panel.frame.style.height = `${Math.min(Math.max(0.5 * chart.experts, 4), 9) + 4}rem`;
  panel.frame.setAttribute("role", "img");
  panel.frame.setAttribute("aria-label", `${chart.title}, ${chart.unit} ${chart.description ?? ""}`);
  panel.frame.addEventListener("keydown", (event) => stepPointer(panel, event));
  const bad = (chart.curves ?? []).reduce((sum, curve) => sum + (curve.bad_count ?? 0), 0);
  const legend = make("ul", { className: "legend" }, ...legendOf(panel));
  panel.figure = make("figure", { className: chart.wide ? "wide" : "" },
    make("figcaption", {},
      make("h3", {}, chart.title, " ", make("small", { textContent: chart.unit })), ...logSwitch(panel),
      ...(bad ? [make("span", { className: "note", textContent: `${bad.toLocaleString("en-US")} not finite` })] : []), panel.where, legend),
    panel.frame);
  for (const [curve, { entry }] of panel.entries) entry.hidden = panel.entries.size > MANY;
  return panel;
};
const stepPointer = ({ plot }, event) => {
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!way || !plot) return;
  event.preventDefault();
  const i = Math.min(Math.max((plot.cursor.idx ?? plot.data[0].length) + way, 0), plot.data[0].length - 1);
  plot.setCursor({ left: plot.valToPos(plot.data[0][i], "x"), top: 1 }, true, true);
};

const lay = () => {
  for (const panel of panels) {
    panel.plot?.destroy();
    seen.unobserve(panel.frame);
    resized.unobserve(panel.frame);
  }
  const groups = new Map();
  panels = [...data.charts, ...(data.maps ?? [])].map(panelOf);
  for (const panel of panels) {
    const group = panel.chart.group ?? "Load of experts";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(panel.figure);
  }
  $("charts").replaceChildren(...[...groups].map(([name, figures]) => make("section", {},
    ...(name && !figures[0].classList.contains("wide") ? [make("h2", { textContent: name })] : []),
    ...(name === "Load of experts" ? [scaleOf()] : []),
    make("div", { className: "grid" }, ...figures))));
  for (const { frame } of panels) {
    seen.observe(frame);
    resized.observe(frame);
  }
};
const scaleOf = () => make("ol", { className: "bands" }, ...data.bands.map((band, i) => {
  const swatch = make("i");
  swatch.style.background = `rgb(${(dark.matches ? band.dark : band.light).join(",")})`;
  return make("li", { title: band.name }, swatch, make("span", { className: i % 2 ? "odd" : "", textContent: band.name.split(" ")[0] }));
}));

// Controls

const VIEWS = [["close-up", "close-up", "after the first tenth, but for one value in fifty"],
  ["most", "no outliers", "all but one value in fifty"], ["all", "all values", ""]];
const control = (text, input, change) => {
  input.addEventListener("input", change);
  return make("label", {}, `${text} `, input);
};
const controls = () => {
  const axis = make("select", {}, ...Object.entries(data.axes).map(([key, label]) =>
    make("option", { value: key, selected: key === state.axis, textContent: label })));
  const smooth = make("input", { type: "range", min: 0, max: 20, step: 1, value: state.smooth });
  const output = make("output", { textContent: `${state.smooth} %` });
  const view = make("select", {}, ...VIEWS.map(([value, text, title]) =>
    make("option", { value, title, selected: value === state.view, textContent: text })));
  const whole = make("button", { type: "button", textContent: "whole run" });
  whole.addEventListener("click", () => zoom(null));
  $("controls").replaceChildren(
    make("div", { className: "settings" },
      control("x", axis, () => { state.axis = axis.value; state.range = null; redrawAll(); }),
      make("span", {}, control("smooth", smooth, () => {
        state.smooth = Number(smooth.value);
        output.textContent = `${state.smooth} %`;
        redrawAll();
      }), " ", output),
      control("y", view, () => { state.view = view.value; redrawAll(); }),
      make("span", { className: "hint" }, "drag to zoom, double click or ", whole)),
    ...(data.runs.length > 1 ? [make("ul", { className: "chips" }, ...data.runs.map(chip))] : []));
};
const chip = (run, i) => {
  const button = make("button", { type: "button" }, make("i"), run.name);
  button.style.setProperty("--c", `var(--c${i % FEW})`);
  button.title = "click: hide or show; double click: only this one";
  const show = () => button.setAttribute("aria-pressed", String(!state.hidden.has(run.name)));
  show();
  button.addEventListener("click", () => {
    if (!state.hidden.delete(run.name)) state.hidden.add(run.name);
    show();
    redrawAll();
  });
  button.addEventListener("dblclick", () => {
    state.hidden = new Set(data.runs.map(({ name }) => name).filter((name) => name !== run.name));
    controls();
    redrawAll();
  });
  for (const [event, on] of [["pointerenter", true], ["pointerleave", false]]) {
    button.addEventListener(event, () => highlight(on ? i : null));
  }
  return make("li", {}, button);
};
const highlight = (run) => {
  for (const { plot, curves, chart } of panels) {
    if (!plot || chart.experts) continue;
    curves.forEach((curve, i) => { plot.series[i + 1].alpha = run === null || curve.run === run ? 1 : 0.12; });
    plot.redraw(false);
  }
};

// Tables of runs: colours, and sorting by a clicked column

const SIZES = { K: 1e3, M: 1e6, B: 1e9, T: 1e12 };
const number = (text) => {
  const match = /^(-?[\d,.]+(?:e-?\d+)?)([KMBT]?)\b/.exec(text);
  return match ? Number(match[1].replaceAll(",", "")) * (SIZES[match[2]] ?? 1) : NaN;
};
const dressTables = () => {
  for (const row of document.querySelectorAll("tr[data-run]")) {
    const swatch = make("i");
    swatch.style.setProperty("--c", `var(--c${row.dataset.run % FEW})`);
    row.cells[0].prepend(swatch);
  }
  for (const head of document.querySelectorAll("table.runs thead th")) {
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "ascending", body = head.closest("table").tBodies[0];
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "ascending" : "descending");
      const text = (row) => row.cells[head.cellIndex].textContent;
      const compare = (a, b) => {
        const [x, y] = [number(text(a)), number(text(b))];
        return Number.isNaN(x) || Number.isNaN(y) ? text(a).localeCompare(text(b)) : x - y;
      };
      body.append(...[...body.rows].sort((a, b) => (down ? 1 : -1) * compare(a, b)));
    });
  }
};

// Newer data, with `--watch`

const EVERY = 4000;
const replaced = (id, html) => {
  const open = new Set([...$(id).querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  $(id).innerHTML = html; // HTML from Python, which escapes the text of runs
  for (const summary of $(id).querySelectorAll("summary")) summary.parentNode.open = open.has(summary.textContent);
};
const refresh = async (version) => {
  let next = version;
  try {
    const answer = await fetch(`data.json?since=${version}`, { cache: "no-store" });
    if (answer.status === 200) {
      const update = await answer.json();
      next = update.version;
      const scrolled = scrollY;
      data = { ...update.data, axis: state.axis, watch: true };
      decode();
      replaced("facts", update.facts);
      replaced("below", update.below);
      dressTables();
      document.title = document.querySelector("h1").textContent = update.title;
      controls();
      lay();
      scrollTo({ top: scrolled, behavior: "instant" });
    }
    document.body.classList.toggle("lost", !answer.ok && answer.status !== 304);
  } catch { // the server has ended: the page stays, and the server may come back
    document.body.classList.add("lost");
  }
  setTimeout(refresh, EVERY, next);
};

decode();
if (data.runs?.length) controls();
dressTables();
lay();
dark.addEventListener("change", () => { lay(); });
addEventListener("beforeprint", () => {
  for (const panel of panels) {
    panel.near = true;
    if (panel.dirty) redraw(panel);
  }
});
if (data.watch) setTimeout(refresh, EVERY, data.version ?? "");
