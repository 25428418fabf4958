// Line charts over the last hour as SVG: axes, gaps where nothing is known, a cursor
// for pointer and arrow keys, and the same in words for readers of the page.
import { h, setAttribute, setText, svg } from "./dom.js";
import { clock, clockMinutes, isNumber } from "./format.js";

const HOUR_MS = 3_600_000;
const HEIGHT = 148;
const EDGE = { left: 46, right: 8, top: 8, bottom: 20 };
const GAP_MS = 35_000;

/** A chart of some fields of samples.

    `series`: `{ name, of(sample), show(value) }`, at most three; `unit` names the y
    axis for people who hear it.
 */
export class Chart {
  constructor(title, unit, series) {
    this.title = title;
    this.unit = unit;
    this.series = series;
    this.samples = [];
    this.width = 400;
    this.cursor = null;
    this.build();
    new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width > 0 && width !== this.width) {
        this.width = width;
        this.draw();
      }
    }).observe(this.plot);
  }

  build() {
    this.drawing = svg("svg", { height: HEIGHT, "aria-hidden": "true" });
    this.plot = h("div", {
      class: "chart-plot", tabindex: "0", role: "img", "aria-label": this.title,
    }, this.drawing);
    this.values = this.series.map(() => h("b", {}, "–"));
    this.legend = h("ul", { class: "legend" }, ...this.series.map((one, index) =>
      h("li", { class: `f${index + 1}` }, one.name, this.values[index])));
    this.at = h("span", { class: "note end" }, "last hour");
    this.node = h("section", { class: "card" },
      h("div", { class: "card-head" }, h("h2", {}, this.title), this.at),
      h("div", { class: "card-body" },
        h("figure", { class: "chart" }, this.legend, this.plot)));
    this.plot.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.select(null));
    this.plot.addEventListener("blur", () => this.select(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  set(samples) {
    this.samples = samples;
    if (this.cursor !== null && this.cursor >= samples.length) this.cursor = null;
    this.draw();
  }

  key(event) {
    const last = this.samples.length - 1;
    const now = this.cursor ?? last;
    const moves = {
      ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, Escape: null,
    };
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    const to = moves[event.key];
    this.select(to === null ? null : Math.min(Math.max(to, 0), last));
  }

  point(x) {
    let best = null;
    for (let index = 0; index < this.samples.length; index += 1) {
      const away = Math.abs(this.x(this.samples[index].at_ms) - x);
      if (best === null || away < best.away) best = { index, away };
    }
    this.select(best?.index ?? null);
  }

  select(index) {
    if (this.cursor === index) return;
    this.cursor = index;
    this.draw();
  }

  x(ms) {
    const share = (ms - this.from) / HOUR_MS;
    return EDGE.left + share * (this.width - EDGE.left - EDGE.right);
  }

  y(value) {
    const room = HEIGHT - EDGE.top - EDGE.bottom;
    return EDGE.top + room * (1 - value / this.top);
  }

  draw() {
    const newest = this.samples.at(-1);
    this.until = newest?.at_ms ?? Date.now();
    this.from = this.until - HOUR_MS;
    const shown = this.samples.filter((sample) => sample.at_ms >= this.from);
    const all = this.series.flatMap(({ of }) => shown.map(of)).filter(isNumber);
    this.step = niceStep(Math.max(0, ...all));
    this.top = this.step * 3;
    setAttribute(this.drawing, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.drawing.replaceChildren(
      ...this.grid(),
      ...this.series.flatMap((one, index) => this.line(shown, one, index + 1)),
      ...this.mark(),
    );
    this.say(shown);
  }

  grid() {
    const parts = [];
    for (let tick = 0; tick <= 3; tick += 1) {
      const y = Math.round(this.y(tick * this.step)) + 0.5;
      parts.push(
        svg("line", { class: "grid", x1: EDGE.left, x2: this.width - EDGE.right, y1: y, y2: y }),
        svg("text", { class: "axis", x: EDGE.left - 6, y: y + 3.5, "text-anchor": "end" },
          tick === 0 ? "0" : this.series[0].axis(tick * this.step)),
      );
    }
    for (let part = 0; part <= 2; part += 1) {
      const ms = this.from + (part * HOUR_MS) / 2;
      const anchor = ["start", "middle", "end"][part];
      parts.push(svg("text", {
        class: "axis", x: this.x(ms), y: HEIGHT - 4, "text-anchor": anchor,
      }, clockMinutes(ms)));
    }
    return parts;
  }

  line(shown, { of }, number) {
    const runs = [];
    let last = null;
    for (const sample of shown) {
      const value = of(sample);
      if (!isNumber(value)) continue;
      const point = { x: this.x(sample.at_ms), y: this.y(value), at: sample.at_ms };
      if (last === null || point.at - last.at > GAP_MS) runs.push([]);
      runs.at(-1).push(point);
      last = point;
    }
    return runs.flatMap((run) => {
      if (run.length === 1) {
        return [svg("circle", { class: `f${number}`, cx: run[0].x, cy: run[0].y, r: 1.75 })];
      }
      const path = run.map(({ x, y }, at) =>
        `${at === 0 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      const floor = this.y(0).toFixed(1);
      const area = `${path}L${run.at(-1).x.toFixed(1)} ${floor}L${run[0].x.toFixed(1)} ${floor}Z`;
      return [
        number === 1 ? svg("path", { class: "area f1", d: area }) : "",
        svg("path", { class: `line s${number}`, d: path }),
      ].filter(Boolean);
    });
  }

  mark() {
    const sample = this.cursor === null ? undefined : this.samples[this.cursor];
    if (sample === undefined) return [];
    const x = this.x(sample.at_ms);
    const dots = this.series.map(({ of }, index) => [of(sample), index + 1])
      .filter(([value]) => isNumber(value))
      .map(([value, number]) =>
        svg("circle", { class: `f${number}`, cx: x, cy: this.y(value), r: 3 }));
    return [
      svg("line", { class: "cursor", x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
      ...dots,
    ];
  }

  say(shown) {
    const sample = this.samples[this.cursor ?? this.samples.length - 1];
    this.series.forEach(({ of, show }, index) =>
      setText(this.values[index], sample === undefined ? "–" : show(of(sample))));
    setText(this.at, this.cursor === null ? "last hour" : clock(sample.at_ms));
    if (this.cursor !== null) {
      const parts = this.series.map(({ name, of, show }) => `${name} ${show(of(sample))}`);
      setAttribute(this.plot, "aria-label", `${clock(sample.at_ms)}: ${parts.join(", ")}`);
      return;
    }
    const words = this.series.map(({ name, of, show }) => {
      const values = shown.map(of).filter(isNumber);
      if (values.length === 0) return `${name}: no values`;
      return `${name}: now ${show(values.at(-1))}, lowest ${show(Math.min(...values))}, ` +
        `highest ${show(Math.max(...values))}`;
    });
    setAttribute(this.plot, "aria-label",
      `${this.title}, ${this.unit}, last hour. ${words.join(". ")}. ` +
      "Arrow keys move through the samples.");
  }
}

/** A third of the axis, round to the eye: 1, 2, 2.5 or 5 times a power of ten. */
function niceStep(highest) {
  if (highest <= 0) return 1;
  const rough = highest / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough - 1e-9);
  return factor * power;
}
