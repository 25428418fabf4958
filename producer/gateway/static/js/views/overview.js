// The pool at a glance: figures, an hour of charts, queues, groups, who waits, what runs.
import { get } from "../api.js";
import { Chart } from "../chart.js";
import { h, setText } from "../dom.js";
import { count, duration, rate } from "../format.js";
import { complain } from "../notices.js";
import { groups, processes, recent, tenants } from "./overview_tables.js";
import { queues } from "./queues.js";

const MOST_SAMPLES = 360;
const MOST_APART_MS = 25_000;

export function overview({ live, me }) {
  const tiles = makeTiles(me);
  const charts = makeCharts();
  const parts = [tiles, queues(), groups(), recent()];
  const pair = [tenants(me), ...(me.is_admin ? [processes()] : [])];
  const node = h("div", { class: "view" },
    h("div", { class: "view-head" }, h("h1", {}, "Overview")),
    tiles.node,
    h("div", { class: "charts" }, ...charts.all.map((chart) => chart.node)),
    ...parts.slice(1).map((part) => part.node),
    h("div", { class: "pair" }, ...pair.map((part) => part.node)));
  const load = () =>
    get("/v1/admin/history").then(({ data }) => charts.set(data)).catch(complain);
  const stops = [
    live.on("snapshot", (view) => [...parts, ...pair].forEach((part) => part.update(view))),
    live.on("sample", (sample) => charts.add(sample) || load()),
  ];
  load();
  return { title: "Overview", node, leave: () => stops.forEach((stop) => stop()) };
}

function makeTiles(me) {
  const of = (name) => {
    const figure = h("span", {}, "–");
    const unit = h("small", {});
    const under = h("dd", { class: "under" }, "");
    return {
      node: h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, figure, " ", unit), under),
      set(value, unitText, underText) {
        setText(figure, value);
        setText(unit, unitText);
        setText(under, underText);
        under.title = underText;
      },
    };
  };
  const waiting = of("Waiting");
  const running = of("Running");
  const tokens = of("Output");
  const jobs = of("Finished");
  const ttft = of("First token, median");
  const dead = of(me.is_admin ? "Dead letters" : "Whole job, median");
  const node = h("dl", { class: "tiles" },
    ...[waiting, running, tokens, jobs, ttft, dead].map((tile) => tile.node));
  return {
    node,
    update(view) {
      const byClass = new Map(view.classes.map((one) => [one.name, one.jobs]));
      const room = view.groups.reduce((sum, group) => sum + group.max_running, 0);
      waiting.set(count(view.waiting_jobs), "jobs",
        `${count(byClass.get("interactive") ?? 0)} interactive, ` +
        `${count(byClass.get("bulk") ?? 0)} bulk` +
        (view.delayed ? `, ${count(view.delayed)} later` : ""));
      running.set(count(view.running), "", `room for ${count(room)} in ` +
        `${count(view.groups.length)} ${view.groups.length === 1 ? "group" : "groups"}`);
      tokens.set(rate(view.rates.tokens_per_s), "tokens/s", "all groups, last 10 s");
      const failed = view.rates.failed_per_s;
      jobs.set(rate(view.rates.jobs_per_s), "jobs/s",
        failed > 0 ? `${rate(failed)} failed/s` : "none failed, last 10 s");
      const { latency } = view;
      ttft.set(...split(duration(latency.ttft_p50_ms)),
        `p95 ${duration(latency.ttft_p95_ms)}, p99 ${duration(latency.ttft_p99_ms)}`);
      if (me.is_admin) {
        dead.set(count(view.dead_letters), "", view.dead_letters ? "waiting for you" : "none");
      } else {
        dead.set(...split(duration(latency.total_p50_ms)),
          `p95 ${duration(latency.total_p95_ms)}`);
      }
    },
  };
}

/** "1.2 s" as figure and unit; longer ones stay whole. */
function split(text) {
  const parts = text.split(" ");
  return parts.length === 2 ? parts : [text, ""];
}

function makeCharts() {
  const all = [
    new Chart("Throughput", "output tokens per second", [
      { name: "tokens/s", of: (s) => s.tokens_per_s, show: rate, axis: count },
    ]),
    new Chart("First token", "time since enqueue", [
      { name: "median", of: (s) => s.ttft_p50_ms, show: duration, axis: duration },
      { name: "p95", of: (s) => s.ttft_p95_ms, show: duration },
      { name: "p99", of: (s) => s.ttft_p99_ms, show: duration },
    ]),
    new Chart("Whole job", "time since enqueue", [
      { name: "median", of: (s) => s.total_p50_ms, show: duration, axis: duration },
      { name: "p95", of: (s) => s.total_p95_ms, show: duration },
      { name: "p99", of: (s) => s.total_p99_ms, show: duration },
    ]),
    new Chart("Jobs in hand", "jobs", [
      { name: "running", of: (s) => s.running, show: count, axis: rate },
      { name: "waiting interactive", of: (s) => s.waiting?.interactive, show: count },
      { name: "waiting bulk", of: (s) => s.waiting?.bulk, show: count },
    ]),
  ];
  let samples = [];
  const set = (list) => {
    samples = list.slice(-MOST_SAMPLES);
    for (const chart of all) chart.set(samples);
  };
  set([]);
  return {
    all,
    set,
    /** Whether nothing is missing before the sample, as after a while out of sight. */
    add(sample) {
      const last = samples.at(-1)?.at_ms ?? 0;
      if (sample.at_ms > last) set([...samples, sample]);
      return sample.at_ms - last < MOST_APART_MS;
    },
  };
}
