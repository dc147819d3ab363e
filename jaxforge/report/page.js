// The pointer's position on every chart at once: the values there in the legends, and where they are
// under the axis. Between drawn points the nearest one is told; of a heat map also the band of the
// colour under the pointer, and whose load it is.
"use strict";
(() => {
  const page = document.querySelector("main");
  const low = Number(page.dataset.low), high = Number(page.dataset.high);
  const charts = [...document.querySelectorAll("figure")].map((figure) => ({
    cursors: [...figure.querySelectorAll(".cursor")],
    names: [...figure.querySelectorAll("text.name")],
    values: [...figure.querySelectorAll(".legend b")],
    data: JSON.parse(figure.querySelector("script").textContent),
  }));
  for (const { data } of charts) for (const curve of data) curve.x ??= data[0].x;
  const bands = new Map([...document.querySelectorAll(".bands li")].map(
    (band) => [getComputedStyle(band.querySelector("i")).backgroundColor, band.title]));

  const exact = (v) => {
    if (v === null) return "not finite";
    if (Number.isInteger(v) || Math.abs(v) >= 1e4) return Math.round(v).toLocaleString("en-US");
    if (Math.abs(v) >= 1e-3) return v.toPrecision(5);
    return v.toExponential(3).replace(/\.?0*e/, "e").replace("e+", "e");
  };

  const nearest = (xs, x) => {
    let a = 0, b = xs.length - 1;
    while (b - a > 1) {
      const middle = (a + b) >> 1;
      if (xs[middle] < x) a = middle; else b = middle;
    }
    return x - xs[a] <= xs[b] - x ? a : b;
  };

  const show = (x) => {
    const at = `${(100 * (x - low)) / (high - low)}%`;
    page.classList.add("on");
    for (const { cursors, names, values, data } of charts) {
      for (const cursor of cursors) {
        cursor.setAttribute("x1", at);
        cursor.setAttribute("x2", at);
      }
      const points = data.map((curve) => nearest(curve.x, x));
      values.forEach((value, i) => { value.textContent = exact(data[i].y[points[i]]); });
      const places = new Set(points.map((point, i) => exact(data[i].x[point])));
      for (const name of names) name.textContent = `${page.dataset.axis} ${[...places].join(" / ")}`;
    }
  };

  const pixelsOf = (picture) => {
    const canvas = document.createElement("canvas");
    canvas.width = picture.naturalWidth;
    canvas.height = picture.naturalHeight;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(picture, 0, 0);
    return context;
  };

  const expertAt = (picture, pixels, event) => {
    const box = picture.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * picture.naturalWidth);
    const row = Math.floor(((event.clientY - box.top) / box.height) * picture.naturalHeight);
    const [red, green, blue, opacity] = pixels.getImageData(column, row, 1, 1).data;
    return opacity ? `, expert ${row}: ${bands.get(`rgb(${red}, ${green}, ${blue})`)}` : "";
  };

  const rest = () => {
    page.classList.remove("on");
    for (const value of page.querySelectorAll(".legend b")) value.textContent = value.dataset.last;
    for (const name of page.querySelectorAll("text.name")) name.textContent = page.dataset.axis;
  };

  let position = high;
  for (const plot of document.querySelectorAll(".plot")) {
    const picture = plot.querySelector("img");
    let pixels = null;
    const follow = (event) => {
      const box = plot.getBoundingClientRect();
      const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      show((position = low + part * (high - low)));
      if (!picture) return;
      pixels ??= pixelsOf(picture);
      plot.querySelector("text.name").textContent += expertAt(picture, pixels, event);
    };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", rest);
    plot.addEventListener("blur", rest);
    plot.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return;
      event.preventDefault();
      position = Math.min(high, Math.max(low, position + (way * (high - low)) / 100));
      show(position);
    });
  }
})();
